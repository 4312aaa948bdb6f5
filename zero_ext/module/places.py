"""Where a sharded module keeps its parameters."""

from typing import NamedTuple

import torch
from torch import nn

from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import find


class Place(NamedTuple):
    """Where a submodule keeps one sharded parameter."""

    name: str
    parameters: dict[str, nn.Parameter | None]  # of the submodule
    key: str
    parameter: nn.Parameter


def is_sharded_by(handle: Handle | None, parameter: torch.Tensor) -> bool:
    entry = find(parameter)
    return entry is not None and entry[0] is handle


def places_of(module: nn.Module, handle: Handle) -> list[Place]:
    return [
        Place(f"{prefix}.{key}" if prefix else key, owner._parameters, key, parameter)
        for prefix, owner in module.named_modules()
        for key, parameter in owner._parameters.items()
        if parameter is not None and is_sharded_by(handle, parameter)
    ]
