"""ZeRO for PyTorch in C++: sharded optimizer state and gradients, right by construction.

``shard(module)`` and ``optim.AdamW(module.parameters())``, or that optimizer alone in an existing
script. See README.md and docs/.
"""

from zero_ext import _compat

_compat.check()

from zero_ext import _C, checkpoint, ops, optim  # noqa: E402, F401
from zero_ext.deepspeed.initialization import initialize  # noqa: E402
from zero_ext.engine.memory import estimate_memory, stats  # noqa: E402
from zero_ext.engine.offload import offload_states, reload_states  # noqa: E402
from zero_ext.module.forward_methods import register_forward_method  # noqa: E402
from zero_ext.module.sharding import shard  # noqa: E402
from zero_ext.optim.scaler import LossScaler  # noqa: E402
from zero_ext.state.values import (  # noqa: E402
    full_grad,
    full_state,
    full_tensor,
    set_full_grad,
    set_full_param,
    set_full_state,
)

__version__ = "0.1.0"
__all__ = [
    "LossScaler",
    "checkpoint",
    "estimate_memory",
    "full_grad",
    "full_state",
    "full_tensor",
    "initialize",
    "offload_states",
    "ops",
    "optim",
    "register_forward_method",
    "reload_states",
    "set_full_grad",
    "set_full_param",
    "set_full_state",
    "shard",
    "stats",
]
