"""TorchOptimizer: what both kinds of optimizers have that ``wrap`` makes."""

import contextlib
import inspect
from collections.abc import Callable, Iterable
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext.optim import elementwise
from zero_ext.optim.sharded_optimizer import ShardedOptimizer


class OffloadedStates:
    """Which states of torch's optimizers are in host memory now.

    Empty unless ``set(True, …)`` was the last call.
    """

    def __init__(self) -> None:
        # By storage: one may hold several states.
        self._storages: dict[int, _C.OffloadedStorage] = {}

    def check(self) -> None:
        if self._storages:
            raise RuntimeError(_C.STATES_OFFLOADED)

    def set(self, offloaded: bool, values: Iterable[Any]) -> None:
        """Move those of ``values`` that are tensors on a device to the host, or all back."""
        if not offloaded:
            for storage in self._storages.values():
                storage.bring_back()
            self._storages.clear()
            return
        for value in values:
            if not isinstance(value, Tensor) or value.device.type == "cpu":
                continue
            key = value.untyped_storage()._cdata
            if key not in self._storages:
                self._storages[key] = _C.OffloadedStorage(value, _C.STATES_OFFLOADED)


class TorchOptimizer(ShardedOptimizer):
    """Runs optimizers of a class of torch's kind. Who inherits it passes ``_keywords`` to them.

    Args:
        probed: What a parameter may be. An optimizer of it is asked for what its class has.
    """

    _updates_in_python = True
    _step_supports_amp_scaling = False  # whatever the inner ones say
    # Of the trial with keywords, what is no error here.
    _trial_may_raise: tuple[type[Exception], ...] = ()

    # A method of the class by its name, which gets parameters, gradients and settings.
    _method_of: Callable[..., Callable]

    def __init__(self, optimizer_class, params, kwargs: dict[str, Any], probed: Tensor, **sharding):
        self._optimizer_class, self._kwargs = optimizer_class, kwargs
        self._attributes: dict[str, Any] = {}  # of the inner ones, that were set on this object
        self._offloaded = OffloadedStates()
        self._probe = optimizer_class([{"params": [torch.nn.Parameter(probed)]}], **kwargs)
        super().__init__(params, dict(self._probe.defaults), **sharding)

    def _inners(self) -> list[torch.optim.Optimizer]:
        raise NotImplementedError

    @property
    def _class_name(self) -> str:
        return getattr(self._optimizer_class, "__name__", repr(self._optimizer_class))

    def __getattr__(self, name: str) -> Any:
        """What only the inner optimizers have."""
        if name.startswith("_") or "_probe" not in vars(self):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        inner = next(iter(self._inners()), self._probe)
        value = getattr(inner, name)
        return self._method_of(name) if getattr(value, "__self__", None) is inner else value

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        inners = [] if own or vars(self).get("_handle") is None else [self._probe, *self._inners()]
        if not any(hasattr(inner, name) for inner in inners):
            super().__setattr__(name, value)
            return
        self._attributes[name] = value
        for inner in inners:
            setattr(inner, name, value)

    def _make_inner(self, group: dict[str, Any]) -> torch.optim.Optimizer:
        """Of one group, with the attributes that were set on this object."""
        inner = self._optimizer_class([group], **self._kwargs)
        for name, value in self._attributes.items():
            setattr(inner, name, value)
        return inner

    def _begin_method(self, what: str) -> None:
        """Raise where the inner optimizers' methods cannot be called."""
        self._follow_groups()
        self._handle.refuse_forgotten_writes(what)
        self._offloaded.check()
        self._emptied.follow(self)

    def _set_state_offloaded(self, offloaded: bool) -> None:
        super()._set_state_offloaded(offloaded)
        states = (item for inner in self._inners() for item in inner.state.items())
        values = (v for key, state in states if isinstance(key, Tensor) for v in state.values())
        self._offloaded.set(offloaded, values)

    @torch.compiler.disable
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        divide_by: float | None = None,
        **keywords: Any,
    ) -> Any:
        """As ``ShardedOptimizer.step``. The wrapped optimizer's ``step`` gets the keywords.

        Args:
            divide_by: See ``ShardedOptimizer.step``. Here ``p.grad`` is divided as well.
            keywords: Scalars that are equal on all ranks: numbers, strings, None, or tensors of one
                element.
        Raises:
            TypeError: the wrapped ``step`` has no such keyword, or it is no scalar, or with it the
                update depends on more than before; nothing has changed.
            ValueError: ranks pass different numbers; nothing was updated.
        """
        if keywords:
            check_keywords(type(self._probe).__name__, self._probe.step, keywords)
            # Numbers may change from step to step, as rates do.
            shown = {
                k: v if isinstance(v, str | bool | None) else type(v) for k, v in keywords.items()
            }
            checked = vars(self).setdefault("_keywords_checked", set())
            if repr(shown) not in checked:
                with contextlib.suppress(*self._trial_may_raise):
                    elementwise.check(self._optimizer_class, self._kwargs, {}, keywords)
                checked.add(repr(shown))
        self._keywords = keywords
        try:
            return super().step(closure, divide_by=divide_by)
        finally:
            self._keywords = {}


def check_keywords(name: str, step: Callable, keywords: dict[str, Any]) -> None:
    """Raise for what ``step``, the wrapped optimizer's, does not take, or no rank may pass alone.

    Raises:
        TypeError: naming the first keyword that is wrong.
    """
    for keyword, value in keywords.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise TypeError(
                f"zero_ext: step({keyword}=…) of a wrapped {name} is a tensor of shape "
                f"{tuple(value.shape)}. The optimizer steps a part of each parameter on each rank, "
                "which such a tensor is not cut to. Pass scalars, or write values of elements to "
                "optimizer.state[p][…] in place."
            )
        if not isinstance(value, Number | Tensor | str | None):
            raise TypeError(
                f"zero_ext: step({keyword}=…) of a wrapped {name} is a {type(value).__name__}. "
                "Ranks can be compared in scalars alone: pass numbers, strings or None."
            )
    try:
        inspect.signature(step).bind(**keywords)
    except TypeError as error:
        raise TypeError(
            f"zero_ext: step() of the wrapped {name}: {error}. Its signature is "
            f"step{inspect.signature(step)}."
        ) from None
