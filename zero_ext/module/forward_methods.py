"""``register_forward_method``: methods beside ``forward`` that compute with a sharded model."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from zero_ext.engine.carried import CarriedReplacement
from zero_ext.engine.checks import check_module
from zero_ext.engine.registry import find
from zero_ext.engine.unit_hooks import SiteHooks, hooks_of
from zero_ext.module import plain_copies
from zero_ext.module.forward_hooks import ForwardHooks


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat ``module.method_name()`` like a forward of the sharded model from now on.

    With stage 3 the parameters that ``module`` itself reads are gathered inside the method, and
    again in its backward. Those of its children are gathered when their forwards are called. With
    every stage inputs and outputs are cast as ``mp_policy`` says. The function is the same as
    ``register_fsdp_forward_method`` of FSDP2.

    Args:
        module: What ``shard`` returned, or a submodule of it.
    Raises:
        ValueError, TypeError: ``module`` has no such method, or none of its parameters is sharded.
    """
    check_module(module, "register_forward_method()")
    if not isinstance(method_name, str):
        raise TypeError(
            f"zero_ext: register_forward_method() takes the name of a method, not {method_name!r}."
        )
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"zero_ext: {type(module).__name__} has no method '{method_name}'.")
    handles = [entry.handle for p in module.parameters() if (entry := find(p)) is not None]
    if not handles or handles[0].sharded_methods is None:
        raise ValueError(
            f"zero_ext: register_forward_method: no parameter of this {type(module).__name__} was "
            "sharded with zero_ext.shard(). Call that first, and then this."
        )
    if isinstance(getattr(module, method_name), ForwardMethod):
        return
    root = handles[0].root_hooks
    sites = [*root, *(hooks for hooks in hooks_of(module) if hooks not in root)]
    forward_hooks = handles[0].sharded_methods().forward_hooks
    setattr(module, method_name, ForwardMethod(module, method_name, forward_hooks, sites))
    plain_copies.attach([module])


class ForwardMethod(CarriedReplacement):
    """A method of a module that runs inside the hooks of a forward."""

    def __init__(
        self, module: nn.Module, name: str, forward_hooks: ForwardHooks, sites: list[SiteHooks]
    ):
        super().__init__(module, name)
        self._forward_hooks = forward_hooks
        self._sites = sites
        self._open: list[list[SiteHooks]] = []  # what each running call has entered

    def __call__(self, *args, **kwargs):
        entered: list[SiteHooks] = []
        self._open.append(entered)
        try:
            args, kwargs = self._enter(entered, args, kwargs)
            output = self._method()(*args, **kwargs)
        except BaseException:
            self._leave(entered, args, None)
            raise
        finally:
            self._open = [each for each in self._open if each is not entered]
        return self._leave(entered, args, output)

    @property
    def is_running(self) -> bool:
        return bool(self._open)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Leave the innermost call inside the context, so that an optimizer may step."""
        for hooks in reversed(self._open[-1]):
            hooks.interrupt()
        try:
            yield
        finally:
            for hooks in self._open[-1]:
                hooks.enter(self._module(), (), watched=True)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Within ``outside()``: enter the call again inside the context."""
        for hooks in self._open[-1]:
            hooks.enter(self._module(), (), watched=True)
        try:
            yield
        finally:
            for hooks in reversed(self._open[-1]):
                hooks.interrupt()

    # Only these are hidden from torch.compile, as hooks are: the method itself may be compiled.
    @torch.compiler.disable
    def _enter(self, entered: list[SiteHooks], args, kwargs):
        module = self._module()
        args, kwargs = self._forward_hooks.before_forward(module, args, kwargs)
        for hooks in self._sites:
            entered.append(hooks)
            hooks.enter(module, args, kwargs, watched=True)
        return args, kwargs

    @torch.compiler.disable
    def _leave(self, entered: list[SiteHooks], args, output):
        module = self._module()
        while entered:
            entered.pop().leave(module, args, output)
        return self._forward_hooks.after_forward(module, args, output)
