"""DeepSpeed's optimizers, as torch's that do the same."""

import difflib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_ext.deepspeed.lamb import Lamb
from zero_ext.deepspeed.muon import NS_METHODS, Muon
from zero_ext.deepspeed.parameter_optimizer import ParameterOptimizer
from zero_ext.deepspeed.sections import Problems, Section, elements, is_quoted_number


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


_ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")
_LIONS = ("lion", "fusedlion", "deepspeedcpulion")
_OURS = {**dict.fromkeys(_LIONS, Lion), "lamb": Lamb, "fusedlamb": Lamb, "muon": Muon}


@dataclass(frozen=True)
class OptimizerSettings:
    kind: type[torch.optim.Optimizer]
    arguments: dict[str, Any]

    @staticmethod
    def read(given: Any, problems: Problems) -> "OptimizerSettings | None":
        """Of the section ``optimizer``."""
        section = Section("optimizer", given, problems)
        name, params, arguments = read_named(section)
        section.take("legacy_fusion", False)
        section.finish()
        kind = None if name is None else _class_of(name, section)
        if kind is None:
            return None
        if "max_grad_norm" in arguments:
            text = ": use 'gradient_clipping' instead."
            params.reject("max_grad_norm", arguments.pop("max_grad_norm"), text)
        if name.lower() in _ADAMS:
            kind, arguments = _adam(name, arguments, params)
        elif kind is Muon:
            _check_muon(arguments, params)
        if isinstance(arguments.get("betas"), list):
            arguments["betas"] = tuple(arguments["betas"])
        check_arguments(kind, arguments, params, {"params", "self"})
        if not problems:
            try:
                kind([torch.zeros(1, requires_grad=True)], **arguments)
            except (TypeError, ValueError) as error:
                problems.add(params.path, f"config '{params.path}': {error}")
        return OptimizerSettings(kind, arguments)


def read_named(section: Section) -> tuple[str | None, Section, dict[str, Any]]:
    """The ``type`` and the ``params`` of a section, those also as a dict."""
    name, params = section.text("type"), section.section("params")
    arguments = params.rest()
    for key, value in arguments.items():
        if any(is_quoted_number(element) for element in elements(value)):
            params.reject(key, value, ": a number in quotes. Remove the quotes.")
    if name is None:
        problem = f"config '{section.path}' has no 'type' that is a name. Give it one."
        section.problems.add(section.path, problem)
    return name, params, arguments


def check_arguments(kind: type, arguments: dict[str, Any], params: Section, own: set[str]) -> None:
    """Record arguments that ``kind`` does not take or lacks. ``own``: which the caller gives."""
    taken = inspect.signature(kind).parameters
    names = [name for name in taken if name not in own]
    for name in names:
        if taken[name].default is inspect.Parameter.empty and name not in arguments:
            path = params.path
            params.problems.add(
                path, f"config '{path}' lacks '{name}', which {kind.__name__} needs."
            )
    for key, value in arguments.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            meant = f"Did you mean '{near[0]}'?" if near else "Leave it out."
            params.reject(key, value, f": {kind.__name__} has no such argument. {meant}")


def _class_of(name: str, section: Section) -> type[torch.optim.Optimizer] | None:
    kinds = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if _is_class(kind)}
    lower = name.lower()
    kind = torch.optim.AdamW if lower in _ADAMS else _OURS.get(lower) or kinds.get(lower)
    if kind is None:
        section.reject(
            "type",
            name,
            ": choose Adam, AdamW, SGD, Lion, Lamb, Muon or another one of torch.optim, or pass "
            "optimizer=.",
        )
        return None
    return kind


def _adam(
    name: str, arguments: dict[str, Any], params: Section
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    decoupled = _flag(arguments, params, "adam_w_mode", True) or name.lower() == "adamw"
    if not _flag(arguments, params, "torch_adam", False):
        arguments.setdefault("weight_decay", 0.0)  # DeepSpeed's default, in AdamW too
    for flag in ("bias_correction", "fp32_optimizer_states"):
        _flag(arguments, params, flag, True, allowed=(True,))
    return torch.optim.AdamW if decoupled else torch.optim.Adam, arguments


def _check_muon(arguments: dict[str, Any], params: Section) -> None:
    """Take out what the class does not have."""
    _flag(arguments, params, "per_head_muon", False, allowed=(False,))
    _flag(arguments, params, "torch_adam", False)
    _flag(arguments, params, "fp32_optimizer_states", True, allowed=(True,))
    arguments["adam_w_mode"] = _flag(arguments, params, "adam_w_mode", True)
    method = arguments.get("ns_method", "gram")
    if method not in NS_METHODS:
        params.reject("ns_method", arguments.pop("ns_method"), ": choose 'gram' or 'standard'.")


def _flag(
    arguments: dict[str, Any],
    params: Section,
    flag: str,
    default: bool,
    allowed: tuple = (True, False),
) -> bool:
    """Take DeepSpeed's ``flag`` out of ``arguments``."""
    value = arguments.pop(flag, default)
    if not isinstance(value, bool) or value not in allowed:
        params.reject(flag, value, ", which is not available here. Leave it out.")
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
