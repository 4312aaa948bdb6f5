"""Small things that scripts import from DeepSpeed: a loader that repeats, fp32 files, enums."""

import contextlib
import enum
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad as DeepSpeedCPUAdagrad  # noqa: F401
from torch.profiler import record_function

from zero_ext.checkpoint.__main__ import fp32_state, write
from zero_ext.deepspeed.accelerator import get_accelerator
from zero_ext.deepspeed.utils import log_dist


class ZeroStageEnum(enum.IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class OffloadStateTypeEnum(str, enum.Enum):
    """Values of ``engine.offload_states(include=)``."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadDeviceEnum(str, enum.Enum):
    none = "none"
    cpu = "cpu"


class RepeatingLoader:
    """An iterator over ``loader`` that begins again at its end, without an end of its own."""

    def __init__(self, loader: Iterable):
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


@contextlib.contextmanager
def OnDevice(  # noqa: N802 - DeepSpeed's name
    dtype: torch.dtype, device: str = "meta", enabled: bool = True
) -> Iterator[None]:
    """Parameters that are made inside the context are on ``device``, in ``dtype``."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def is_zero_param(parameter: Any) -> bool:
    """Whether it is a parameter that stage 3 shards."""
    return hasattr(parameter, "ds_id")


def is_compile_supported() -> bool:
    return True


def instrument_w_nvtx(function: Callable) -> Callable:
    """The profiler shows each call by the function's name."""

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with record_function(function.__qualname__):
            return function(*args, **kwargs)

    return recorded


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the device's memory on rank 0, with ``force``."""
    if force:
        device = get_accelerator()
        now, most = device.memory_allocated(), device.max_memory_allocated()
        log_dist(f"{message}: {now / 2**30:.2f} GiB, at most {most / 2**30:.2f} GiB", ranks=[0])


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike, tag: str | None = None, **_: Any
) -> dict[str, Tensor]:
    """The whole model's values, with masters in the place of parameters, on the CPU.

    ``checkpoint_dir``: what ``engine.save_checkpoint`` was given, or DeepSpeed's own.
    """
    state = fp32_state(Path(checkpoint_dir), tag)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike, tag: str | None = None
) -> nn.Module:
    """Load the values into a plain model, which is returned on the CPU."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike, output_file: str | os.PathLike, tag: str | None = None
) -> None:
    """Write the values to one file, also ``.safetensors``."""
    write(fp32_state(Path(checkpoint_dir), tag), Path(output_file))
