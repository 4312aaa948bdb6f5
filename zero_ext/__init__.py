"""ZeRO for PyTorch in C++: sharded optimizer state and gradients, right by construction.

``shard(module)`` and ``optim.AdamW(module.parameters())``, or that optimizer alone in an existing
script. See README.md and docs/.
"""

import importlib
from typing import TYPE_CHECKING, Any

from zero_ext import _compat

_compat.check()

from zero_ext import _C, ops  # noqa: E402, F401

if TYPE_CHECKING:
    from zero_ext import checkpoint, data, elastic, optim
    from zero_ext.deepspeed.initialization import initialize
    from zero_ext.engine.memory import estimate_memory, stats
    from zero_ext.engine.offload import offload_states, reload_states
    from zero_ext.fingerprints import fingerprint, parameter_fingerprints
    from zero_ext.module.forward_methods import register_forward_method
    from zero_ext.module.methods import no_sync, summon_full_params
    from zero_ext.module.sharding import shard
    from zero_ext.optim.scaler import LossScaler
    from zero_ext.state.changes import change_token, iter_changed_params
    from zero_ext.state.ema import EMA
    from zero_ext.state.iteration import iter_full_params
    from zero_ext.state.receiving import apply_changes
    from zero_ext.state.reductions import gradient_reductions
    from zero_ext.state.unwrapping import unwrap
    from zero_ext.state.values import (
        full_grad,
        full_state,
        full_tensor,
        local_gradients,
        set_full_grad,
        set_full_param,
        set_full_state,
    )
    from zero_ext.training_log import TrainingLog, metrics

# Each name is imported when it is first used. DTensor, which all of them need, takes torch longer
# to import than torch itself.
_MODULES = {
    "EMA": "state.ema",
    "LossScaler": "optim.scaler",
    "TrainingLog": "training_log",
    "apply_changes": "state.receiving",
    "change_token": "state.changes",
    "estimate_memory": "engine.memory",
    "fingerprint": "fingerprints",
    "full_grad": "state.values",
    "full_state": "state.values",
    "full_tensor": "state.values",
    "gradient_reductions": "state.reductions",
    "initialize": "deepspeed.initialization",
    "iter_changed_params": "state.changes",
    "iter_full_params": "state.iteration",
    "local_gradients": "state.values",
    "metrics": "training_log",
    "no_sync": "module.methods",
    "offload_states": "engine.offload",
    "parameter_fingerprints": "fingerprints",
    "register_forward_method": "module.forward_methods",
    "reload_states": "engine.offload",
    "set_full_grad": "state.values",
    "set_full_param": "state.values",
    "set_full_state": "state.values",
    "shard": "module.sharding",
    "stats": "engine.memory",
    "summon_full_params": "module.methods",
    "unwrap": "state.unwrapping",
}
_PACKAGES = ("checkpoint", "data", "elastic", "optim")

__version__ = "0.1.0"
__all__ = [
    "EMA",
    "LossScaler",
    "TrainingLog",
    "apply_changes",
    "change_token",
    "checkpoint",
    "data",
    "elastic",
    "estimate_memory",
    "fingerprint",
    "full_grad",
    "full_state",
    "full_tensor",
    "gradient_reductions",
    "initialize",
    "iter_changed_params",
    "iter_full_params",
    "local_gradients",
    "metrics",
    "no_sync",
    "offload_states",
    "ops",
    "optim",
    "parameter_fingerprints",
    "register_forward_method",
    "reload_states",
    "set_full_grad",
    "set_full_param",
    "set_full_state",
    "shard",
    "stats",
    "summon_full_params",
    "unwrap",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f"zero_ext.{_MODULES[name]}"), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"zero_ext.{name}")
    else:
        raise AttributeError(f"module 'zero_ext' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PACKAGES})
