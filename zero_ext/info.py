"""``python -m zero_ext.info``: what an issue report needs to say."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

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


def _nccl(*, built: bool = False) -> str:
    """The version that is loaded, or the one that torch was built with."""
    if not dist.is_nccl_available():
        return "no"
    group = dist.ProcessGroupNCCL
    ask = group.get_build_nccl_version if built else group.get_runtime_nccl_version
    return ".".join(map(str, ask()))


def driver_in(about: str) -> str:
    """The version in the text of NVIDIA's driver about itself."""
    found = re.search(r"Module.*?\s(\d[\d.]+)", about)
    return found[1] if found else "no"


def _driver() -> str:
    about = Path("/proc/driver/nvidia/version")
    return driver_in(about.read_text() if about.exists() else "")


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
    "GPU": lambda: torch.cuda.get_device_name() if torch.cuda.is_available() else "no",
    "NVIDIA driver": _driver,
    "torch's backends": _backends,
    "NCCL": _nccl,
    "torch's NCCL": lambda: _nccl(built=True),
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
