"""Whether an optimizer can be run on pieces of its parameters, found by trying."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zero_ext.optim.groups import settings_of

_SHAPE = (3, 4)
_CUTS = (0, 5, 5, 12)  # uneven, one of them empty
_STEPS = 3
_SCALES = (1.0, 1e-4, 1e4)  # of the gradients: an optimizer may clip them beyond a bound
# In place of every given rate: with a rate of 0, where warm-ups begin, nothing moves.
_LR = 0.1


def kind_of(group: dict[str, Any]) -> str:
    """Equal for groups of which only one has to be tried.

    Rates and names are left out: each layer may have its own.
    """
    return repr({k: v for k, v in settings_of(group).items() if k not in ("lr", "name")})


def check(
    optimizer_class: type[torch.optim.Optimizer], kwargs: dict, group: dict[str, Any]
) -> None:
    """Run three steps on a matrix and on its flat pieces, on the CPU.

    Args:
        group: With settings of its own, or empty. LARS, for example, is elementwise where weights
            do not decay.
    Raises:
        TypeError: it cannot be run on flat pieces, or the elements differ.
        Exception: whatever the optimizer's constructor raises.
    """
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    # capturable is for other devices only.
    kwargs, settings = (
        {
            k: _LR if k == "lr" and isinstance(v, float | int | Tensor) else v
            for k, v in given.items()
            if k != "capturable"
        }
        for given in (kwargs, settings_of(group))
    )

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return optimizer_class([{**settings, "params": parameters}], **kwargs)

    with torch.device("cpu"):
        make([torch.nn.Parameter(torch.zeros(_SHAPE))])
    try:
        with torch.device("cpu"):
            whole = [_run(make, scale, pieces=False) for scale in _SCALES]
            parts = [_run(make, scale, pieces=True) for scale in _SCALES]
    except Exception as error:
        raise TypeError(
            f"zero_ext: {name} cannot be sharded: it does not run on flat pieces of a parameter "
            f"({type(error).__name__}: {error})."
        ) from error
    bits = [torch.stack(values).view(torch.int32) for values in (whole, parts)]
    if not torch.equal(*bits):
        raise TypeError(
            f"zero_ext: {name} cannot be sharded: it is not elementwise, its update of one element "
            "depends on others. Use AdamW, Adam or SGD of zero_ext.optim, or wrap an elementwise "
            "one such as RMSprop, Adagrad or NAdam."
        )


def _run(make, scale: float, *, pieces: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator)
    if pieces:
        flat = start.flatten()
        bounds = list(pairwise(_CUTS))
        parameters = [torch.nn.Parameter(flat[a:b].clone()) for a, b in bounds]
    else:
        parameters = [torch.nn.Parameter(start)]
    # As on several ranks: each has an optimizer of its own, over its pieces.
    optimizers = [make(p) for p in (parameters[:-1], parameters[-1:]) if p]
    for _ in range(_STEPS):
        gradient = torch.randn(_SHAPE, generator=generator) * scale
        if pieces:
            for parameter, (a, b) in zip(parameters, bounds, strict=True):
                parameter.grad = gradient.flatten()[a:b].clone()
        else:
            parameters[0].grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters])
