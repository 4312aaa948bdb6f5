"""Forward hooks of the modules whose parameters are gathered and released (stage 3).

Their backwards are seen in C++: a forward leaves hooks on the autograd nodes of its outputs and
inputs.
"""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_ext import _C

_NOT_ENTERED = object()


class SiteHooks:
    """Enters and leaves one module's units. A copy of the module has plain parameters, so a copy of
    this does nothing."""

    def __init__(self, engine: _C.Engine | None, site: int):
        self._engine = engine
        self._site = site
        self._calls: list[Any] = []  # of the forwards that are inside the module

    def __deepcopy__(self, memo) -> "SiteHooks":
        memo[id(self)] = twin = SiteHooks(None, -1)
        return twin

    def __reduce__(self):
        return SiteHooks, (None, -1)

    def enter(self, module: nn.Module, args, kwargs):
        if self._engine is None:
            return None
        try:
            self._engine.enter_forward(self._site)
        except BaseException:
            self._calls.append(_NOT_ENTERED)
            raise
        call = self._engine.begin_call(self._site) if torch.is_grad_enabled() else None
        self._calls.append(call)
        if call is not None:
            for tensor in tensors_in((args, kwargs)):
                call.watch_input(tensor)
        return None

    def leave(self, module: nn.Module, args, output):
        if not self._calls:  # a hook before ours threw
            return
        call = self._calls.pop()
        if call is _NOT_ENTERED:
            return
        outputs = list(tensors_in(output))
        if call is not None:
            call.end()
            for tensor in outputs:
                call.watch_output(tensor)
        # Without an output the forward threw.
        self._engine.leave_forward(self._site, outputs, call is not None and output is not None)


class _Hook:
    """A bound method that is copied and pickled with the module that carries it."""

    def __init__(self, hooks: SiteHooks, name: str):
        self._hooks = hooks
        self._name = name
        self._method = getattr(hooks, name)

    def __deepcopy__(self, memo) -> "_Hook":
        return _Hook(copy.deepcopy(self._hooks, memo), self._name)

    def __reduce__(self):
        return _Hook, (self._hooks, self._name)

    # torch.compile would look inside, find nothing to compile, and look again at every new shape.
    @torch.compiler.disable
    def __call__(self, *args):
        return self._method(*args)


def watch_module(module: nn.Module, engine: _C.Engine, site: int) -> None:
    """Gather ``site`` when a forward enters ``module``, let it go when the forward leaves it."""
    hooks = SiteHooks(engine, site)
    module.register_forward_pre_hook(_Hook(hooks, "enter"), with_kwargs=True, prepend=True)
    # Also when the forward throws, as non-reentrant checkpointing does in every recomputation.
    module.register_forward_hook(_Hook(hooks, "leave"), always_call=True)


def tensors_in(value: Any) -> Iterable[Tensor]:
    """All tensors in nested containers: mappings, sequences, sets, dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
