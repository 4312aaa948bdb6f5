"""Parameter groups: which optimizer owns a parameter, and what users have changed in the groups."""

import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import OffloadPolicy

from zero_ext.engine.checks import is_ignored, stays_whole
from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import ByTensor, find
from zero_ext.ranks.agreement import check_same_on_all_ranks

if TYPE_CHECKING:
    from zero_ext.optim.sharded_optimizer import ShardedOptimizer

Group = dict[str, Any]
Named = list[tuple[str, Tensor]]

_owners = ByTensor()  # Parameter -> weak reference to the optimizer that steps it


def _owner_of(parameter: Tensor) -> "ShardedOptimizer | None":
    owner = _owners.get(parameter)
    return None if owner is None else owner()


def disown(parameters: Iterable[Tensor], optimizer: "ShardedOptimizer") -> None:
    """Let another optimizer step those of ``parameters`` that belong to ``optimizer``."""
    for parameter in parameters:
        if _owner_of(parameter) is optimizer:
            del _owners[parameter]


def settings_of(group: Group) -> dict[str, Any]:
    """All of a group but its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def named_in(state: dict[Any, Any]) -> dict[Any, Any]:
    """What an optimizer keeps under names, and not for a parameter, such as a count of steps."""
    return {key: value for key, value in dict.items(state) if not isinstance(key, Tensor)}


def replace_named(state: dict[Any, Any], named: dict[Any, Any]) -> None:
    """``named`` takes the place of what ``state`` has under names."""
    for key in named_in(state):
        del state[key]
    state.update(named)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def sharded_in(group: Group) -> list[tuple[Tensor, int]]:
    """The sharded parameters of a group, with their indices in the engine."""
    found = [(parameter, find(parameter)) for parameter in group["params"]]
    return [(parameter, place[1]) for parameter, place in found if place is not None]


def trained_in(groups: Sequence[Group]) -> dict[Tensor, Group]:
    """The group of each sharded parameter that trains, in an order that all ranks have."""
    found = [(i, p, group) for group in groups for p, i in sharded_in(group)]
    found.sort(key=lambda each: each[0])
    return {p: group for i, p, group in found if find(p)[0].engine.unit_of(i) >= 0}


def name_in_module(parameter: Tensor) -> str | None:
    """What the engine that shards ``parameter`` calls it; None: no engine does."""
    place = find(parameter)
    return None if place is None else place[0].engine.parameter_name(place[1])


def named_parameters(groups: Sequence[Group], first: int = 0) -> tuple[Named, Named]:
    """From group ``first`` on: the parameters that can be sharded, and those that stay whole."""
    named = []
    for g, group in enumerate(groups[first:], first):
        names = group.get("param_names", ())
        if len(names) != len(group["params"]):  # none were given, or parameters were taken out
            names = [
                name_in_module(p) or f"parameter {i} of group {g}"
                for i, p in enumerate(group["params"])
            ]
        named.extend(zip(names, group["params"], strict=True))
    whole = [(name, p) for name, p in named if stays_whole(p)]
    return [(name, p) for name, p in named if not stays_whole(p)], whole


def check_not_owned(named: Named, optimizer: "ShardedOptimizer") -> None:
    """Raise if another optimizer steps one of these parameters."""
    for name, parameter in named:
        owner = _owner_of(parameter)
        if owner in (None, optimizer):
            continue
        owner._follow_groups()  # the user may have taken the parameter out of them
        if _owner_of(parameter) is owner:
            raise ValueError(
                f"zero_ext: '{name}' is stepped by another optimizer ({type(owner).__name__}) "
                "already. Give each parameter to one optimizer, or give up all parameters of the "
                "other optimizer with its retire()."
            )


def check_of_engine(named: Named, handle: Handle) -> None:
    """Raise if one of these parameters is not sharded by the engine of ``handle``."""
    for name, parameter in named:
        place = find(parameter)
        if place is not None and place[0] is handle:
            continue
        what = f"'{name}' of shape {tuple(parameter.shape)}"
        if is_ignored(parameter):
            raise ValueError(
                f"zero_ext: {what} is one of ignored_params, which each rank trains by itself. "
                "Give these an optimizer of their own."
            )
        if place is None:
            raise ValueError(
                f"zero_ext: {what} is not sharded, and others of this optimizer are"
                f"{_replaced_by(parameter, named, handle)}. Change modules before zero_ext.shard()."
            )
        raise ValueError(
            f"zero_ext: {what} is not a parameter of the sharded module that the others belong "
            "to. Give each sharded module its own optimizer, or shard one module that holds them: "
            "nn.ModuleList([one, another])."
        )


def _replaced_by(parameter: Tensor, named: Named, handle: Handle) -> str:
    """Which sharded parameter of this size is in no group: a replaced module had it."""
    here = {place[1] for _, p in named if (place := find(p)) is not None}
    for i in range(len(handle.parameters)):
        if i not in here and handle.engine.bounds(i)[-1] == parameter.numel():
            name = handle.engine.parameter_name(i)
            return f": it may have replaced '{name}' after the module was sharded"
    return ": it was added after the module was sharded, or belongs to another module"


def handle_of_module(
    named: Named,
    stage: int | None,
    process_group: dist.ProcessGroup | None,
    offload_policy: OffloadPolicy | None,
) -> Handle | None:
    """The handle of the sharded module whose parameters these are, or None for plain ones.

    Raises:
        ValueError: they are not all of one module, or the module was sharded in another way.
    """
    handle = next((place[0] for _, p in named if (place := find(p)) is not None), None)
    if handle is None:
        return None
    check_of_engine(named, handle)
    for name, given, of_module in (
        ("stage", stage, handle.engine.stage),
        ("process_group", process_group, handle.groups.parent),
        ("offload_policy", offload_policy, handle.offload_policy),
    ):
        if given not in (None, of_module):
            raise ValueError(
                f"zero_ext: {name}={given}, but the module was sharded with {name} {of_module}. "
                f"Leave {name} out."
            )
    return handle


def check_same_optimizers(optimizer: "ShardedOptimizer") -> None:
    """Raise if ranks make different optimizers. Collective.

    Each rank may list the parameters of a group in an order of its own.
    """
    kind = getattr(optimizer, "_optimizer_class", type(optimizer))  # the wrapped one, any callable
    handle = optimizer._handle
    check_same_on_all_ranks(
        handle.groups,
        [
            f"{getattr(kind, '__name__', '')} nonfinite={optimizer.nonfinite!r} "
            f"clips={optimizer.max_grad_norm is not None} "
            f"scales={optimizer.loss_scaler is not None} "
            f"states={optimizer._stored_as}",
            *(
                f"group {g}: {handle.engine.parameter_name(i)}"
                for g, group in enumerate(optimizer.param_groups)
                for i in sorted(i for _, i in sharded_in(group))
            ),
        ],
        "the optimizers",
        remedy="Make the same optimizers in the same order on every rank.",
    )


def _check_followed(groups: Sequence[Group], optimizer: "ShardedOptimizer") -> None:
    """Raise unless every parameter is sharded by the optimizer's engine, and no other's to step."""
    for parameter in itertools.chain.from_iterable(group["params"] for group in groups):
        place = find(parameter)
        of_engine = place is not None and place[0] is optimizer._handle
        if of_engine and _owner_of(parameter) in (None, optimizer):
            continue
        named, _ = named_parameters(groups)  # which takes long
        for name, each in named:
            if find(each) is None:
                raise ValueError(
                    f"zero_ext: '{name}' of shape {tuple(each.shape)} was put into the groups by "
                    "hand, and is not sharded. Add it with add_param_group()."
                )
        check_of_engine(named, optimizer._handle)
        check_not_owned(named, optimizer)
        return


class FollowedGroups:
    """What the groups of one optimizer held when ``follow`` last looked.

    Owner: the optimizer, which passes itself to each method: a reference back to it would keep it
    alive. Changes in ``follow`` alone.
    """

    def __init__(self) -> None:
        self._lists: list[list[Tensor]] = []  # of each group
        # The sharded parameters that train, with their indices and the numbers of their groups.
        self.trained: list[tuple[Tensor, int, int]] = []
        self._state_counts: list[int] = []  # of each group
        self._unfreezings = 0  # of the engine's parameters, which get a state once they train
        # The index of each parameter that has had a state -> whether it was in a group.
        self._present: dict[int, bool] = {}

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for parameters in self._lists for parameter in parameters]

    def are_current(self, optimizer: "ShardedOptimizer") -> bool:
        """Whether no parameter has come, gone, moved or been unfrozen, and no state been added."""
        groups = optimizer.param_groups
        now = [group["params"] for group in groups]
        return (
            list(map(len, now)) == list(map(len, self._lists))
            and list(map(optimizer._states_of, groups)) == self._state_counts
            and all(all(map(operator.is_, *both)) for both in zip(now, self._lists, strict=True))
            and optimizer._handle.unfreezings == self._unfreezings
        )

    def follow(self, optimizer: "ShardedOptimizer") -> None:
        """Make ownership, the state in C++ and ``optimizer.state`` follow the groups.

        Raises:
            ValueError: a parameter is not sharded, or another optimizer's; nothing has changed.
        """
        groups = optimizer.param_groups
        _check_followed(groups, optimizer)
        sharded = [sharded_in(group) for group in groups]
        mine = {i for places in sharded for _, i in places}
        # No local of this frame may hold the state: a traceback that is kept would keep its memory.
        held = optimizer._sharded_state.indices
        optimizer._sharded_state.unassign([i for i in held if i not in mine])
        optimizer._sharded_state.assign(sorted(mine), 0)  # at once: it decides what lies together
        for g, places in enumerate(sharded):
            optimizer._sharded_state.assign([i for _, i in places], g)
        self._let_go(optimizer)
        trained = []
        for g, places in enumerate(sharded):
            for parameter, i in places:
                _owners[parameter] = weakref.ref(optimizer)
                if optimizer._handle.engine.unit_of(i) >= 0:
                    self._show_state(optimizer, parameter, i, groups[g])
                    trained.append((parameter, i, g))
        # Last: what has raised before is followed again.
        self.trained = trained
        self._unfreezings = optimizer._handle.unfreezings
        self._lists = [list(group["params"]) for group in groups]
        self._state_counts = list(map(optimizer._states_of, groups))

    def _let_go(self, optimizer: "ShardedOptimizer") -> None:
        """Of the parameters that are in no group any more."""
        here = set(map(id, parameters_of(optimizer)))
        gone = [parameter for parameter in self.parameters if id(parameter) not in here]
        disown(gone, optimizer)
        for parameter in gone:
            if (place := find(parameter)) is not None and place[1] in self._present:
                self._present[place[1]] = False
            # torch makes a state in the first step, and saves none of what is in no group.
            if not optimizer.state.get(parameter, {}).get("step", True):
                del optimizer.state[parameter]

    def _show_state(
        self, optimizer: "ShardedOptimizer", parameter: Tensor, i: int, group: Group
    ) -> None:
        present = self._present.get(i)
        has_values = bool(optimizer.state.get(parameter))
        if present is False and not has_values:  # it was put back, and begins anew
            optimizer._forget_state(parameter, i, group)
        if not present or has_values:  # else the user emptied it, which the next step follows
            optimizer._show_state(parameter, i, group)
        self._present[i] = True
