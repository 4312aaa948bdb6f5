"""ZeRO for PyTorch in C++: sharded optimizer state and gradients, right by construction.

``shard(module)`` and ``optim.AdamW(module.parameters())``, or that optimizer alone in an existing
script. See README.md and docs/.
"""

import importlib
from typing import TYPE_CHECKING, Any

from zero_ext import _compat

_compat.check()

from zero_ext import _C  # noqa: E402, F401
from zero_ext import ops as ops  # noqa: E402

if TYPE_CHECKING:
    from zero_ext import checkpoint as checkpoint
    from zero_ext import data as data
    from zero_ext import elastic as elastic
    from zero_ext import optim as optim
    from zero_ext.deepspeed.initialization import initialize as initialize
    from zero_ext.engine.memory import estimate_memory as estimate_memory
    from zero_ext.engine.memory import stats as stats
    from zero_ext.engine.offload import offload_states as offload_states
    from zero_ext.engine.offload import reload_states as reload_states
    from zero_ext.fingerprints import fingerprint as fingerprint
    from zero_ext.fingerprints import parameter_fingerprints as parameter_fingerprints
    from zero_ext.module.forward_methods import register_forward_method as register_forward_method
    from zero_ext.module.methods import no_sync as no_sync
    from zero_ext.module.methods import summon_full_params as summon_full_params
    from zero_ext.module.sharding import shard as shard
    from zero_ext.optim.scaler import LossScaler as LossScaler
    from zero_ext.state.changes import change_token as change_token
    from zero_ext.state.changes import iter_changed_params as iter_changed_params
    from zero_ext.state.ema import EMA as EMA
    from zero_ext.state.iteration import iter_full_params as iter_full_params
    from zero_ext.state.receiving import apply_changes as apply_changes
    from zero_ext.state.reductions import gradient_reductions as gradient_reductions
    from zero_ext.state.unwrapping import unwrap as unwrap
    from zero_ext.state.values import full_grad as full_grad
    from zero_ext.state.values import full_state as full_state
    from zero_ext.state.values import full_tensor as full_tensor
    from zero_ext.state.values import local_gradients as local_gradients
    from zero_ext.state.values import set_full_grad as set_full_grad
    from zero_ext.state.values import set_full_param as set_full_param
    from zero_ext.state.values import set_full_state as set_full_state
    from zero_ext.training_log import TrainingLog as TrainingLog
    from zero_ext.training_log import metrics as metrics

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
if not TYPE_CHECKING:  # type checkers know what is imported "as" its name
    __all__ = sorted([*_MODULES, *_PACKAGES, "ops"])


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
