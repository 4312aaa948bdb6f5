"""Objects and callables that a module carries with it when it is copied or pickled."""

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn


class Carried:
    """What a sharded module carries in its attributes and hooks.

    A copy of a sharded module is a plain module without it, and so is an unpickled one: see
    ``module/plain_copies.py``. Where a class copies its attributes by itself, a copy of this object
    goes with the copy of the module, and has no engine.
    """

    # Held weakly: in a cycle with the module, its buffers would wait for a garbage collection.
    _module: weakref.ref[nn.Module] | None = None

    # The attributes that have other values in a copy.
    _in_a_copy: ClassVar[dict[str, Any]] = {}

    def replaced(self) -> Any:
        """The module's own value of the attribute that this object is; None: it had none."""
        return None

    def __getstate__(self) -> dict[str, Any]:
        module = {} if self._module is None else {"_module": self._module()}
        return {**self.__dict__, **module, **copy.deepcopy(self._in_a_copy)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._module is not None:
            self._module = weakref.ref(self._module)


class CarriedMethod(Carried):
    """A method of a ``Carried``, as a hook or an attribute of a module."""

    def __init__(self, method: Callable):
        self._method = method
        for attribute in ("__name__", "__qualname__", "__doc__"):
            setattr(self, attribute, getattr(method, attribute))

    @property
    def owner(self) -> Carried:
        return self._method.__self__

    # torch.compile would look inside, find nothing to compile, and look again at every new shape.
    @torch.compiler.disable
    def __call__(self, *args, **kwargs):
        return self._method(*args, **kwargs)


class CarriedReplacement(Carried):
    """An attribute of a module in the place of the module's own method of that name."""

    def __init__(self, module: nn.Module, name: str):
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
        module = self._module()
        if self._own is not None:
            return self._own
        kind = type(module)
        method = inspect.getattr_static(kind, self._name)
        return method.__get__(module, kind) if hasattr(method, "__get__") else method
