"""Forward hooks of the modules whose parameters are gathered and released (stage 3).

Their backwards are seen in C++: a forward leaves hooks on the autograd nodes of its outputs and
inputs.
"""

import copy
import dataclasses
import sys
import threading
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from zero_ext import _C

# Torch's default reuses code that was compiled before a module gained hooks, or for another one of
# its class without them: a sharded module would run without ours. Set here and not in shard(),
# because only what is compiled later is guarded.
torch._dynamo.config.skip_nnmodule_hook_guards = False

_CALL = nn.Module._call_impl.__code__


@dataclasses.dataclass(eq=False)
class _Forward:
    """A forward that is inside a module."""

    hooks: "SiteHooks"
    thread: int
    frame: FrameType | None  # of the module's call, or of one around it
    handled: BaseException | None  # what is being handled around it
    entered: bool = False
    call: _C.Call | None = None


class OpenForwards:
    """Those inside the modules of one engine.

    Torch calls no hook where a forward ends with what is no ``Exception``: Ctrl-C, a cancelled
    task. Such a forward is noticed when the frame of its call is on its thread's stack no more.
    """

    def __init__(self):
        self._open: list[_Forward] = []

    def begin(self, hooks: "SiteHooks") -> _Forward:
        forward = _Forward(hooks, threading.get_ident(), _frame_of_call(), sys.exc_info()[1])
        self._open.append(forward)
        return forward

    def end(self, hooks: "SiteHooks") -> _Forward | None:
        thread = threading.get_ident()
        for forward in reversed(self._open):
            if forward.hooks is hooks and forward.thread == thread:
                self._open.remove(forward)
                return forward
        return None

    def leave_abandoned(self) -> None:
        """Those of this thread; the innermost first, until one is found that still runs."""
        thread = threading.get_ident()
        for forward in [f for f in reversed(self._open) if f.thread == thread]:
            if forward.frame is None or _is_running(forward.frame):
                return
            self._open.remove(forward)
            forward.hooks.abandon(forward)


def _frame_of_call() -> FrameType | None:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def _is_running(frame: FrameType) -> bool:
    running = sys._getframe(1)
    while running is not None and running is not frame:
        running = running.f_back
    return running is not None


class SiteHooks:
    """Enters and leaves one module's units. A copy of the module has plain parameters, so a copy of
    this does nothing."""

    def __init__(self, engine: _C.Engine | None, site: int, forwards: OpenForwards | None = None):
        self._engine = engine
        self._site = site
        self._forwards = forwards

    def __deepcopy__(self, memo) -> "SiteHooks":
        memo[id(self)] = twin = SiteHooks(None, -1)
        return twin

    def __reduce__(self):
        return SiteHooks, (None, -1)

    def enter(self, module: nn.Module, args, kwargs=None):  # torch.ao passes no kwargs
        if self._engine is None:
            return None
        self._forwards.leave_abandoned()
        forward = self._forwards.begin(self)
        self._engine.enter_forward(self._site)
        forward.entered = True
        if torch.is_grad_enabled():
            forward.call = self._engine.begin_call(self._site)
            for tensor in tensors_in((args, kwargs)):
                forward.call.watch_input(tensor)
        return None

    def leave(self, module: nn.Module, args, output):
        forward = self._forwards.end(self) if self._forwards is not None else None
        if forward is None or not forward.entered:  # or a hook before ours threw
            return
        outputs = list(tensors_in(output))
        if forward.call is not None:
            forward.call.end()
            for tensor in outputs:
                forward.call.watch_output(tensor)
        threw = output is None and sys.exc_info()[1] is not forward.handled
        backward_may_follow = forward.call is not None and not threw
        self._engine.leave_forward(self._site, outputs, backward_may_follow)

    def interrupt(self) -> None:
        """Leave, to enter again later; no backward follows meanwhile."""
        forward = self._forwards.end(self) if self._forwards is not None else None
        if forward is not None:
            self.abandon(forward)

    def abandon(self, forward: _Forward) -> None:
        if forward.entered:
            self._engine.leave_forward(self._site, [], False)


class _Hook:
    """A bound method that is copied and pickled with the module that carries it."""

    def __init__(self, hooks: SiteHooks, name: str):
        self.hooks = hooks
        self.name = name
        self._method = getattr(hooks, name)

    def __deepcopy__(self, memo) -> "_Hook":
        return _Hook(copy.deepcopy(self.hooks, memo), self.name)

    def __reduce__(self):
        return _Hook, (self.hooks, self.name)

    # torch.compile would look inside, find nothing to compile, and look again at every new shape.
    @torch.compiler.disable
    def __call__(self, *args):
        return self._method(*args)


def watch_module(module: nn.Module, hooks: SiteHooks) -> None:
    """Gather the site of ``hooks`` when a forward enters ``module``, let it go when it leaves."""
    module.register_forward_pre_hook(_Hook(hooks, "enter"), with_kwargs=True, prepend=True)
    # Also when the forward throws, as non-reentrant checkpointing does in every recomputation.
    module.register_forward_hook(_Hook(hooks, "leave"), always_call=True)


def hooks_of(module: nn.Module) -> list[SiteHooks]:
    """Those of the units that a forward of ``module`` enters."""
    before = module._forward_pre_hooks.values()
    return [hook.hooks for hook in before if isinstance(hook, _Hook) and hook.name == "enter"]


def tensors_in(value: Any) -> Iterable[Tensor]:
    """All tensors in nested containers: mappings, sequences, sets, dataclasses. Each container is
    looked into once."""
    left, seen = [value], set()
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            yield value
            continue
        if isinstance(value, Mapping):
            inside = list(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            inside = list(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        else:
            continue
        if id(value) not in seen:
            seen.add(id(value))
            left.extend(reversed(inside))
