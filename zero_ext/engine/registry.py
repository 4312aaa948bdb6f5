"""The registry: from a Parameter to the handle that shards it. The Parameter gets no attribute."""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from zero_ext import _C

Handle = Any  # that of handle.py, which imports this file


class RegistryEntry(NamedTuple):
    handle: Handle  # which shards the parameter
    index: int  # in its engine


_living: list[weakref.ref] = []  # handles, in the order in which they were made


def register(handle: Handle) -> None:
    _living.append(weakref.ref(handle, _living.remove))


def living() -> list[Handle]:
    """All handles of this process. A garbage collection may change the list meanwhile."""
    return [handle for each in tuple(_living) if (handle := each()) is not None]


def find(parameter: Tensor) -> RegistryEntry | None:
    """None for a parameter that no handle shards."""
    for handle in living():
        if (known := handle.entries.get(id(parameter))) is not None:
            return RegistryEntry(handle, known[1])
    return None


def find_all(parameters: Iterable[Tensor]) -> list[RegistryEntry | None]:
    """The result of ``find`` for each parameter."""
    ids = [id(parameter) for parameter in parameters]
    found: list[RegistryEntry | None] = [None] * len(ids)
    for handle in living():
        if not handle.entries.keys().isdisjoint(ids):
            for k, known in enumerate(map(handle.entries.get, ids)):
                if known is not None:
                    found[k] = RegistryEntry(handle, known[1])
    return found


def ranks_of_whole_gradients() -> dict[int, tuple[int, ...]]:
    """The ranks that have averaged each ``.grad`` that is whole on this rank, by its id."""
    return {
        id(parameter.grad): handle.groups.global_ranks
        for handle in living()
        if handle.replicated
        for parameter in handle.parameters
        if parameter.grad is not None
    }


def name_of_gradient(gradient: Tensor) -> str:
    """The name of the parameter with this gradient, for messages."""
    for handle in living():
        for i, parameter in enumerate(handle.parameters):
            if parameter.grad is gradient:
                return f"'{handle.engine.parameter_name(i)}'"
    return f"one of shape {tuple(gradient.shape)}"


def any_sharded(parameters: Iterable[Tensor]) -> bool:
    return any(find(parameter) is not None for parameter in parameters)


def handle_of(sharded) -> Handle:
    """The handle of a sharded module, or of an optimizer of this package.

    Raises:
        ValueError, TypeError: ``sharded`` is neither.
    """
    if isinstance(sharded, nn.Module):
        found = (entry.handle for p in sharded.parameters() if (entry := find(p)) is not None)
        if (handle := next(found, None)) is None:
            raise ValueError(f"zero_ext: this {type(sharded).__name__} is not sharded.")
        return handle
    handle = getattr(getattr(sharded, "zero_core", None), "handle", None)
    if not isinstance(getattr(handle, "engine", None), _C.Engine):
        raise TypeError(
            "zero_ext: expected a sharded module or an optimizer of zero_ext.optim, not "
            f"{type(sharded).__name__}."
        )
    return handle
