"""Plain PyTorch on one process, and what is needed to compare the library with it."""

from collections.abc import Callable, Iterable, Sequence

import torch
from harness import mean_square, reference_gradients
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_ext.engine.registry import find


class OneProcess:
    """A plain model with fp32 masters, which a stock torch optimizer steps.

    ``masters`` holds every parameter's fp32 value by name; after a step the model holds their
    roundings. A parameter that no batch reached is not stepped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        masters: dict[str, Tensor] | None = None,
    ):
        self.model = model
        self.parameters = dict(model.named_parameters())
        values = masters or self.parameters
        self.masters = {name: values[name].detach().float().clone() for name in self.parameters}
        self.optimizer = optimizer_fn(self.masters.values())

    def step(self, gradients: dict[str, Tensor | None]) -> None:
        """Step with given gradients; a missing or None one leaves its parameter alone."""
        for name, master in self.masters.items():
            master.grad = gradients.get(name)
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if gradients.get(name) is not None:
                    parameter.copy_(self.masters[name])

    def train(self, batches: Sequence[Sequence], loss_fn=mean_square) -> dict[str, Tensor | None]:
        """One step on ``batches[micro][rank]``, averaged over the ranks; returns the gradients."""
        world = len(batches[0])
        gradients = reference_gradients(lambda: self.model, batches, world, 1 / world, loss_fn)
        self.step(gradients)
        return gradients


def whole(tensor: Tensor) -> Tensor:
    """All elements, as a plain tensor on every rank. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's reduced gradient, copied; None where no rank reached it. Collective."""
    return {
        name: None if p.grad is None else whole(p.grad).clone()
        for name, p in model.named_parameters()
    }


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of ``full``, 1-D, if it is sharded as ``like``. No communication."""
    flat = torch.empty_strided(full.shape, like.stride(), dtype=full.dtype).copy_(full)
    flat = flat.as_strided((full.numel(),), (1,))
    if not isinstance(like, DTensor):
        return flat
    rank = like.device_mesh.get_local_rank()
    return flat[like.bounds[rank] : like.bounds[rank + 1]]


def own_values(tensor: Tensor) -> Tensor:
    """This rank's part of a gradient, master or state, 1-D."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def shown_master(parameter: Tensor) -> Tensor:
    """The fp32 master of a sharded parameter, in its shape."""
    handle, i = find(parameter)
    return handle.as_parameter(handle.engine.master_slice(i), i, parameter)


def fma(scale: float, values: Tensor, sums: Tensor) -> Tensor:
    """``scale · values + sums`` of fp32 with one rounding, as the hardware's fma does it.

    The product of two fp32 numbers is exact in fp64, the sum is not; rounded to odd there, it
    rounds to the right fp32 (Boldo & Melquiond 2008: fp64 has more than two digits more).
    """
    product = torch.tensor(scale, dtype=torch.float32).double() * values.double()
    addend = sums.double()
    total = product + addend
    # What the addition lost, exactly (Knuth's TwoSum).
    virtual = total - product
    lost = (product - (total - virtual)) + (addend - virtual)
    even = (total.view(torch.int64) & 1) == 0
    towards = torch.where(lost > 0, torch.inf, -torch.inf).double()
    odd = torch.nextafter(total, towards)
    return torch.where((lost != 0) & even, odd, total).float()


def fma_gradients(
    model: nn.Module, batches: Sequence[Sequence], divide_factor: float, loss_fn=mean_square
) -> dict[str, Tensor | None]:
    """Like ``reference_gradients``, for any factor: one rounding for each contribution."""
    scale = torch.tensor(1 / divide_factor, dtype=torch.float32).item()
    sums: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in model.named_parameters())
    for batch in (batch for ranks in batches for batch in ranks):
        model.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                before = torch.zeros(parameter.shape) if sums[name] is None else sums[name]
                sums[name] = fma(scale, parameter.grad.float(), before)
    model.zero_grad(set_to_none=True)
    return sums
