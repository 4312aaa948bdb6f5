"""Forward hooks of the modules whose parameters are gathered and released (stage 3).

A forward calls the engine twice: when it enters the module and when it leaves. Backwards are
watched in C++, by hooks on the autograd nodes of the inputs and outputs.
"""

import dataclasses
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any, ClassVar

import torch
import torch._dynamo
from torch import Tensor, nn

from zero_ext import _C
from zero_ext.engine.carried import Carried, CarriedMethod

# By default torch reuses code that was compiled before a module gained hooks, or for another module
# of the same class without hooks. A sharded module would then run without ours. This is set here
# and not in shard(), because it only affects code that is compiled later.
torch._dynamo.config.skip_nnmodule_hook_guards = False

_CALL = nn.Module._call_impl.__code__


@dataclasses.dataclass(eq=False, slots=True)
class _Forward:
    """A forward that has entered a module and not left it."""

    hooks: "SiteHooks"
    thread: int
    frame: FrameType | None  # of the call of the module, or of a module around it
    handled: BaseException | None  # the exception that was being handled when it entered
    entered: bool = False
    call: _C.Call | None = None


class OpenForwards:
    """The forwards that are inside modules of one engine.

    Torch calls no hook when a forward ends with a ``BaseException`` that is no ``Exception``:
    Ctrl-C, a cancelled task. Such a forward is abandoned: the frame of its call is no longer on its
    thread's stack.
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
        """Leave the abandoned forwards of this thread, the innermost first."""
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


class SiteHooks(Carried):
    """Gathers and releases the units of one module hook site, which belongs to one module."""

    _in_a_copy: ClassVar = {"_engine": None, "_forwards": OpenForwards(), "_inside": []}

    def __init__(
        self, engine: _C.Engine | None, site: int, forwards: OpenForwards, inside: list[int]
    ):
        self._engine = engine
        self._site = site
        self._forwards = forwards
        self._inside = inside  # the threads that are in a forward of the units, once per forward

    def enter(self, module: nn.Module, args, kwargs=None):  # torch.ao passes no kwargs
        if self._engine is None:
            return
        self._forwards.leave_abandoned()
        forward = self._forwards.begin(self)
        inputs = tensors_in((args, kwargs)) if torch.is_grad_enabled() else None
        forward.call = self._engine.enter_forward(self._site, inputs)
        forward.entered = True
        self._inside.append(forward.thread)

    def leave(self, module: nn.Module, args, output) -> None:
        forward = self._forwards.end(self)
        if forward is None or not forward.entered:  # the engine, or a hook before this one, threw
            return
        self._inside.remove(forward.thread)
        threw = output is None and sys.exc_info()[1] is not forward.handled
        self._engine.leave_forward(self._site, forward.call, tensors_in(output), threw)

    def interrupt(self) -> None:
        """Leave now and enter again later. No backward follows meanwhile."""
        forward = self._forwards.end(self)
        if forward is not None:
            self.abandon(forward)

    def abandon(self, forward: _Forward) -> None:
        if forward.entered:
            self._inside.remove(forward.thread)
            self._engine.leave_forward(self._site, None, [], True)


def watch_module(module: nn.Module, hooks: SiteHooks) -> None:
    """Gather the units of ``hooks`` when a forward enters ``module``, and release them when it
    leaves."""
    module.register_forward_pre_hook(CarriedMethod(hooks.enter), with_kwargs=True, prepend=True)
    # Also when the forward throws, as non-reentrant checkpointing does in every recomputation.
    module.register_forward_hook(CarriedMethod(hooks.leave), always_call=True)


def hooks_of(module: nn.Module) -> list[SiteHooks]:
    """The hooks that run when a forward enters ``module``."""
    carried = [h for h in module._forward_pre_hooks.values() if isinstance(h, CarriedMethod)]
    return [hook.owner for hook in carried if isinstance(hook.owner, SiteHooks)]


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
