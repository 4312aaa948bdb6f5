"""Where a sharded module keeps its parameters."""

from collections.abc import Iterable
from typing import Any, NamedTuple

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


class Owner(NamedTuple):
    """A submodule with sharded parameters of its own."""

    name: str
    parameters: dict[str, nn.Parameter | None]
    count: int  # of ``parameters``
    attributes: dict[str, Any]  # of the first one


class Children(NamedTuple):
    """The submodules of one module that has sharded parameters."""

    prefix: str
    modules: dict[str, nn.Module | None]
    kept: dict[str, nn.Module | None]  # a copy of ``modules``


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


def owners_of(places: Iterable[Place]) -> list[Owner]:
    owners = {
        id(place.parameters): Owner(
            place.name.rpartition(".")[0],
            place.parameters,
            len(place.parameters),
            place.parameter.__dict__,
        )
        for place in places
    }
    return list(owners.values())


def children_of(module: nn.Module, handle: Handle) -> list[Children]:
    return [
        Children(f"{prefix}." if prefix else "", owner._modules, owner._modules.copy())
        for prefix, owner in module.named_modules()
        # A scripted module has another class there: its submodules cannot be replaced.
        if owner._modules and type(owner._modules) is dict
        if any(is_sharded_by(handle, p) for p in owner.parameters())
    ]
