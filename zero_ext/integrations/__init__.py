"""Other libraries' training loops over sharded models. Each module here needs its library."""

from collections.abc import Iterable

import torch
from torch import nn

from zero_ext.engine.registry import any_sharded
from zero_ext.optim.groups import parameters_of


def is_sharded(model: nn.Module | None) -> bool:
    return model is not None and any_sharded(model.parameters())


def optimizers_of(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """The optimizers that step some parameter of ``model``."""
    own = {id(parameter) for parameter in model.parameters()}
    return [o for o in optimizers if any(id(p) in own for p in parameters_of(o.param_groups))]
