"""Core: what a sharded optimizer has beside torch's groups, hooks and states.

Each step takes two calls of C++: one agrees with the other ranks whether the gradients are finite
and what their norm is, one updates.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext._warnings import warn
from zero_ext.engine.handle import Handle
from zero_ext.optim.arguments import Sharding
from zero_ext.optim.groups import (
    Group,
    Places,
    Trained,
    parameters_of,
    replace_named,
    settings_of,
)
from zero_ext.optim.owners import Owners
from zero_ext.optim.scaler import scaler_of
from zero_ext.optim.states import SavedState, ShownStates, States
from zero_ext.optim.verdicts import SkippedSteps, StepSettings

Loader = Callable[[], None]


class Core:
    """Owner: one optimizer, which passes its groups and states. Holds no reference to it.

    Attributes:
        state: The states in C++. None where the optimizer was retired.
        states: The same, or those of torch's own code, as the optimizer shows them.
        shown: The ``state`` of the optimizer.
        indices: Of the parameters that the optimizer steps, and no other one.
        keywords: What the step that is being made was given for its update.
        in_python: Whether Python code updates the masters: it must know whether to do so.
        owners: Who updates whole parameters, if ranks do.
        lent: Whether code of torch's class runs, which has other parameters in the groups.
        before_adoption: The class of an optimizer that was adopted, and its own ``step``, if any.
    """

    def __init__(self, handle: Handle, defaults: dict[str, Any], sharding: Sharding):
        self.handle = handle
        self.nonfinite, self.max_grad_norm = sharding.nonfinite, sharding.max_grad_norm
        self.grad_norm: Tensor | None = None
        self.loss_scaler = sharding.loss_scaler
        self.state: _C.OptimizerState | None = None
        self.states: States | None = None
        self.shown = ShownStates(dict)
        self.in_python = self.lent = False
        self.keywords: dict[str, Any] = {}
        self.skipped, self.settings = SkippedSteps(handle), StepSettings(handle, defaults)
        self.owners: Owners | None = None
        self.before_adoption: tuple[type[torch.optim.Optimizer], Any] | None = None
        self.indices: Collection[int] = ()
        # The sharded parameters that train, with their indices and the numbers of their groups.
        self.trained: list[tuple[Tensor, int, int]] = []
        self.parameters: list[Tensor] = []  # of all groups, when ``follow`` last looked
        self._followed: tuple[Any, ...] = ()  # what it has looked at
        self._ids: list[int] | None = None  # of the keys of ``shown``, if they are what trains
        self._begun: set[int] = set()  # the index of each parameter that has had a state

    # Groups

    def is_current(self, groups: Sequence[Group]) -> bool:
        """Whether no parameter has come, gone, moved or been unfrozen, and no state been added."""
        return self._looked_at(groups) == self._followed

    def _looked_at(self, groups: Sequence[Group]) -> tuple[Any, ...]:
        ids = [list(map(id, group["params"])) for group in groups]
        return ids, list(map(self.states.count_of, groups)), self.handle.unfreezings

    def follow(self, groups: Sequence[Group], sharded: Sequence[Places]) -> None:
        """Make the states follow the groups, whose parameters are ``sharded``."""
        every = [(p, i, g) for g, places in enumerate(sharded) for p, i in places]
        group_of = dict(sorted([(i, g) for _, i, g in every]))
        self.indices = group_of.keys()
        self.state.assign([*group_of], [*group_of.values()])
        for parameter, i, _ in self.trained:
            # torch makes a state in the first step, and saves none of what is in no group.
            if i not in group_of and not self.shown.get(parameter, {}).get("step", True):
                del self.shown[parameter]
        facts = _C.facts(self.handle.engine, [i for _, i, _ in every])
        trained = []
        for each, (_, numel, unit) in zip(every, facts, strict=True):
            if unit >= 0:
                trained.append(each)
                if each[0].numel() != numel:
                    self.handle.check_size(each[1], each[0])
        self._begin_anew(trained, groups)
        self.states.show(self.shown, trained, groups)
        self._begun.update([i for _, i, _ in trained])
        self.states.arrange(groups, trained)
        # Last: what has raised before is followed again.
        self.trained, self.parameters, self._ids = trained, parameters_of(groups), None
        self._followed = self._looked_at(groups)

    def _begin_anew(self, trained: Trained, groups: Sequence[Group]) -> None:
        """Parameters that have had a state, and have none or an empty one by now, begin anew."""
        values = {id(key): value for key, value in dict.items(self.shown)}
        for parameter, i, g in trained:
            emptied = i in self._begun and not values.get(id(parameter))
            if emptied and self.states.forget(parameter, i, groups[g]):
                self.states.show(self.shown, [(parameter, i, g)], groups)

    def take_edits(self, groups: Sequence[Group]) -> None:
        """States that users have emptied begin anew. What they have written to states is taken."""
        ids = list(map(id, dict.keys(self.shown)))
        if ids != self._ids or not all(dict.values(self.shown)):
            self._begin_anew(self.trained, groups)
            self._ids = ids if set(ids) == {id(p) for p, _, _ in self.trained} else None
        self.states.end_copies(self.shown)

    # States that are loaded

    def checked_load(self, state_dict: dict[str, Any], groups: Sequence[Group]) -> Loader:
        """Check all of ``state_dict``, without a change. The function that is returned loads it.

        Raises:
            ValueError: it has other groups, or states that the optimizer does not have.
        """
        saved_groups = state_dict["param_groups"]
        saved_sizes, sizes = ([len(g["params"]) for g in each] for each in (saved_groups, groups))
        if saved_sizes != sizes:
            raise ValueError(
                f"zero_ext: the state has groups of {saved_sizes} parameters, the optimizer of "
                f"{sizes}. Make the optimizer with the parameters and the groups that were saved."
            )
        settings = [copy.deepcopy(settings_of(saved)) for saved in saved_groups]
        merged = [{**group, **new} for group, new in zip(groups, settings, strict=True)]
        self.states.check(merged)
        keys, saved = [key for each in saved_groups for key in each["params"]], state_dict["state"]
        of_parameters = set(keys)
        named = copy.deepcopy({key: saved[key] for key in saved if key not in of_parameters})
        write = self._checked_write(merged, keys, saved)

        def load() -> None:
            replace_named(self.shown, named)
            here = set(map(id, parameters_of(groups)))
            for key in [key for key in dict.keys(self.shown) if isinstance(key, Tensor)]:
                if id(key) not in here:  # taken out of its group, and not in any saved state
                    del self.shown[key]
            for group, new in zip(groups, settings, strict=True):
                group.update(new)
            with torch.no_grad():
                write()

        return load

    def take_over(self, given: dict[Any, Any], groups: Sequence[Group]) -> ShownStates:
        """``given``, which a user has assigned to ``optimizer.state``, is loaded into a new one."""
        parameters = parameters_of(groups)
        here = set(map(id, parameters))
        others = {key: value for key, value in dict.items(given) if id(key) not in here}
        wanted = {k: given.get(parameter, {}) for k, parameter in enumerate(parameters)}
        write = self._checked_write(groups, wanted, wanted)
        self.shown = ShownStates(dict, others)
        write()
        return self.shown

    def _checked_write(
        self, groups: Sequence[Group], keys: Iterable[int | str], states: dict[Any, dict[str, Any]]
    ) -> Loader:
        """Check the states of the parameters of ``groups``, which were saved under ``keys``."""
        indices, saved = {id(p): i for p, i, _ in self.trained}, []
        pairs = [(parameter, group) for group in groups for parameter in group["params"]]
        for key, (parameter, group) in zip(keys, pairs, strict=True):
            each = SavedState(
                key, parameter, indices.get(id(parameter), -1), group, states.get(key, {})
            )
            if each.i >= 0:
                saved.append(each)
            elif each.values:
                warn(
                    f"zero_ext: {each.name} is frozen, and its saved state "
                    f"({', '.join(map(str, each.values))}) is passed over: it begins anew when the "
                    "parameter is unfrozen. Thaw it before load_state_dict()."
                )
        write = self.states.checked_write(saved)
        return lambda: write(self.shown)

    def let_go(self) -> None:
        """Let go of all states and groups."""
        self.state = self.states = None
        self.trained, self.parameters, self.indices = [], [], ()
        self.shown.clear()

    # Steps

    @property
    def knows_of_skipped_steps(self) -> bool:
        """Whether the host knows about a step that was skipped, without waiting for a device."""
        scaler = scaler_of(self.handle)
        dynamic = scaler is not None and scaler.dynamic
        return self.handle.knows_on_host or self.in_python or self.nonfinite == "raise" or dynamic

    def report_skipped(self, *, wait: bool) -> None:
        raises = self.nonfinite == "raise"
        self.skipped.report(self.trained, raises, self.loss_scaler, wait=wait)

    def prepare_step(self, groups: Sequence[Group], divide_by: float | None) -> _C.StepVerdict:
        """The verdict of all ranks about a step. Collective."""
        return self.state.prepare_step(
            nonfinite=self.nonfinite != "step",
            max_norm=self.max_grad_norm,
            settings=self.settings.hash(groups, self._of_step(divide_by)),
            foreign=self.in_python,
            divide_by=None if divide_by is None else float(divide_by),
        )

    def note_verdict(
        self, verdict: _C.StepVerdict, groups: Sequence[Group], divide_by: float | None
    ) -> bool:
        """Returns whether the step is made, as far as the host knows: else a device decides.

        Raises:
            ValueError: settings or states differ between ranks.
            RuntimeError: NaN or Inf, where these are errors.
        """
        if verdict.settings_differ:
            self.settings.check_same(groups, self._of_step(divide_by))
        known = self.knows_of_skipped_steps
        if known:
            self.skipped.add(verdict)
        self.report_skipped(wait=known)
        compared = self.nonfinite != "step" or self.max_grad_norm is not None
        if compared or self.handle.options.stage == 3:  # else no message was sent
            self.settings.agreed()
        made = not (known and verdict.nonfinite)
        if made and self.max_grad_norm is not None:
            self.grad_norm = verdict.norm
        return made

    def end_step(self, verdict: _C.StepVerdict) -> None:
        if not self.knows_of_skipped_steps:
            self.skipped.add(verdict)
        if (scaler := scaler_of(self.handle)) is not None:
            scaler.note_step(verdict, own=scaler is self.loss_scaler)

    def _of_step(self, divide_by: float | None) -> dict[str, Any]:
        """Further values that ranks compare, by the text that an error shows."""
        keywords = {f"step({name}={{}})": self.keywords[name] for name in sorted(self.keywords)}
        others = {"step() has divide_by={}": divide_by is not None}
        return {**others, "max_grad_norm={}": self.max_grad_norm, **keywords}
