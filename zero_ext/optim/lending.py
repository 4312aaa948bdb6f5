"""Lending: methods of a wrapped optimizer beside ``step`` work on copies of this rank's masters.

Note [What a method of a wrapped optimizer gets]
Other ranks may be gathering from the masters themselves, so a method gets copies, which have what
users wrote to the parameters. What it wrote becomes the parameter and its master on all ranks.
Which parameters it wrote is seen in its operations and not in their values: ranks must agree about
it, and values may change on one rank alone. So a method that writes nothing is not collective.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero_ext.engine.registry import find

if TYPE_CHECKING:
    from zero_ext.optim.wrapped_optimizer import WrappedOptimizer


class WatchedWrites(TorchDispatchMode):
    """Notes what is written to, also through ``p.data`` and views."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()

    def wrote(self, tensor: Tensor) -> bool:
        return _storage_of(tensor) in self._storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                # Tensors of several parts, such as DTensors, hold no parameter of ours.
                if isinstance(each, Tensor) and not hasattr(each, "to_local"):
                    self._storages.add(_storage_of(each))
        return func(*args, **kwargs)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def method_of(optimizer: "WrappedOptimizer", name: str) -> Callable[..., Any]:
    """Method ``name`` of the inner optimizer, which gets and gives as its ``step`` does."""

    @functools.wraps(getattr(optimizer._probe, name))
    def call(*args: Any, **kwargs: Any) -> Any:
        if optimizer._inner is None:  # nothing to train
            return getattr(optimizer._probe, name)(*args, **kwargs)
        with _lent(optimizer, f"{name}()"):
            inner = optimizer._inner
            result = getattr(inner, name)(*args, **kwargs)
        if isinstance(result, contextlib.AbstractContextManager):
            return _entered_with_masters(optimizer, f"{name}()", result)
        return optimizer if result is inner else result

    return call


@contextlib.contextmanager
def _entered_with_masters(
    optimizer: "WrappedOptimizer", what: str, context: contextlib.AbstractContextManager
) -> Iterator[Any]:
    """``context``, whose beginning and end change parameters."""
    with contextlib.ExitStack() as stack:
        with _lent(optimizer, what):
            value = context.__enter__()

        def leave(*error: Any) -> bool | None:
            with _lent(optimizer, what):
                return context.__exit__(*error)

        stack.push(leave)
        yield value


@contextlib.contextmanager
def _lent(optimizer: "WrappedOptimizer", what: str) -> Iterator[None]:
    """See note [What a method of a wrapped optimizer gets]."""
    optimizer._begin_method(what)
    inner, shards = optimizer._inner, optimizer._shards
    every, masters = list(inner.param_groups), {p: shard.data for p, shard in shards.items()}
    watched = WatchedWrites()
    with torch.no_grad():
        engine = optimizer._handle.engine
        copies = {parameter: engine.current_master(find(parameter)[1]) for parameter in shards}
        group_of = optimizer._carry_in()
        names = {shard: {*inner.state.get(shard, ())} for shard in shards.values()}
        for parameter, shard in shards.items():
            shard.data = copies[parameter]
    # Parameters that were taken out of their group are in none for the method.
    present = [id(parameter) in group_of for parameter in shards]
    inner.param_groups[:] = [g for g, there in zip(every, present, strict=True) if there]
    try:
        with watched:
            yield
    finally:
        inner.param_groups[:] = every
        optimizer._drop_gradients()
        with torch.no_grad():
            values = {parameter: shard.data for parameter, shard in shards.items()}
            for parameter, shard in shards.items():
                shard.data = masters[parameter]
            written = [p for p in shards if moved(watched, values[p], copies[p])]
            _write(optimizer, written, values)
    for parameter, shard in shards.items():
        for name in names[shard] - inner.state.get(shard, {}).keys():  # the method dropped it
            optimizer.state[parameter].pop(name, None)
    optimizer._carry_out(group_of)


def moved(watched: WatchedWrites, now: Tensor, lent: Tensor) -> bool:
    """Whether code that was lent a parameter with these values has written to it."""
    return watched.wrote(lent) or _storage_of(now) != _storage_of(lent)


def _write(
    optimizer: "WrappedOptimizer", moved: Iterable[Tensor], values: dict[Tensor, Tensor]
) -> None:
    """Collective. In an order that all ranks have."""
    handle = optimizer._handle
    for parameter in sorted(moved, key=lambda parameter: find(parameter)[1]):
        i = find(parameter)[1]
        handle.write_value(i, handle.as_parameter(values[parameter].float(), i, parameter))
