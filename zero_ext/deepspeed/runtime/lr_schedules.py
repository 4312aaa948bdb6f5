"""``deepspeed.runtime.lr_schedules``: the schedules that scripts make themselves."""

from zero_ext.deepspeed.schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
