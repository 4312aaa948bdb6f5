"""Keywords of a wrapped optimizer's ``step``: scalars, which are the same on every rank."""

import inspect
from collections.abc import Callable
from numbers import Number
from typing import Any

from torch import Tensor


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
