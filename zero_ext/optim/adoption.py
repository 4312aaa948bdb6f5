"""Adopting an optimizer of torch's: its settings, groups, hooks and the schedules made on it."""

import contextlib
import inspect
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zero_ext import optim
from zero_ext.optim import elementwise
from zero_ext.optim.attributes import TORCHS, attributes_of, check_attributes
from zero_ext.optim.groups import parameters_of
from zero_ext.optim.sharded_optimizer import ShardedOptimizer
from zero_ext.optim.wrapped_optimizer import Template, sharded

_OWN = {
    torch.optim.AdamW: optim.AdamW,
    torch.optim.Adam: optim.Adam,
    torch.optim.SGD: optim.SGD,
    torch.optim.Muon: optim.Muon,
}


def check(optimizer: Any) -> None:
    """
    Raises:
        ValueError, TypeError: it cannot be adopted.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"zero_ext: optimizer is {optimizer!r}, not an optimizer.")
    foreign = type(optimizer).__module__.startswith("deepspeed")
    if isinstance(optimizer, ShardedOptimizer) or foreign:
        raise ValueError(
            "zero_ext: only one of torch's optimizers can be adopted. Pass torch.optim's in place "
            f"of this {name}."
        )
    if not _has_own(optimizer):
        template = Template(optimizer, _arguments_of(optimizer))
        for group in {elementwise.kind_of(g): g for g in optimizer.param_groups}.values():
            with contextlib.suppress(elementwise.WholeParametersError):
                elementwise.check(template, {}, group)
        check_attributes(optimizer)
    # Some make their state when constructed, with a count of 0.
    states = [optimizer.state.get(p) for p in parameters_of(optimizer)]
    if any(float(state.get("step", 1)) > 0 for state in states if state):
        raise ValueError(
            f"zero_ext: the {name} has a state already. Pass one that has not stepped, and load "
            "its state_dict() into the optimizer that takes its place."
        )


def names_of(*models: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """The model and the name of each parameter, by id."""
    return {id(p): (model, name) for model in models for name, p in model.named_parameters()}


def follow_models(given: torch.optim.Optimizer, names: dict[int, tuple[nn.Module, str]]) -> None:
    """Give ``given`` the parameters that now have these names.

    A model that was on the meta device has new ones.
    """
    for group in given.param_groups:
        places = [names.get(id(p)) for p in group["params"]]
        group["params"] = [
            place[0].get_parameter(place[1]) if place else p
            for p, place in zip(group["params"], places, strict=True)
        ]


def adopt(given: torch.optim.Optimizer, **ours: Any) -> ShardedOptimizer:
    """The optimizer here that updates as ``given`` does.

    It has the same group dictionaries, so that a schedule that was made on ``given`` sets it.

    Args:
        given: Passed ``check``. Its parameters are sharded by now.
        ours: Arguments that torch's optimizer does not have.
    """
    arguments = _arguments_of(given)
    if _has_own(given):
        optimizer = _OWN[type(given)](given.param_groups, **arguments, **ours)
    else:
        optimizer = sharded(Template(given, arguments), given.param_groups, {}, **ours)
    for name in TORCHS:
        if name.endswith("_hooks"):  # the same dictionaries: handles that remove a hook find it
            setattr(optimizer, name, getattr(given, name))
    replaced = weakref.ref(given)

    def mark_as_stepped(*_) -> None:
        """torch's schedules warn when the optimizer that they were made on has not stepped."""
        if (made_on := replaced()) is not None:
            made_on._opt_called = True

    optimizer.register_step_post_hook(mark_as_stepped)
    given.state.clear()
    return optimizer


def optimizers_of(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Those that step some parameter of ``model``."""
    own = {id(parameter) for parameter in model.parameters()}
    return [o for o in optimizers if any(id(p) in own for p in parameters_of(o))]


def _has_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer here does the same. An object may have a ``step`` of its own."""
    kind = type(optimizer)
    return kind in _OWN and not any(hasattr(kind, name) for name in attributes_of(optimizer))


def _arguments_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    known = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in known}
