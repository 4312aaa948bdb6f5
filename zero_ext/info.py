"""``python -m zero_ext.info``: what an issue report needs to say."""

import importlib.metadata
import os
import platform
from collections.abc import Callable

import torch
import torch.distributed as dist

from zero_ext import _C, _build_info


def collect() -> dict[str, str]:
    """Names and values in the order in which they are printed. Never raises."""
    return {name: _tolerant(fact) for name, fact in FACTS.items()}


def _tolerant(fact: Callable[[], object]) -> str:
    try:
        return str(fact())
    except Exception as error:  # a report with a hole is worth more than none
        return f"unknown ({type(error).__name__}: {error})"


def _torch_cuda() -> str:
    if torch.version.cuda is None:
        return "no"
    devices = torch.cuda.device_count()
    return f"{torch.version.cuda}, {devices} device{'s' * (devices != 1)}"


def _backends() -> str:
    if not dist.is_available():
        return "none: torch.distributed is not available"
    available = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }
    return ", ".join(name for name, check in available.items() if check()) or "none"


FACTS: dict[str, Callable[[], object]] = {
    "zero_ext": lambda: importlib.metadata.version("zero_ext"),
    "extension": lambda: _C.__file__,
    "built for torch": lambda: _build_info.TORCH_VERSION,
    "CUDA kernels": lambda: "yes" if _build_info.CUDA else "no",
    "instruction set": lambda: _C.cpu_instruction_set(),
    "torch": lambda: torch.__version__,
    "torch's CUDA": _torch_cuda,
    "torch's backends": _backends,
    "torch's threads": torch.get_num_threads,
    "processors": lambda: len(os.sched_getaffinity(0)),
    "python": platform.python_version,
    "platform": platform.platform,
}


def main() -> None:
    facts = collect()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
