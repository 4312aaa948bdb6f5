"""A base for optimizers that tests make up."""

from typing import Any

import torch
from torch import Tensor


class EachByItself(torch.optim.Optimizer):
    """Its step is one call of ``update`` for each parameter that has a gradient."""

    def __init__(self, params, lr: float = 0.1, **defaults: Any):
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError
