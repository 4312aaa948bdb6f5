"""Parameters that were frozen when they were sharded and are trained from now on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_ext.engine.registry import Handle
from zero_ext.ranks.collectives import all_reduce_


# Also where a forward in inference mode notices that the parameters are trained.
@torch.inference_mode(False)
@torch.no_grad()
def make_trainable(handle: Handle, unfrozen: Sequence[int]) -> None:
    """Make units of the parameters ``unfrozen``, with the gradients that autograd has left in
    their ``.grad``. Collective."""
    gradients = {i: handle.parameters[i].grad for i in unfrozen}
    handle.engine.meet_for_unfreezing(list(unfrozen))
    averages = {i: _average(handle, i, gradient) for i, gradient in gradients.items()}
    by_unit: dict[int, list[int]] = {}
    for i in unfrozen:
        handle.parameters[i].grad = None
        by_unit.setdefault(handle.engine.frozen_unit_of(i), []).append(i)
    try:
        for members in by_unit.values():
            handle.make_units_by_size(members)
    finally:  # parameters for which there is no memory stay as they were
        for i, average in averages.items():
            if handle.engine.unit_of(i) < 0:
                handle.parameters[i].grad = gradients[i]
            elif average is not None:
                handle.engine.write_gradient(i, average)


def _average(handle: Handle, i: int, gradient: Tensor | None) -> Tensor | None:
    """What a reduction makes of each rank's ``gradient``; None where no rank has one."""
    groups, divisor = handle.groups, handle.engine.gradient_divisor
    if groups.world == 1:
        return None if gradient is None else gradient.float() / divisor
    holders = torch.zeros((), dtype=torch.float32, device=groups.device)
    shape = handle.parameters[i].shape
    total = torch.zeros(shape, dtype=torch.float32, device=groups.device)
    if gradient is not None:
        holders.fill_(1.0)
        total.copy_(gradient.detach())
    all_reduce_(holders, groups.parent)
    all_reduce_(total, groups.parent)
    return total / divisor if holders else None
