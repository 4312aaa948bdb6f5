"""What this process holds of the system's and of Python's."""

import ctypes
import gc
import os
from collections import Counter
from pathlib import Path

import torch.distributed as dist


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated_bytes() -> int:
    """What malloc has handed out in this process, all threads. Sanitizers have their own malloc."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def held() -> Counter:
    """Counts of what a leak leaves behind, after a garbage collection."""
    gc.collect()
    return Counter(
        bytes=allocated_bytes(),
        objects=len(gc.get_objects()),
        maps=Path("/proc/self/maps").read_text().count("\n"),
        threads=len(os.listdir("/proc/self/task")),
        files=len(os.listdir("/proc/self/fd")),
        groups=len(dist.distributed_c10d._world.pg_map),
    )
