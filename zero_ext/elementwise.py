"""Can an optimizer be run on pieces of its parameters? Found by trying."""

from itertools import pairwise

import torch
from torch import Tensor

_SHAPE = (3, 4)
_CUTS = (0, 5, 5, 12)  # uneven, one of them empty
_STEPS = 3
_SCALES = (1.0, 1e-4, 1e4)  # of the gradients: what clips them does so beyond a bound


def check(optimizer_class: type[torch.optim.Optimizer], kwargs: dict) -> None:
    """Run three steps on a matrix and on its flat pieces, on the CPU.

    Raises:
        TypeError: it cannot be run on flat pieces, or the elements come out otherwise. And what
            the optimizer's constructor raises.
    """
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    kwargs = {k: v for k, v in kwargs.items() if k != "capturable"}  # of other devices alone
    with torch.device("cpu"):
        optimizer_class([torch.nn.Parameter(torch.zeros(_SHAPE))], **kwargs)
    try:
        with torch.device("cpu"):
            whole = [_run(optimizer_class, kwargs, scale, pieces=False) for scale in _SCALES]
            parts = [_run(optimizer_class, kwargs, scale, pieces=True) for scale in _SCALES]
    except Exception as error:
        raise TypeError(
            f"zero_ext: {name} cannot be sharded: it does not run on flat pieces of a parameter "
            f"({type(error).__name__}: {error})."
        ) from error
    bits = [torch.stack(values).view(torch.int32) for values in (whole, parts)]
    if not torch.equal(*bits):
        raise TypeError(
            f"zero_ext: {name} cannot be sharded: it is not elementwise, its update of one element "
            "depends on others. AdamW, Adam and SGD are here; RMSprop, Adagrad, NAdam and the like "
            "can be wrapped."
        )


def _run(optimizer_class, kwargs, scale: float, *, pieces: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator)
    if pieces:
        flat = start.flatten()
        bounds = list(pairwise(_CUTS))
        parameters = [torch.nn.Parameter(flat[a:b].clone()) for a, b in bounds]
    else:
        parameters = [torch.nn.Parameter(start)]
    # As the ranks do: each has an optimizer of its own, over its pieces.
    optimizers = [optimizer_class(p, **kwargs) for p in (parameters[:-1], parameters[-1:]) if p]
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
