"""Objects and callables that a module carries with it, and that no copy of the module has."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Carried:
    """The library's objects in a sharded module's attributes and hooks.

    A copy of a sharded module is a plain module without it, and so is an unpickled one: see
    ``module/plain_copies.py``. Where a class copies its attributes by itself, the copy has in this
    place what ``__reduce_ex__`` says.
    """

    def replaced(self) -> Any:
        """The module's own value of the attribute that this object is; None: it had none."""
        return None

    def __reduce_ex__(self, protocol: int) -> tuple:
        return Inert, ()


class Inert(Carried):
    """A hook that does nothing."""

    def __call__(self, *args, **kwargs) -> None:
        pass


class CarriedMethod(Carried):
    """A method of an object, as a hook or an attribute of a module."""

    def __init__(self, method: Callable):
        self.method = method
        for attribute in ("__name__", "__qualname__", "__doc__"):
            setattr(self, attribute, getattr(method, attribute))

    # torch.compile would look inside, find nothing to compile, and look again at every new shape.
    @torch.compiler.disable
    def __call__(self, *args, **kwargs):
        return self.method(*args, **kwargs)


class CarriedReplacement(Carried):
    """An attribute of a module in the place of the module's own method of that name."""

    def __init__(self, module: nn.Module, name: str):
        # Held weakly: in a cycle with the module, its buffers would wait for a garbage collection.
        self._module = weakref.ref(module)
        self._name = name
        self._own = module.__dict__.get(name)  # where it is no method of the class
        with contextlib.suppress(AttributeError):
            functools.update_wrapper(self, self._method())

    @property
    def __wrapped__(self) -> Callable:
        """For ``inspect``. It is not stored, because it would keep the module alive."""
        return self._method()

    def replaced(self) -> Callable | None:
        return self._own

    def _method(self) -> Callable:
        return _own_method(self._module(), self._name, self._own)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _own_method, (self._module(), self._name, self._own)


def _own_method(module: nn.Module, name: str, own: Callable | None) -> Callable:
    if own is not None:
        return own
    method = inspect.getattr_static(type(module), name)
    return method.__get__(module, type(module)) if hasattr(method, "__get__") else method
