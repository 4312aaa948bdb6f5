"""gloo as a GPU's own backend, "gccl": for several ranks on one GPU, which NCCL rejects.

It is as slow as host memory, and its waits block the host. Where devices read each other's memory,
it has only what ranks agree on.
"""

import torch.distributed as dist

_made: list[dist.Backend] = []  # torch keeps the part of one that is C++


class DeviceGloo(dist.ProcessGroupGloo):
    def name(self) -> str:
        return "gccl"


def _make(store: dist.Store, rank: int, size: int, timeout) -> dist.Backend:
    _made.append(DeviceGloo(store, rank, size, timeout))
    return _made[-1]


def register() -> None:
    """``dist.init_process_group("cpu:gloo,cuda:gccl")`` is possible from now on."""
    dist.Backend.register_backend("gccl", _make, devices=["cuda"])
