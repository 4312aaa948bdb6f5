"""The arguments that all optimizers here take beside torch's own."""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OffloadPolicy

from zero_ext.engine.checks import check_number, check_positive
from zero_ext.optim.scaler import LossScaler


class Sharding(NamedTuple):
    """Explained at ``Sharded``."""

    stage: int | None = None
    process_group: dist.ProcessGroup | Literal["alone"] | None = None
    bucket_mb: float = 25.0
    nonfinite: str = "skip"
    max_grad_norm: float | None = None
    loss_scaler: LossScaler | None = None
    offload_policy: OffloadPolicy | None = None

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any]) -> "Sharding":
        """The arguments that torch's classes do not take: removed from ``kwargs``.

        Raises:
            ValueError, TypeError: one of them makes no sense.
        """
        taken = cls(**{name: kwargs.pop(name) for name in cls._fields if name in kwargs})
        if not isinstance(taken.loss_scaler, LossScaler | None):
            raise TypeError(
                f"zero_ext: loss_scaler must be a zero_ext.LossScaler, not {taken.loss_scaler!r}. "
                "torch's GradScaler is used as with any optimizer: scaler.step(optimizer)."
            )
        if taken.nonfinite not in ("skip", "raise", "step"):
            raise ValueError(
                f"zero_ext: nonfinite must be 'skip', 'raise' or 'step', not {taken.nonfinite!r}."
            )
        dynamic = taken.loss_scaler is not None and taken.loss_scaler.dynamic
        if dynamic and taken.nonfinite != "skip":
            raise ValueError(
                "zero_ext: a dynamic loss_scaler requires nonfinite='skip', not "
                f"{taken.nonfinite!r}, because it lowers the scale by skipping steps."
            )
        if taken.max_grad_norm is not None:
            check_positive("max_grad_norm", taken.max_grad_norm)
        check_differentiable(kwargs.get("differentiable", False))
        return taken


def check_params(params: Any) -> Iterable:
    """``params``; raise where they are no parameters, groups or named parameters to go through.

    torch's constructor checks each of them.
    """
    if isinstance(params, nn.Module):
        raise TypeError(
            f"zero_ext: an optimizer takes parameters, not a {type(params).__name__}. Pass its "
            "parameters()."
        )
    if not isinstance(params, Iterable):
        raise TypeError(f"zero_ext: an optimizer takes an iterable of parameters, not {params!r}.")
    return params


def check_group(group: Any) -> None:
    """Raise for a dict that is no group of parameters. Of anything else torch says what it is."""
    if isinstance(group, dict) and not isinstance(group.get("params"), Iterable):
        raise TypeError(
            f"zero_ext: a parameter group has its parameters under 'params', a Parameter or an "
            f"iterable of them, and this one {group.get('params')!r}."
        )


def check_closure(closure: Any) -> None:
    if closure is not None and not callable(closure):
        raise TypeError(
            f"zero_ext: step() takes a function that returns the loss, or nothing, not {closure!r}."
        )


def check_divide_by(divide_by: float | None) -> None:
    if divide_by is None:
        return
    check_number("divide_by", divide_by)
    if not 0 <= divide_by < math.inf:
        raise ValueError(
            f"zero_ext: step(divide_by={divide_by}): pass the number of tokens or samples of this "
            "rank, 0 or more."
        )


def check_state_dict(state_dict: Any) -> None:
    wrong = not isinstance(state_dict, dict)
    missing = [] if wrong else [k for k in ("state", "param_groups") if k not in state_dict]
    if wrong or missing:
        what = type(state_dict).__name__ if wrong else f"dict without '{missing[0]}'"
        raise TypeError(
            f"zero_ext: load_state_dict() takes what an optimizer's state_dict() returned, not a "
            f"{what}."
        )


def check_differentiable(differentiable: bool) -> None:
    """Raise for an argument of torch's that no update in C++ can honour."""
    if differentiable:
        raise NotImplementedError(
            "zero_ext: differentiable=True is not available: the update runs in C++ without a "
            "graph. Use torch.optim for meta-learning."
        )
