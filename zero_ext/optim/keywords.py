"""Keywords of a wrapped optimizer's ``step``: scalars, which are the same on every rank."""

import contextlib
import inspect
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from zero_ext.optim import elementwise
from zero_ext.optim.sharded_optimizer import ShardedOptimizer


class KeywordOptimizer(ShardedOptimizer):
    """Passes keywords of ``step`` on to the optimizer that it wraps.

    Who inherits it has ``_optimizer_class``, ``_kwargs`` and ``_probe``, and its update passes
    ``_keywords``.
    """

    # Of the trial with keywords, what is no error here.
    _trial_may_raise: tuple[type[Exception], ...] = ()

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
