"""The attributes of DeepSpeed's optimizers about their loss scale and their last step."""

import functools
from weakref import WeakKeyDictionary

from zero_ext import _C
from zero_ext.optim.sharded import Sharded

_verdicts: WeakKeyDictionary[Sharded, _C.StepVerdict] = WeakKeyDictionary()  # on the last steps


class Telling(Sharded):
    @property
    def loss_scale(self) -> float:
        return 1.0 if self.loss_scaler is None else self.loss_scaler.get_scale()

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler is not None and self.loss_scaler.dynamic

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped for NaN or Inf. Waits for the device to know."""
        return self.skipped_steps > 0 and _verdicts[self].nonfinite

    def _zero_prepare_step(self, divide_by: float | None) -> _C.StepVerdict:
        verdict = _verdicts[self] = super()._zero_prepare_step(divide_by)
        return verdict


_telling = functools.cache(lambda kind: type(kind.__name__, (Telling, kind), {}))


def tell(optimizer: Sharded) -> Sharded:
    """Add ``Telling`` to the optimizer's class, unless that has one of these names itself."""
    names = ("loss_scale", "cur_scale", "dynamic_loss_scale", "overflow")
    if not any(hasattr(optimizer, name) for name in names):
        optimizer.__class__ = _telling(type(optimizer))
    return optimizer
