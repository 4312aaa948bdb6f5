"""The dtypes of a configuration: casts of parameters, buffers and forwards."""

import contextlib
import re

import torch
from torch import nn

from zero_ext._warnings import warn
from zero_ext.deepspeed.config import Config

# The dtypes of computations. Others, such as fp8, store quantised values and are never cast.
COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def cast(model: nn.Module, settings: Config) -> None:
    """Parameters and buffers to the dtypes of the configuration. They stay the same objects."""
    kept = _kept_in_fp32(model, settings)
    casts = [(parameter, settings.dtype) for parameter in model.parameters()]
    for buffer in model.buffers():
        casts.append((buffer, torch.float32 if id(buffer) in kept else settings.buffer_dtype))
    for tensor, dtype in casts:
        if dtype is not None and tensor.dtype in COMPUTED:
            tensor.data = tensor.data.to(dtype)


def _kept_in_fp32(model: nn.Module, settings: Config) -> set[int]:
    """The buffers that stay in fp32 where the model is in half precision."""
    if settings.dtype is None:
        return set()
    patterns = [("", pattern) for pattern in settings.fp32_buffers or ()]
    if settings.fp32_buffers is None:
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            patterns += [(prefix, pattern) for pattern in _transformers_lists(module, settings)]
    return {
        id(buffer)
        for name, buffer in (model.named_buffers(remove_duplicate=False) if patterns else ())
        for prefix, pattern in patterns
        if name.startswith(prefix) and re.search(pattern.replace("*", ".*"), name[len(prefix) :])
    }


def _transformers_lists(module: nn.Module, settings: Config) -> set[str]:
    """The parts that a class of Transformers keeps in fp32."""
    lists = ["_keep_in_fp32_modules_strict"]
    if settings.dtype == torch.float16:
        lists.append("_keep_in_fp32_modules")
    return {name for each in lists for name in getattr(module, each, None) or ()}


def autocasting(settings: Config, device: torch.device) -> contextlib.AbstractContextManager:
    """The context of the engine's forwards."""
    if settings.autocast is not None:
        return torch.autocast(device.type, settings.autocast)
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    warn(
        "zero_ext: torch.autocast around the engine is switched off inside it, as DeepSpeed does. "
        "Give the configuration 'torch_autocast' instead."
    )
    return torch.autocast(device.type, enabled=False)
