"""Forward hooks of the modules whose parameters are gathered and released (stage 3).

A forward calls the engine twice: when it enters the module and when it leaves. Backwards are
watched in C++, by hooks on the autograd nodes of the inputs and outputs.
"""

import dataclasses
import sys
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from zero_ext import _C, _torch
from zero_ext.engine.carried import Carried, CarriedMethod
from zero_ext.engine.units import Tree

_torch.compile_for_hooks()


class _Forward:
    """A forward that has entered a module and not left it."""

    __slots__ = ("call", "entered", "handled", "hooks", "watched")

    hooks: "SiteHooks"
    handled: BaseException | None  # the exception that was being handled when it entered
    watched: bool  # its caller leaves it, whatever the forward raises
    entered: bool
    call: _C.Call | None


class OpenForwards:
    """The forwards that are inside modules of one engine, and the calls that watch over them.

    Torch calls no hook when a forward ends with a ``BaseException`` that is no ``Exception``:
    Ctrl-C, a cancelled task. The ``WatchedCall`` around it leaves the forward then.
    """

    def __init__(self):
        self.of_threads: dict[int, list[_Forward | WatchedCall]] = {}

    def here(self) -> "list[_Forward | WatchedCall]":
        """The open calls of this thread, the innermost last."""
        return self.of_threads.setdefault(threading.get_ident(), [])

    def end(self, hooks: "SiteHooks") -> _Forward | None:
        here = self.of_threads.get(threading.get_ident(), [])
        for i in range(len(here) - 1, -1, -1):
            if type(here[i]) is _Forward and here[i].hooks is hooks:
                return here.pop(i)
        return None

    def leave_abandoned(self) -> None:
        """Leave what is open where no call is watched: torch.compile does not see the calls."""
        here = self.here()
        if all(type(each) is _Forward and not each.watched for each in here):
            while here:
                self.leave(here.pop())

    def leave(self, last: "_Forward | WatchedCall") -> None:
        if type(last) is _Forward:
            last.hooks.abandon(last)


class SiteHooks:
    """Gathers and releases the units of one module hook site, which belongs to one module."""

    def __init__(
        self,
        engine: _C.Engine,
        site: int,
        forwards: OpenForwards,
        inside: Sequence[list[int]],
        is_root: bool = False,
    ):
        """``inside``: of each unit, the threads that are in a forward of it, once per forward."""
        self.engine = engine
        self.site = site
        self.forwards = forwards
        self.inside = inside
        self.is_root = is_root

    # torch.ao passes no kwargs.
    def enter(self, module: nn.Module, args, kwargs=None, watched: bool = False):
        """``watched``: the caller leaves the forward, whatever it raises."""
        if self.is_root and not watched:
            self.forwards.leave_abandoned()
        forward = _Forward()
        forward.hooks, forward.handled, forward.watched = self, sys.exc_info()[1], watched
        forward.entered = False
        self.forwards.of_threads.setdefault(threading.get_ident(), []).append(forward)
        inputs = tensors_in((args, kwargs)) if torch.is_grad_enabled() else None
        forward.call = self.engine.enter_forward(self.site, inputs)
        forward.entered = True
        for threads in self.inside:
            threads.append(threading.get_ident())

    def leave(self, module: nn.Module, args, output) -> None:
        forward = self.forwards.end(self)
        if forward is None or not forward.entered:  # the engine, or a hook before this one, threw
            return
        threw = output is None and sys.exc_info()[1] is not forward.handled
        self._leave(forward.call, tensors_in(output), threw)

    def interrupt(self) -> None:
        """Leave now and enter again later. No backward follows meanwhile."""
        forward = self.forwards.end(self)
        if forward is not None:
            self.abandon(forward)

    def abandon(self, forward: _Forward) -> None:
        if forward.entered:
            self._leave(None, [], True)

    # Of the module's units. As FSDP2's methods of these names.

    def unshard(self) -> None:
        """Gather them and keep them until ``reshard()`` or the next step. Collective."""
        self.engine.unshard(self.site)

    def reshard(self) -> None:
        """Release what ``unshard()`` has gathered. What was written to it is lost."""
        self.engine.reshard(keep_writes=False, site=self.site)

    def start_gathers(self) -> None:
        self.engine.start_gathers(self.site)

    def set_reshard_after_forward(self, reshards: bool) -> None:
        self.engine.set_reshard_after_forward(self.site, reshards)

    def set_reshard_after_backward(self, reshards: bool) -> None:
        self.engine.set_reshard_after_backward(self.site, reshards)

    def _leave(self, call: _C.Call | None, outputs: list[Tensor], threw: bool) -> None:
        for threads in self.inside:
            threads.remove(threading.get_ident())
        self.engine.leave_forward(self.site, call, outputs, threw)


class ModuleCall(Carried):
    """Calls of one module: its ``_compiled_call_impl``, which ``Module.__call__`` prefers."""

    def __init__(self, module: nn.Module):
        self._module = ref(module)
        self._compiled: Callable | None = module._compiled_call_impl  # by the user

    def attach(self, module: nn.Module) -> None:
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__["_compiled_call_impl"] = self

    def replaced(self) -> Callable | None:
        return self._compiled

    def __reduce_ex__(self, protocol: int) -> tuple:
        return type(None), ()


