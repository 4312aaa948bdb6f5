"""The arguments that all optimizers here take beside torch's own."""

from typing import TypedDict

import torch.distributed as dist
from torch.distributed.fsdp import OffloadPolicy

from zero_ext.engine.checks import check_number
from zero_ext.optim.scaler import LossScaler


class ShardingArguments(TypedDict, total=False):
    """Explained at ``ShardedOptimizer``, whose constructor has their defaults."""

    stage: int | None
    process_group: dist.ProcessGroup | None
    bucket_mb: float
    nonfinite: str
    max_grad_norm: float | None
    loss_scaler: LossScaler | None
    offload_policy: OffloadPolicy | None


def check_arguments(
    nonfinite: str, max_grad_norm: float | None, loss_scaler: LossScaler | None
) -> None:
    """Raise for arguments that are wrong by themselves or do not go together."""
    if not isinstance(loss_scaler, LossScaler | None):
        raise TypeError(
            f"zero_ext: loss_scaler must be a zero_ext.LossScaler, not {loss_scaler!r}. "
            "torch's GradScaler is used as with any optimizer: scaler.step(optimizer)."
        )
    if nonfinite not in ("skip", "raise", "step"):
        raise ValueError(
            f"zero_ext: nonfinite must be 'skip', 'raise' or 'step', not {nonfinite!r}."
        )
    if loss_scaler is not None and loss_scaler.dynamic and nonfinite != "skip":
        raise ValueError(
            "zero_ext: a dynamic loss_scaler requires nonfinite='skip', not "
            f"{nonfinite!r}, because it lowers the scale by skipping steps."
        )
    if max_grad_norm is not None:
        check_number("max_grad_norm", max_grad_norm)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"zero_ext: max_grad_norm must be positive, not {max_grad_norm}.")


def check_differentiable(differentiable: bool) -> None:
    """Raise for an argument of torch's that no update in C++ can honour."""
    if differentiable:
        raise NotImplementedError(
            "zero_ext: differentiable=True is not available: the update runs in C++ without a "
            "graph. Use torch.optim for meta-learning."
        )
