"""Copies and pickles of a sharded module are plain modules: nothing of this package is in them.

Each module gets a ``__reduce_ex__`` of its own, which ``copy.deepcopy`` and ``pickle`` prefer to
that of the class.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zero_ext.engine.carried import Carried

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# Dictionaries with the keys of some of these hooks.
FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def attach(modules: Iterable[nn.Module]) -> None:
    for each in modules:
        if not isinstance(each, torch.jit.ScriptModule):
            each.__dict__["__reduce_ex__"] = PlainReduce(each)


class PlainReduce(Carried):
    """The ``__reduce_ex__`` of one module."""

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return PlainReduce, (self._module(),)

    def __call__(self, protocol: int) -> Any:
        module = self._module()
        reduced = type(module).__reduce_ex__(module, protocol)
        if isinstance(reduced, str):  # a global name
            return reduced
        make, arguments, *rest = reduced
        arguments = tuple(_plain(each) for each in arguments)
        if rest:  # the attributes, and with __slots__ a pair of dictionaries
            state = rest[0]
            rest[0] = tuple(map(_plain, state)) if isinstance(state, tuple) else _plain(state)
        return make, arguments, *rest


def _plain(attributes: Any) -> Any:
    """The attributes of a module without what sharding has added; anything else as it is."""
    if not isinstance(attributes, dict):
        return attributes
    plain = {k: v.copy() if k in (*HOOKS, *FLAGS) else v for k, v in attributes.items()}
    remove_ours(plain)
    return plain


def remove_ours(attributes: dict[str, Any]) -> None:
    """Take out of a module's attributes what sharding has added to them."""
    for hooks in (attributes.get(name, {}) for name in HOOKS):
        ours = [k for k, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), Carried)]
        for key in ours:
            del hooks[key]
            for flags in FLAGS:
                attributes.get(flags, {}).pop(key, None)
    carried = {name: value for name, value in attributes.items() if isinstance(value, Carried)}
    attributes.update((name, value.replaced()) for name, value in carried.items())
    for name in [name for name in carried if attributes[name] is None]:
        del attributes[name]
