"""Parameter groups: which optimizer steps a parameter, and what users have changed in the groups.

An optimizer steps the parameters that were in its groups when it last followed them: no other
optimizer of the same engine may have one of these.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext.engine.checks import is_ignored, stays_whole
from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import find, find_all
from zero_ext.optim.arguments import Sharding
from zero_ext.ranks.agreement import check_same_on_all_ranks

Group = dict[str, Any]
Named = list[tuple[str, Tensor]]
# The sharded parameters that train, with their indices and the numbers of their groups.
Trained = Sequence[tuple[Tensor, int, int]]
Places = list[tuple[Tensor, int]]  # sharded parameters, with their indices in the engine

_OF_TORCH = {*vars(torch.optim.SGD([torch.zeros(1)])), "zero_core", "step"}


def settings_of(group: Group) -> dict[str, Any]:
    """All of a group but its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def named_in(state: dict[Any, Any]) -> dict[Any, Any]:
    """The states that an optimizer keeps under names, such as a count of steps."""
    return {key: value for key, value in dict.items(state) if not isinstance(key, Tensor)}


def replace_named(state: dict[Any, Any], named: dict[Any, Any]) -> None:
    """``named`` takes the place of what ``state`` has under names."""
    for key in named_in(state):
        del state[key]
    state.update(named)


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that its class or its user has set, without torch's own and ``step``."""
    return {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}


def parameters_of(groups: Sequence[Group]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def name_in_module(parameter: Tensor) -> str | None:
    """The parameter's name in the engine that shards it; None: no engine does."""
    entry = find(parameter)
    return None if entry is None else entry.handle.engine.parameter_name(entry.index)


def stepped_beside(optimizers: Iterable[Any], of_model: Container[int]) -> list[Tensor]:
    """The parameters in a model's engines that ``optimizers`` step beside its own, ``of_model``."""
    others = [p for o in optimizers for p in parameters_of(o.param_groups) if id(p) not in of_model]
    found = zip(others, find_all(others), strict=True)
    added = [(p, e.handle) for p, e in found if e and e.index >= e.handle.planned]
    return [p for p, handle in added if any(i in of_model for i in handle.entries)]


def named_parameters(groups: Sequence[Group], first: int = 0) -> tuple[Named, Named]:
    """From group ``first`` on: the parameters that can be sharded, and those that stay whole."""
    named: Named = []
    whole: Named = []
    for g, group in enumerate(groups[first:], first):
        names = group.get("param_names", ())
        if len(names) != len(group["params"]):  # none were given, or parameters were taken out
            names = [f"parameter {i} of group {g}" for i in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            stays = not p.requires_grad and stays_whole(p)
            (whole if stays else named).append((name, p))
    return named, whole


def check_not_owned(named: Named, optimizer: torch.optim.Optimizer) -> None:
    """Raise if another optimizer steps one of these parameters."""
    for name, parameter in named:
        handle, i = find(parameter) or (None, -1)
        for owner in () if handle is None else handle.optimizers:
            if owner is optimizer or i not in owner.zero_core.indices:
                continue
            owner.follow_groups()  # the user may have taken the parameter out of them
            if i in owner.zero_core.indices:
                raise ValueError(
                    f"zero_ext: '{name_in_module(parameter) or name}' is stepped by another "
                    f"optimizer ({type(owner).__name__}) already. Give each parameter to one "
                    "optimizer, or give up all parameters of the other optimizer with its retire()."
                )


def check_of_engine(named: Named, handle: Handle, *, grouped_by_hand: bool = False) -> None:
    """Raise if one of these parameters is not sharded by the engine of ``handle``."""
    for name, parameter in named:
        entry = find(parameter)
        if entry is not None and entry.handle is handle:
            continue
        what = f"'{name_in_module(parameter) or name}' of shape {tuple(parameter.shape)}"
        if grouped_by_hand and entry is None:
            raise ValueError(
                f"zero_ext: '{name}' of shape {tuple(parameter.shape)} was put into the groups by "
                "hand, and is not sharded. Add it with add_param_group()."
            )
        if is_ignored(parameter):
            raise ValueError(
                f"zero_ext: {what} is one of ignored_params, which each rank trains by itself. "
                "Give these an optimizer of their own."
            )
        raise ValueError(
            f"zero_ext: {what} is not a parameter of the sharded module that the others belong "
            "to. Give each sharded module its own optimizer, or shard one module that holds them: "
            "nn.ModuleList([one, another])."
        )


def handle_of_module(named: Named, sharding: Sharding) -> Handle | None:
    """The handle of the sharded module that has one of these parameters, or None for plain ones.

    Raises:
        ValueError: the module was sharded in another way.
    """
    handle = next((entry.handle for _, p in named if (entry := find(p)) is not None), None)
    if handle is None:
        return None
    for name, given, of_module in (
        ("stage", sharding.stage, handle.engine.stage),
        ("process_group", sharding.process_group, handle.groups.parent),
        ("offload_policy", sharding.offload_policy, handle.options.offload_policy),
    ):
        if given not in (None, of_module):
            raise ValueError(
                f"zero_ext: {name}={given}, but the module was sharded with {name} {of_module}. "
                f"Leave {name} out."
            )
    return handle


def check_same_optimizers(handle: Handle, described: str, sharded: Sequence[Places]) -> None:
    """Raise if ranks make different optimizers, in any order within a group. Collective."""
    if handle.groups.world == 1:
        return
    lines = [described]
    for g, places in enumerate(sharded):
        facts = _C.facts(handle.engine, sorted([i for _, i in places]))
        lines += [f"group {g}: {name}" for name, *_ in facts]
    check_same_on_all_ranks(
        handle.groups,
        lines,
        "the optimizers",
        remedy="Make the same optimizers in the same order on every rank.",
    )


def claim(
    groups: Sequence[Group], handle: Handle, optimizer: torch.optim.Optimizer
) -> list[Places]:
    """The sharded parameters of ``groups``.

    Raises:
        ValueError: one is not sharded by the optimizer's engine, or another optimizer's to step.
    """
    known = handle.entries.get
    found = [[(p, known(id(p))) for p in group["params"]] for group in groups]
    sharded = [[(p, entry[1]) for p, entry in each if entry is not None] for each in found]
    mine = {i for places in sharded for _, i in places}
    others = [each for each in handle.optimizers if each is not optimizer]
    of_engine = list(map(len, found)) == list(map(len, sharded))
    if not of_engine or not all(mine.isdisjoint(each.zero_core.indices) for each in others):
        named, _ = named_parameters(groups)
        check_not_owned(named, optimizer)
        check_of_engine(named, handle, grouped_by_hand=optimizer in handle.optimizers)
    return sharded
