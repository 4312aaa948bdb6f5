"""Loading: what is checked of a saved state before any of it is written."""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from zero_ext._warnings import warn
from zero_ext.optim.arguments import check_state_dict
from zero_ext.optim.groups import (
    Group,
    name_in_module,
    parameters_of,
    replace_named,
    settings_of,
)
from zero_ext.optim.shown_states import ShownStates

if TYPE_CHECKING:
    from zero_ext.optim.sharded_optimizer import ShardedOptimizer


class SavedState(NamedTuple):
    """What was saved of one parameter, and its group with the settings that it will have."""

    key: int | str
    parameter: Tensor
    group: Group
    values: dict[str, Any]

    @property
    def name(self) -> str:  # for messages
        name = name_in_module(self.parameter)
        return f"parameter {self.key}" if name is None else f"'{name}'"

    def check_shape(self, name: str, shape: torch.Size) -> None:
        """Raise where a saved value has another shape than the optimizer's."""
        value = self.values[name]
        if isinstance(value, Tensor) and value.shape != shape:
            raise ValueError(
                f"zero_ext: state '{name}' of {self.name} has shape "
                f"{tuple(value.shape)}, the optimizer's has {tuple(shape)}."
            )

    def warn_of_frozen(self) -> None:
        if self.values:
            warn(
                f"zero_ext: {self.name} is frozen, and its saved state "
                f"({', '.join(map(str, self.values))}) is passed over: it begins anew when the "
                "parameter is unfrozen. Thaw it before load_state_dict()."
            )


def saved_states(
    groups: Sequence[Group], keys: Iterable[int | str], states: dict[int | str, dict[str, Any]]
) -> list[SavedState]:
    """One of each parameter of ``groups``, which were saved under ``keys``."""
    pairs = [(parameter, group) for group in groups for parameter in group["params"]]
    return [
        SavedState(key, parameter, group, states.get(key, {}))
        for key, (parameter, group) in zip(keys, pairs, strict=True)
    ]


def checked_load(optimizer: "ShardedOptimizer", state_dict: dict[str, Any]) -> Callable[[], None]:
    """Check all of ``state_dict``, without a change. The function that is returned loads it."""
    if isinstance(state_dict, dict):
        state_dict = state_dict.copy()  # hooks may change what they are given
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = hook(optimizer, state_dict)
        state_dict = state_dict if result is None else result
    check_state_dict(state_dict)
    optimizer._catch_up()
    saved_groups = state_dict["param_groups"]
    saved_sizes, sizes = (
        [len(group["params"]) for group in groups]
        for groups in (saved_groups, optimizer.param_groups)
    )
    if saved_sizes != sizes:
        raise ValueError(
            f"zero_ext: the state has groups of {saved_sizes} parameters, the optimizer of {sizes}."
            " Make the optimizer with the parameters and the groups that were saved."
        )
    settings = [copy.deepcopy(settings_of(saved)) for saved in saved_groups]
    groups = [{**g, **new} for g, new in zip(optimizer.param_groups, settings, strict=True)]
    optimizer._check_states(groups)
    keys = [key for saved in saved_groups for key in saved["params"]]
    of_parameters, states = set(keys), state_dict["state"]
    named = copy.deepcopy({key: states[key] for key in states if key not in of_parameters})
    load_states = optimizer._checked_states(saved_states(groups, keys, states))

    @torch.no_grad()
    def load() -> None:
        replace_named(optimizer.state, named)
        here = set(map(id, parameters_of(optimizer)))
        for key in [k for k in dict.keys(optimizer.state) if isinstance(k, Tensor)]:
            if id(key) not in here:  # taken out of its group, and not in any saved state
                del optimizer.state[key]
        load_states()
        for group, new in zip(optimizer.param_groups, settings, strict=True):
            group.update(new)
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)

    return load


class EmptiedState:
    """Follows what a user did to ``optimizer.state``: emptied it, or the state of a parameter, to
    begin anew, or put another one in its place.

    Owner: the optimizer, which passes itself to each method.
    """

    def __init__(self, state: ShownStates):
        self._state = state

    def follow(self, optimizer: "ShardedOptimizer") -> None:
        """What was emptied begins anew, and is shown again. Nothing else changes."""
        if optimizer.state is not self._state:
            self._take_over(optimizer)
        shown_of = functools.partial(dict.get, self._state)
        for parameter, i, g in optimizer._followed.trained:
            if not shown_of(parameter):
                group = optimizer.param_groups[g]
                if optimizer._forget_state(parameter, i, group):
                    optimizer._show_state(parameter, i, group)

    def _take_over(self, optimizer: "ShardedOptimizer") -> None:
        """Load what the user put in the place of ``optimizer.state``."""
        given, groups = optimizer.state, optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        wanted = {k: given.get(parameter, {}) for k, parameter in enumerate(parameters)}
        load = optimizer._checked_states(saved_states(groups, wanted, wanted))
        here = set(map(id, parameters))
        others = {key: value for key, value in dict.items(given) if id(key) not in here}
        optimizer.state = self._state = ShownStates(dict, others)
        load()