class WatchedCall(ModuleCall):
    """Leaves the forwards of a module whose end torch reports to no hook."""

    def __init__(self, module: nn.Module, hooks: SiteHooks):
        super().__init__(module)
        self._forwards, self._is_root = hooks.forwards, hooks.is_root

    def __call__(self, *args, **kwargs):
        call = self._compiled or self._module()._call_impl
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        if self._is_root:
            self._forwards.leave_abandoned()
        here = self._forwards.of_threads.setdefault(threading.get_ident(), [])
        here.append(self)
        try:
            return call(*args, **kwargs)
        finally:
            while here and (last := here.pop()) is not self:
                self._forwards.leave(last)


_torch.run_as_it_is(WatchedCall.__call__)


class InnerCall(ModuleCall):
    """Gathers units when a module inside theirs is called from outside.

    Most calls of such a module come from the unit's own forward, where nothing is to be done. So it
    gets no hooks, which would cost 1.5 us in each call, would end torch.compile's graphs, and would
    switch off torch's fast paths. This takes 0.2 us, and torch.compile does not see it: code that
    it compiles gathers in the units' hooks alone.
    """

    def __init__(self, module: nn.Module, units: Sequence[SiteHooks]):
        super().__init__(module)
        self._units = units
        self._inside = [threads for hooks in units for threads in hooks.inside]
        self._hooks: SiteHooks | None = None  # made for the first call from outside

    def __call__(self, *args, **kwargs):
        call = self._compiled or self._module()._call_impl
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        thread = threading.get_ident()
        for inside in self._inside:
            if thread not in inside:
                return self._call_from_outside(call, args, kwargs)
        return call(*args, **kwargs)

    def _call_from_outside(self, call: Callable, args, kwargs):
        engine, forwards = self._units[0].engine, self._units[0].forwards
        forwards.leave_abandoned()
        if self._hooks is None:
            site = engine.add_inner_site([unit.site for unit in self._units])
            self._hooks = SiteHooks(engine, site, forwards, self._inside)
        hooks = self._hooks
        if engine.is_recomputed(hooks.site):
            return call(*args, **kwargs)
        output = None
        try:
            hooks.enter(self._module(), args, kwargs, watched=True)
            output = call(*args, **kwargs)
        finally:
            hooks.leave(self._module(), args, output)
        return output


def watch_inner_modules(
    tree: Tree,
    units: Sequence[SiteHooks],
    unit_of: Mapping[int, int],
    hooked: Set[nn.Module],
) -> None:
    """Gather units as forwards enter modules of ``tree`` inside those with hooks.

    Args:
        units: Hooks of one module of each unit.
        unit_of: The number of the unit of each parameter, by id.
        hooked: The modules that have hooks.
    """
    used: dict[nn.Module, set[int]] = {}  # units, outside of modules with hooks
    for module in tree.owners(unit_of.keys()).keys() - hooked:
        used[module] = {*map(unit_of.get, map(id, module._parameters.values()))} - {None}
    for place in range(len(tree.modules) - 1, 0, -1):
        module, around = tree.modules[place], tree.modules[tree.parents[place]]
        if module in used and around not in hooked:
            used.setdefault(around, set()).update(used[module])
    shared: dict[frozenset[int], list[SiteHooks]] = {}  # lists that several modules use
    for module, numbers in used.items():
        which = frozenset(numbers)
        if which not in shared:
            shared[which] = [units[k] for k in sorted(which)]
        InnerCall(module, shared[which]).attach(module)


def watch_module(module: nn.Module, hooks: SiteHooks) -> None:
    """Gather the units of ``hooks`` when a forward enters ``module``, and release them when it
    leaves."""
    module.register_forward_pre_hook(CarriedMethod(hooks.enter), with_kwargs=True, prepend=True)
    # Also when the forward throws, as non-reentrant checkpointing does in every recomputation.
    module.register_forward_hook(CarriedMethod(hooks.leave), always_call=True)
    WatchedCall(module, hooks).attach(module)


def hooks_of(module: nn.Module) -> list[SiteHooks]:
    """The hooks that run when a forward enters ``module``."""
    carried = [h for h in module._forward_pre_hooks.values() if isinstance(h, CarriedMethod)]
    owners = [hook.method.__self__ for hook in carried]
    return [owner for owner in owners if isinstance(owner, SiteHooks)]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested containers: mappings, sequences, sets, dataclasses. Each container is
    searched once."""
    if isinstance(value, Tensor):
        return [value]
    found, left, seen = [], [value], set()
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            found.append(value)
            continue
        if isinstance(value, (list, tuple, set, frozenset)):
            inside = list(value)
        elif isinstance(value, Mapping):
            inside = list(value.values())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        else:
            continue
        if id(value) not in seen:
            seen.add(id(value))
            left.extend(reversed(inside))
    return found
