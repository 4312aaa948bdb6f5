"""The entry for scripts of FSDP2: ``from zero_ext.fsdp import fully_shard, MixedPrecisionPolicy``.

It has the names that ``torch.distributed.fsdp`` has for FSDP2. ``docs/fsdp2.md`` says of each call
and of each method of ``FSDPModule`` what it does here.
"""

from typing import Any

import torch.distributed.fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from zero_ext.fsdp.calls import fully_shard, register_fsdp_forward_method, share_comm_ctx
from zero_ext.fsdp.fsdp_module import FSDPModule, UnshardHandle

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def __getattr__(name: str) -> Any:
    if name == "DataParallelMeshDims":  # which older versions of torch do not have
        return torch.distributed.fsdp.DataParallelMeshDims
    raise AttributeError(f"module 'zero_ext.fsdp' has no attribute '{name}'")
