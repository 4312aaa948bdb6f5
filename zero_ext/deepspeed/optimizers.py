"""DeepSpeed's optimizers, as torch's that do the same."""

import difflib
import functools
import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_ext.deepspeed.lamb import Lamb
from zero_ext.deepspeed.muon import NS_METHODS, Muon
from zero_ext.deepspeed.parameter_optimizer import ParameterOptimizer
from zero_ext.deepspeed.readers import elements, is_auto
from zero_ext.deepspeed.values import Values


class Lion(ParameterOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, Algorithm 2), with DeepSpeed's defaults.

    The step is ``lr`` times the sign of an average of gradient and momentum.
    """

    def __init__(self, params, lr: float = 1e-3, betas=(0.9, 0.999), weight_decay: float = 0.0):
        if not lr >= 0 or not all(0 <= beta < 1 for beta in betas) or not weight_decay >= 0:
            raise ValueError(
                f"lr={lr}, betas={betas}, weight_decay={weight_decay}: rates must not be negative, "
                "and betas must be below 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average, gradient = state["exp_avg"], parameter.grad
        direction = average.lerp(gradient, 1 - first).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(direction * group["lr"])
        average.lerp_(gradient, 1 - second)


_PARAMS = "optimizer.params"
_ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")
_LIONS = ("lion", "fusedlion", "deepspeedcpulion")
_OURS = {**dict.fromkeys(_LIONS, Lion), "lamb": Lamb, "fusedlamb": Lamb, "muon": Muon}


class Named(NamedTuple):
    """The optimizer that a section names by ``type`` and ``params``."""

    kind: type
    arguments: dict[str, Any]


def read_optimizer(values: Values) -> Named | None:
    name, arguments = read_named(values, "optimizer")
    kind = None if name is None else _class_of(name, values)
    if kind is None:
        return None
    take = functools.partial(_take_flag, arguments, values)
    if "max_grad_norm" in arguments:
        text = ": use 'gradient_clipping' instead."
        values.reject(f"{_PARAMS}.max_grad_norm", arguments.pop("max_grad_norm"), text)
    if name.lower() in _ADAMS:
        decoupled = take("adam_w_mode", True) or name.lower() == "adamw"
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        if not take("torch_adam", False):
            arguments.setdefault("weight_decay", 0.0)  # DeepSpeed's default, in AdamW too
        for flag in ("bias_correction", "fp32_optimizer_states"):
            take(flag, True, allowed=(True,))
    elif kind is Muon:
        take("per_head_muon", False, allowed=(False,))
        take("torch_adam", False)
        take("fp32_optimizer_states", True, allowed=(True,))
        arguments["adam_w_mode"] = take("adam_w_mode", True)
        if (method := arguments.get("ns_method", "gram")) not in NS_METHODS:
            del arguments["ns_method"]
            values.reject(f"{_PARAMS}.ns_method", method, ": choose 'gram' or 'standard'.")
    if isinstance(arguments.get("betas"), list):
        arguments["betas"] = tuple(arguments["betas"])
    check_arguments(kind, arguments, values, "optimizer")
    if not values.wrong:
        try:
            kind([torch.zeros(1, requires_grad=True)], **arguments)
        except (TypeError, ValueError) as error:
            values.add(_PARAMS, f"config '{_PARAMS}': {error}")
    return Named(kind, arguments)


def read_named(values: Values, section: str) -> tuple[str | None, dict[str, Any]]:
    """The ``type`` and the ``params`` of a section."""
    name, arguments = values[f"{section}.type"], dict(values[f"{section}.params"])
    for key, value in arguments.items():
        if is_auto(value) or any(map(_is_quoted_number, elements(value))):
            path = f"{section}.params.{key}"
            values.reject(path, value, ": a number in quotes. Remove the quotes.")
    if name is None and f"{section}.type" not in values.wrong:
        values.add(section, f"config '{section}' has no 'type' that is a name. Give it one.")
    return name, arguments


def _is_quoted_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def check_arguments(kind: type, arguments: dict[str, Any], values: Values, section: str) -> None:
    """Record arguments that ``kind`` does not take or lacks, after that which it is made on."""
    path, (_, *taken) = f"{section}.params", inspect.signature(kind).parameters.values()
    names = [each.name for each in taken]
    for each in taken:
        if each.default is inspect.Parameter.empty and each.name not in arguments:
            lacks = f"config '{path}' lacks '{each.name}', which {kind.__name__} needs."
            values.add(path, lacks)
    for key, value in arguments.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            meant = f"Did you mean '{near[0]}'?" if near else "Leave it out."
            problem = f": {kind.__name__} has no such argument. {meant}"
            values.reject(f"{path}.{key}", value, problem)


def _class_of(name: str, values: Values) -> type[torch.optim.Optimizer] | None:
    kinds = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if _is_class(kind)}
    lower = name.lower()
    kind = torch.optim.AdamW if lower in _ADAMS else _OURS.get(lower) or kinds.get(lower)
    if kind is None:
        values.reject(
            "optimizer.type",
            name,
            ": choose Adam, AdamW, SGD, Lion, Lamb, Muon or another one of torch.optim, or pass "
            "optimizer=.",
        )
    return kind


def _take_flag(
    arguments: dict[str, Any],
    values: Values,
    flag: str,
    default: bool,
    allowed: tuple = (True, False),
) -> bool:
    """Take DeepSpeed's ``flag``, which torch's class does not have, out of ``arguments``."""
    value = arguments.pop(flag, default)
    if not isinstance(value, bool) or value not in allowed:
        problem = ", which is not available here. Leave it out."
        values.reject(f"{_PARAMS}.{flag}", value, problem)
        return default
    return value


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def as_torchs(optimizer: Any) -> Any:
    """DeepSpeed's own Adam, Lion or Lamb that has not stepped yet, as torch's kind with its groups.
    Anything else is returned as it is."""
    name, arguments = type(optimizer).__name__.lower(), {}
    if name in _LIONS and not isinstance(optimizer, Lion):
        kind: type[torch.optim.Optimizer] = Lion
    elif name in ("fusedadam", "deepspeedcpuadam"):
        decoupled = getattr(optimizer, "adam_w_mode", True)
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    elif type(optimizer).__name__ == "FusedLamb":  # apex has a FusedLAMB, which is another one
        kind, arguments = Lamb, {"eps_inside_sqrt": getattr(optimizer, "eps_mode", 1) == 0}
    else:
        return optimizer
    if optimizer.state:
        raise ValueError(
            f"zero_ext: the {type(optimizer).__name__} has stepped already. Pass a new one."
        )
    taken = {"params", *inspect.signature(kind).parameters}
    groups = [{k: v for k, v in g.items() if k in taken} for g in optimizer.param_groups]
    return kind(groups, **arguments)
