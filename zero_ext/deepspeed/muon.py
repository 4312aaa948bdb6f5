"""Muon: DeepSpeed's, with its Adam for what are no matrices, and which parameter gets which."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zero_ext.deepspeed.parameter_optimizer import ParameterOptimizer, check_not_negative

NS_METHODS = ("gram", "standard")
_ADAMS = ("embed", "lm_head")  # in names of matrices that Adam updates
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x³ and x⁵: Jordan et al. 2024
_ITERATIONS = 5
_RESTART = 2  # an iteration at which rounding in the Gram matrix is forgotten


class Muon(ParameterOptimizer):
    """Muon for the groups with ``use_muon``, Adam for the others, as in DeepSpeed.

    Args:
        lr: Of both. Default: 0.02 for Muon, 3e-4 for Adam.
        muon_lr, adam_lr: Of one of them, in place of ``lr``.
        momentum, ns_method: Of Muon. "gram" iterates on the smaller Gram matrix, in fp16 and on
            the CPU in fp32. "standard" iterates in bf16.
        betas, eps: Of Adam.
        adam_w_mode: Adam's weight decay is decoupled. Muon's always is.
    """

    def __init__(
        self,
        params,
        lr: float | None = None,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        ns_method: str = "gram",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ):
        rates = {
            True: _first(muon_lr, lr, 0.02),
            False: _first(adam_lr, lr, 3e-4),
        }
        groups = list(params)
        if not all(isinstance(group, dict) for group in groups):
            groups = [{"params": groups}]
        groups = [{"lr": rates[bool(group.get("use_muon"))], **group} for group in groups]
        defaults = {
            "lr": rates[False],
            "use_muon": False,
            "momentum": momentum,
            "ns_method": ns_method,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
        }
        super().__init__(groups, defaults)
        for rate in rates.values():
            _check({**defaults, "lr": rate, "params": []})
        for group in self.param_groups:
            _check(group)

    def _update(self, parameter: Tensor, group: dict) -> None:
        (self._muon if group["use_muon"] else self._adam)(parameter, group)

    def _muon(self, parameter: Tensor, group: dict) -> None:
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"])  # Nesterov's
        if update.dim() == 4:  # filters of a convolution
            update = update.flatten(1)
        rows, columns = parameter.shape[-2:]
        update = orthogonalised(update, group["ns_method"]) * max(1, rows / columns) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        update = update.to(parameter.dtype).reshape(parameter.shape)
        parameter.add_(update, alpha=-group["lr"])

    def _adam(self, parameter: Tensor, group: dict) -> None:
        state, gradient = self._counted_moments(parameter), parameter.grad
        if group["adam_w_mode"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        first, second = group["betas"]
        average = state["exp_avg"].lerp_(gradient, 1 - first)
        squares = state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
        root = (squares / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        update = average / (1 - first ** state["step"]) / root
        parameter.add_(update, alpha=-group["lr"])


def _first(*rates: float | None) -> float:
    return next(rate for rate in rates if rate is not None)


def _check(group: dict) -> None:
    check_not_negative(group, ("lr", "eps", "weight_decay"))
    for name, values in (("momentum", [group["momentum"]]), ("betas", group["betas"])):
        if not all(0 <= value < 1 for value in values):
            raise ValueError(f"{name} is {group[name]}: it must be from 0 to below 1.")
    if group["ns_method"] not in NS_METHODS:
        raise ValueError(f"ns_method is {group['ns_method']!r}: choose 'gram' or 'standard'.")
    vectors = [tuple(p.shape) for p in group["params"] if p.dim() < 2]
    if group["use_muon"] and vectors:
        raise ValueError(
            f"Muon updates matrices, and a parameter has shape {vectors[0]}. Set its use_muon to "
            "False."
        )


def orthogonalised(matrix: Tensor, method: str) -> Tensor:
    """With singular values near 1, by five iterations, in the dtype of ``method``.

    Of more than two dimensions, the last two are the matrices.
    """
    fits = matrix.shape[-2] <= matrix.shape[-1]
    wide = matrix if fits else matrix.mT
    if method == "gram":
        dtype = torch.float32 if matrix.device.type == "cpu" else torch.float16
        wide = _normalised(wide).to(dtype)
    else:
        wide = _normalised(wide.to(torch.bfloat16))
    square = wide.shape[-2] == wide.shape[-1]
    if method == "gram" and not square:
        wide = _iterated_on_gram(wide)
    else:
        a, b, c = _COEFFICIENTS
        for _ in range(_ITERATIONS):
            gram = wide @ wide.mT
            wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if fits else wide.mT


def _normalised(matrix: Tensor) -> Tensor:
    """Its largest singular value is at most 1."""
    return matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)


def _iterated_on_gram(wide: Tensor) -> Tensor:
    """The iterations by polynomials of the Gram matrix, which multiply from the left. Their product
    meets the wide matrix twice only (Dao 2026)."""
    a, b, c = _COEFFICIENTS
    eye = torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device)
    for begin, end in itertools.pairwise((0, _RESTART, _ITERATIONS)):
        gram, product = wide @ wide.mT, None
        for i in range(begin, end):
            rest = b * gram + c * gram @ gram  # the polynomial, less a times the identity
            product = a * eye + rest if product is None else a * product + rest @ product
            if i + 1 < end:
                half = a * gram + rest @ gram
                gram = a * half + rest @ half
        wide = product @ wide
    return wide


# The optimizer of each parameter


def muon_and_adam(model: nn.Module, parameters: Iterable) -> list[dict[str, Any]]:
    """Split parameters, or each group of them, in one for Muon and one for Adam.

    A parameter's own ``use_muon`` decides. Without it, Muon gets those of two and more dimensions,
    but not those whose name has "embed" or "lm_head" in it. A group's ``use_muon`` holds for all.
    """
    names = {id(p): name.lower() for name, p in model.named_parameters()}

    def is_muons(entry) -> bool:
        p = entry[1] if isinstance(entry, tuple) else entry
        name = names.get(id(p), "")
        return bool(getattr(p, "use_muon", p.dim() >= 2 and not any(k in name for k in _ADAMS)))

    given = list(parameters)
    if not all(isinstance(group, dict) for group in given):
        given = [{"params": given}]
    groups = []
    for group in given:
        if "use_muon" in group:
            groups.append(group)
            continue
        params = group["params"]
        entries = [params] if isinstance(params, Tensor) else list(params)
        for use_muon in (True, False):
            half = [entry for entry in entries if is_muons(entry) == use_muon]
            if half:
                groups.append({**group, "params": half, "use_muon": use_muon})
    return groups
