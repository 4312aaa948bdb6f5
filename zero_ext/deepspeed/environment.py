"""The process group of a script that torchrun has started."""

import os
from typing import Any

import torch
import torch.distributed as dist


def init_distributed(dist_backend: str | None = None, **arguments: Any) -> None:
    """Make the process group, in a process that torchrun has started, unless there is one.

    Args:
        dist_backend: As ``backend`` of ``init_process_group``. Default: torch's choice.
        arguments: ``timeout`` and ``init_method`` are passed on; DeepSpeed's others are ignored.
    """
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        return
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    passed = {k: v for k, v in arguments.items() if k in ("timeout", "init_method")}
    dist.init_process_group(dist_backend, **passed)
