"""``register_forward_method``: methods beside ``forward`` that compute with a sharded model."""

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn

from zero_ext.engine.module_hooks import SiteHooks, hooks_of
from zero_ext.engine.registry import find
from zero_ext.module.sharding import ShardedMethods


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """From now on ``module.method_name()`` is to a sharded model what its forward is.

    With stage 3 the parameters that ``module`` itself reads are gathered inside it, and again in
    its backward; those of its children as their forwards are called. With every stage inputs and
    outputs are cast as ``mp_policy`` says. As ``register_fsdp_forward_method`` of FSDP2.

    Args:
        module: What ``shard`` returned, or a submodule of it.
    Raises:
        ValueError: ``module`` has no such method, or no parameter of it is sharded.
    """
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"zero_ext: {type(module).__name__} has no method '{method_name}'.")
    handles = [entry[0] for p in module.parameters() if (entry := find(p)) is not None]
    if not handles or handles[0].sharded_methods is None:
        raise ValueError(
            f"zero_ext: register_forward_method: no parameter of this {type(module).__name__} was "
            "sharded with zero_ext.shard(). Call that first, and then this."
        )
    if isinstance(getattr(module, method_name), ForwardMethod):
        return
    root = handles[0].root_hooks
    sites = [*root, *(hooks for hooks in hooks_of(module) if hooks not in root)]
    methods = handles[0].sharded_methods()
    setattr(module, method_name, ForwardMethod(module, method_name, methods, sites))


class ForwardMethod:
    """A method of a module, inside the hooks of a forward.

    A copy of the module is a plain module, and so is a copy of this. Holds the module weakly: in a
    cycle, its buffers would wait for a garbage collection.
    """

    def __init__(
        self, module: nn.Module, name: str, methods: ShardedMethods, sites: list[SiteHooks]
    ):
        self._module = weakref.ref(module)
        self._name = name
        self._own = module.__dict__.get(name)  # where it is no method of the class
        self._methods = methods
        self._sites = sites
        self._open: list[list[SiteHooks]] = []  # what each running call has entered
        with contextlib.suppress(AttributeError):
            functools.update_wrapper(self, self._method())

    @property
    def __wrapped__(self) -> Callable:
        """For ``inspect``. Not kept: it would hold the module."""
        return self._method()

    def __deepcopy__(self, memo) -> "ForwardMethod":
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._module = weakref.ref(copy.deepcopy(self._module(), memo))
        twin._own, twin._methods, twin._sites = (
            copy.deepcopy(part, memo) for part in (self._own, self._methods, self._sites)
        )
        twin._open = []
        return twin

    def __reduce__(self):
        state = {**self.__dict__, "_module": self._module(), "_open": []}
        return _unpickle, (state,)

    def _method(self) -> Callable:
        module = self._module()
        if self._own is not None:
            return self._own
        kind = type(module)
        method = inspect.getattr_static(kind, self._name)
        return method.__get__(module, kind) if hasattr(method, "__get__") else method

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
        """As if the innermost call had ended: an optimizer may step. It goes on behind it."""
        for hooks in reversed(self._open[-1]):
            hooks.interrupt()
        try:
            yield
        finally:
            for hooks in self._open[-1]:
                hooks.enter(self._module(), ())

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Within ``outside()``: as if it had not ended."""
        for hooks in self._open[-1]:
            hooks.enter(self._module(), ())
        try:
            yield
        finally:
            for hooks in reversed(self._open[-1]):
                hooks.interrupt()

    # As module_hooks' hooks; the method itself may be compiled.
    @torch.compiler.disable
    def _enter(self, entered: list[SiteHooks], args, kwargs):
        module = self._module()
        args, kwargs = self._methods.before_forward(module, args, kwargs)
        for hooks in self._sites:
            entered.append(hooks)
            hooks.enter(module, args, kwargs)
        return args, kwargs

    @torch.compiler.disable
    def _leave(self, entered: list[SiteHooks], args, output):
        module = self._module()
        while entered:
            entered.pop().leave(module, args, output)
        return self._methods.after_forward(module, args, output)


def _unpickle(state: dict) -> ForwardMethod:
    method = ForwardMethod.__new__(ForwardMethod)
    method.__dict__.update(state, _module=weakref.ref(state["_module"]))
    return method
