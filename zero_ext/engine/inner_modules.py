"""Modules inside those of units: a call from outside of these gathers, too (stage 3).

Most of these calls come from the unit's own forward, where nothing is to be done. So the modules
get no hooks, which would cost 1.5 us in each call, would end torch.compile's graphs, and would
switch off torch's fast paths. They get a ``ModuleCall`` (0.2 us), which torch.compile does not see:
code that it compiles gathers in the units' hooks alone.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_ext import _C
from zero_ext.engine.unit_hooks import ModuleCall, OpenForwards, tensors_in


class _Unit(NamedTuple):
    site: int
    inside: list[int]  # the threads in its forwards


class InnerCall(ModuleCall):
    """Gathers units when a module inside theirs is called from outside."""

    def __init__(
        self, module: nn.Module, engine: _C.Engine, forwards: OpenForwards, units: Sequence[_Unit]
    ):
        super().__init__(module)
        self._engine = engine
        self._forwards = forwards
        self._units = units
        self._site: int | None = None  # made for the first call from outside

    def __call__(self, *args, **kwargs):
        call = self._compiled or self._module()._call_impl
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        thread = threading.get_ident()
        for _, inside in self._units:
            if thread not in inside:
                return self._call_from_outside(call, thread, args, kwargs)
        return call(*args, **kwargs)

    def _call_from_outside(self, call: Callable, thread: int, args, kwargs):
        engine = self._engine
        self._forwards.leave_abandoned()
        if self._site is None:
            self._site = engine.add_inner_site([unit.site for unit in self._units])
        if engine.is_recomputed(self._site):
            return call(*args, **kwargs)
        inputs = tensors_in((args, kwargs)) if torch.is_grad_enabled() else None
        entered = engine.enter_forward(self._site, inputs)
        for _, inside in self._units:
            inside.append(thread)
        output, threw = None, True
        try:
            output = call(*args, **kwargs)
            threw = False
        finally:
            for _, inside in self._units:
                inside.remove(thread)
            engine.leave_forward(self._site, entered, tensors_in(output), threw)
        return output


class InnerModules:
    """Which modules lie inside those of units, and which units they use."""

    def __init__(self, engine: _C.Engine, forwards: OpenForwards):
        self._engine = engine
        self._forwards = forwards
        self._units: list[_Unit] = []
        self._unit_of: dict[int, int] = {}  # by the id of a parameter
        self._hooked: set[int] = set()  # the ids of modules
        self._used: dict[int, set[int]] = {}  # units, by the id of a module
        self._lists: dict[tuple[int, ...], list[_Unit]] = {}  # shared by modules

    def add_unit(
        self,
        modules: Iterable[nn.Module],
        parameters: Iterable[Tensor],
        site: int,
        inside: list[int],
    ) -> None:
        """``modules`` have hooks already. ``inside``: the threads that are in their forwards."""
        self._unit_of.update((id(parameter), len(self._units)) for parameter in parameters)
        self._units.append(_Unit(site, inside))
        self._hooked.update(id(module) for module in modules)

    def watch(self, root: nn.Module) -> None:
        """Gather units as forwards enter modules inside ``root``, from now on."""
        for child in root.children():
            self._watch(child)

    def _watch(self, module: nn.Module) -> set[int]:
        """Returns the units that the module uses beside those of modules with hooks in it."""
        if id(module) in self._used:
            return self._used[id(module)]
        used = {self._unit_of.get(id(p)) for p in module._parameters.values()} - {None}
        for child in module.children():
            used |= self._watch(child)
        has_hooks = id(module) in self._hooked
        self._used[id(module)] = set() if has_hooks else used
        if used and not has_hooks:
            which = tuple(sorted(used))
            units = self._lists.setdefault(which, [self._units[k] for k in which])
            InnerCall(module, self._engine, self._forwards, units).attach(module)
        return self._used[id(module)]
