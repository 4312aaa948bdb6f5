"""Objects and callables that a module carries with it when it is copied or pickled."""

import copy
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn


class Carried:
    """What a sharded module carries in its attributes and hooks.

    A copy of a sharded module is a plain module, and so is an unpickled one. A copy of this object
    goes with the copy of the module, and has no engine.
    """

    # Held weakly: in a cycle with the module, its buffers would wait for a garbage collection.
    _module: weakref.ref[nn.Module] | None = None

    # The attributes that have other values in a copy.
    _in_a_copy: ClassVar[dict[str, Any]] = {}

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
