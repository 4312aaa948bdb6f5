"""Cuts parameters into units: what is reduced, stepped and gathered together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn


class UnitPlan(NamedTuple):
    """Parameter indices of one unit, in registration order, and the dtype they are computed in."""

    members: list[int]
    dtype: torch.dtype


def cut_by_size(
    numels: Sequence[int], dtypes: Sequence[torch.dtype], bucket_bytes: float
) -> list[UnitPlan]:
    """Cut parameters, in reverse registration order, into units of about ``bucket_bytes``.

    Gradients arrive roughly in reverse registration order, so units fill one after the other. A
    unit has one dtype; a parameter is never cut, so one that is larger makes a larger unit.

    Returns:
        Units in the order in which they become complete, which is the order of reductions.
    """
    units: list[UnitPlan] = []
    open_units: dict[torch.dtype, tuple[list[int], int]] = {}
    for i in reversed(range(len(numels))):
        dtype = dtypes[i]
        members, held_bytes = open_units.pop(dtype, ([], 0))
        parameter_bytes = numels[i] * dtype.itemsize
        if members and held_bytes + parameter_bytes > bucket_bytes:
            units.append(UnitPlan(members[::-1], dtype))
            members, held_bytes = [], 0
        open_units[dtype] = ([*members, i], held_bytes + parameter_bytes)
    units.extend(UnitPlan(members[::-1], dtype) for dtype, (members, _) in open_units.items())
    return units


def used_several_times(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that the module has under several names, such as tied embeddings and heads.

    Autograd adds up a parameter's uses in one backward before any hook sees them, in the
    gradient's dtype: in bf16, 256 + 1 is 256. So gradients of these arrive and travel in fp32, see
    ``Handle``. Uses of one name, by a module that is called twice, cannot be known beforehand.
    """
    names: dict[int, list[nn.Parameter]] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(parameter)
    return [uses[0] for uses in names.values() if len(uses) > 1]
