"""Copies and pickles of a sharded module are plain modules: nothing of this package is in them.

Each module that carries something gets a ``__reduce_ex__`` of its own, which ``copy.deepcopy`` and
``pickle`` prefer to that of the class.
"""

import weakref
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


def is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "hook", hook), Carried)


def attach(module: nn.Module) -> None:
    """Call it when ``module`` has all hooks and attributes."""
    for each in module.modules():
        if not isinstance(each, torch.jit.ScriptModule) and _carries(each):
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


def _carries(module: nn.Module) -> bool:
    attributes = module.__dict__
    hooks = (hook for name in HOOKS for hook in attributes.get(name, {}).values())
    return any(isinstance(v, Carried) for v in attributes.values()) or any(map(is_ours, hooks))


def _plain(attributes: Any) -> Any:
    """The attributes of a module without what sharding has added; anything else as it is."""
    if not isinstance(attributes, dict):
        return attributes
    plain, keys = {}, set()
    for name, value in attributes.items():
        if isinstance(value, Carried):
            value = value.replaced()
            if value is None:
                continue
        elif name in HOOKS:
            keys |= {key for key, hook in value.items() if is_ours(hook)}
        plain[name] = value
    for name in (*HOOKS, *FLAGS):
        if name in plain:
            kept = [(key, value) for key, value in plain[name].items() if key not in keys]
            plain[name] = type(plain[name])(kept)
    return plain
