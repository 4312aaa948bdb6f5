"""The registry: from a Parameter to the handle that shards it. The Parameter gets no attribute."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from zero_ext import _C
from zero_ext.ranks.groups import Groups
from zero_ext.tensor.shard_tensor import ShardTensor


class Handle(Protocol):
    """What this file and others below ``handle.py`` know of the class in it."""

    engine: _C.Engine
    groups: Groups
    parameters: "ParameterTable"
    units: Any  # makes them
    replicated: bool
    knows_on_host: bool
    scaled_by: weakref.ref | None

    def adopt_unfrozen(self) -> None: ...


class _Entry(weakref.ref):
    """Refers to a tensor and has its value: one object, since there are many."""

    __slots__ = ("number", "value")

    def __new__(cls, tensor: Tensor, forget: Any, value: Any):
        return super().__new__(cls, tensor, forget)

    def __init__(self, tensor: Tensor, forget: Any, value: Any):
        super().__init__(tensor, forget)
        self.number = id(tensor)
        self.value = value


class ByTensor:
    """A value for each of some tensors, which are held weakly and told apart by identity.

    As torch's WeakIdKeyDictionary, whose look-up takes ten times as long.
    """

    def __init__(self):
        self._entries: dict[int, _Entry] = {}
        held = weakref.ref(self)

        def forget(entry: _Entry) -> None:
            table = held()
            if table is not None and table._entries.get(entry.number) is entry:
                del table._entries[entry.number]

        self._forget = forget

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        entry = self._entries.get(id(tensor))
        return default if entry is None or entry() is not tensor else entry.value

    def __setitem__(self, tensor: Tensor, value: Any) -> None:
        self.add(tensor, value)

    def add(self, tensor: Tensor, value: Any) -> weakref.ref:
        """Returns a reference to the tensor."""
        entry = self._entries[id(tensor)] = _Entry(tensor, self._forget, value)
        return entry

    def __delitem__(self, tensor: Tensor) -> None:
        del self._entries[id(tensor)]

    def items(self) -> Iterator[tuple[Tensor, Any]]:
        for entry in list(self._entries.values()):
            if (tensor := entry()) is not None:
                yield tensor, entry.value


# Parameter -> (weak reference to its Handle, index in the engine).
_entries = ByTensor()
_registered = False  # whether a parameter has ever had an entry
# A gradient that is whole on this rank, as ``.grad`` shows it -> weak reference to its Handle.
_whole_gradients = ByTensor()


def find(parameter: Tensor) -> tuple[Handle, int] | None:
    """The handle that shards ``parameter`` and the parameter's index in its engine, or None."""
    entry = _entries.get(parameter)
    handle = entry[0]() if entry is not None else None
    return None if handle is None else (handle, entry[1])


def any_registered() -> bool:
    """Whether any parameter was sharded in this process."""
    return _registered


def register_whole_gradient(gradient: Tensor, handle: Handle) -> None:
    _whole_gradients[gradient] = weakref.ref(handle)


def ranks_of_gradient(gradient: Tensor) -> tuple[int, ...] | None:
    """The ranks that have averaged what an engine shows; None of other tensors."""
    if isinstance(gradient, ShardTensor):
        return gradient.ranks
    reference = _whole_gradients.get(gradient)
    handle = None if reference is None else reference()
    return None if handle is None else handle.groups.global_ranks


def name_of_gradient(gradient: Tensor) -> str:
    """Of the parameter that has it, for messages."""
    for parameter, (reference, i) in _entries.items():
        if parameter.grad is gradient and (handle := reference()) is not None:
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
        found = (entry[0] for p in sharded.parameters() if (entry := find(p)) is not None)
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


class ParameterTable:
    """The parameters of one handle by their index in its engine, and their registry entries.

    Holds the parameters and the handle weakly.
    """

    def __init__(self, handle: Handle):
        self._handle = weakref.ref(handle)
        self._references: list[weakref.ref] = []

    def __len__(self) -> int:
        return len(self._references)

    def __getitem__(self, i: int) -> Tensor:
        return self._references[i]()

    def add(self, parameter: Tensor) -> int:
        global _registered
        _registered = True
        i = len(self._references)
        self._references.append(_entries.add(parameter, (self._handle, i)))
        return i

    def replace(self, i: int, parameter: Tensor) -> None:
        """``parameter`` stands where another one stood, which keeps its registry entry."""
        self._references[i] = _entries.add(parameter, (self._handle, i))

    def unregister(self) -> None:
        """Delete the registry entries of all parameters that are still this handle's."""
        for reference in self._references:
            parameter = reference()
            entry = None if parameter is None else _entries.get(parameter)
            if entry is not None and entry[0] is self._handle:
                del _entries[parameter]
