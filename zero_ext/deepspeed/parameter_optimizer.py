"""The base of DeepSpeed's optimizers in torch: a step for each parameter by itself."""

from typing import Any

import torch
from torch import Tensor


class ParameterOptimizer(torch.optim.Optimizer):
    """Calls ``_update(parameter, group)`` for each parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _counted_moments(self, parameter: Tensor) -> dict[str, Any]:
        """Adam's state of a parameter, with the number of this step."""
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state


def check_not_negative(group: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if not group[name] >= 0:
            raise ValueError(f"{name} is {group[name]}: it must not be negative.")
