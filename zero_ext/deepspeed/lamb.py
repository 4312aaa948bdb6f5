"""Lamb: DeepSpeed's ``FusedLamb``, in torch."""

import torch
from torch import Tensor

from zero_ext.deepspeed.parameter_optimizer import ParameterOptimizer, check_not_negative


class Lamb(ParameterOptimizer):
    """Lamb (You et al. 2020, arXiv 1904.00962), with DeepSpeed's arguments and defaults.

    A step has the length of the parameter, times ``lr``. The factor for that is bounded by
    ``min_coeff`` and ``max_coeff``. As in DeepSpeed, the correction of the biases scales the whole
    step, also its weight decay.

    Args:
        eps_inside_sqrt: Add ``eps`` to the mean of the squares, and not to its root.
        max_grad_norm, amsgrad: Not available: 0 and False.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ):
        if amsgrad:
            raise ValueError("Lamb has no amsgrad. Leave it out.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check(group)

    def _update(self, parameter: Tensor, group: dict) -> None:
        state, gradient = self._counted_moments(parameter), parameter.grad
        first, second = group["betas"]
        average = state["exp_avg"].lerp_(gradient, 1 - first)
        squares = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if group["eps_inside_sqrt"]:
            root = (squares + group["eps"]).sqrt_()
        else:
            root = squares.sqrt().add_(group["eps"])
        update = (average / root).add_(parameter, alpha=group["weight_decay"])
        size = group["lr"]
        if group["bias_correction"]:
            corrections = 1 - first ** state["step"], 1 - second ** state["step"]
            size = size * corrections[1] ** 0.5 / corrections[0]
        lengths = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
        ratio = (lengths[0] / lengths[1]).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((lengths[0] != 0) & (lengths[1] != 0), ratio, 1.0)
        parameter.sub_(update.mul_(ratio * size))


def _check(group: dict) -> None:
    check_not_negative(group, ("lr", "eps", "weight_decay", "min_coeff"))
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas are {group['betas']}: they must be from 0 to below 1.")
    if not group["min_coeff"] <= group["max_coeff"]:
        raise ValueError(
            f"min_coeff is {group['min_coeff']} and max_coeff {group['max_coeff']}: swap them."
        )
    if group["max_grad_norm"] != 0:
        raise ValueError(
            f"max_grad_norm is {group['max_grad_norm']}: use 'gradient_clipping' instead."
        )
