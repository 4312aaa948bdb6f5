"""Core: what a sharded optimizer has beside torch's groups, hooks and states.

Each step takes two calls of C++: one agrees with the other ranks whether the gradients are finite
and what their norm is, one updates.
"""

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext.engine.handle import Handle
from zero_ext.optim.arguments import Sharding
from zero_ext.optim.groups import Group, Places, Trained
from zero_ext.optim.owners import Owners
from zero_ext.optim.states import ShownStates, States
from zero_ext.optim.verdicts import SkippedSteps, StepSettings


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
        # The groups' contents when ``follow`` last looked.
        self._lists: list[list[Tensor]] = []  # of each group
        self._state_counts: list[int] = []  # of each group
        self._unfreezings = 0  # of the engine's parameters, which get a state once they train
        self._ids: list[int] | None = None  # of the keys of ``shown``, if they are what trains
        # The index of each parameter that has had a state -> whether it was in a group.
        self._present: dict[int, bool] = {}

    # Groups

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for parameters in self._lists for parameter in parameters]

    def is_current(self, groups: Sequence[Group]) -> bool:
        """Whether no parameter has come, gone, moved or been unfrozen, and no state been added."""
        now = [group["params"] for group in groups]
        return (
            list(map(len, now)) == list(map(len, self._lists))
            and list(map(self.states.count_of, groups)) == self._state_counts
            and all(all(map(operator.is_, *both)) for both in zip(now, self._lists, strict=True))
            and self.handle.unfreezings == self._unfreezings
        )

    def follow(self, groups: Sequence[Group], sharded: Sequence[Places]) -> None:
        """Make the states follow the groups, whose parameters are ``sharded``."""
        every = [(p, i, g) for g, places in enumerate(sharded) for p, i in places]
        group_of = dict(sorted([(i, g) for _, i, g in every]))
        self.indices = group_of.keys()
        self.state.assign([*group_of], [*group_of.values()])
        for parameter, i, _ in self.trained:
            if i not in group_of:
                self._present[i] = False
                # torch makes a state in the first step, and saves none of what is in no group.
                if not self.shown.get(parameter, {}).get("step", True):
                    del self.shown[parameter]
        facts = _C.facts(self.handle.engine, [i for _, i, _ in every])
        trained = []
        for each, (_, numel, unit) in zip(every, facts, strict=True):
            if unit >= 0:
                trained.append(each)
                if each[0].numel() != numel:
                    self.handle.check_size(each[1], each[0])
        self._show(trained, groups)
        self.states.arrange(groups, trained)
        # Last: what has raised before is followed again.
        self.trained, self._unfreezings = trained, self.handle.unfreezings
        self._ids, self._lists = None, [list(group["params"]) for group in groups]
        self._state_counts = list(map(self.states.count_of, groups))

    def _show(self, trained: Trained, groups: Sequence[Group]) -> None:
        values = {id(key): value for key, value in dict.items(self.shown)}
        present = self._present.get
        for parameter, i, g in trained:
            if present(i) is False and not values.get(id(parameter)):  # it begins anew
                self.states.forget(parameter, i, groups[g])
        kept = [each for each in trained if not present(each[1]) or values.get(id(each[0]))]
        self.states.show(self.shown, kept, groups)
        self._present.update([(i, True) for _, i, _ in trained])

    def take_edits(self, groups: Sequence[Group]) -> None:
        """States that users have emptied begin anew. What they have written to states is taken."""
        ids = list(map(id, dict.keys(self.shown)))
        if ids != self._ids or not all(dict.values(self.shown)):
            values = dict(zip(ids, dict.values(self.shown), strict=True))
            for each in self.trained:
                parameter, i, g = each
                if not values.get(id(parameter)) and self.states.forget(parameter, i, groups[g]):
                    self.states.show(self.shown, [each], groups)
            self._ids = ids if set(ids) == {id(p) for p, _, _ in self.trained} else None
        self.states.end_copies(self.shown)

    def let_go(self) -> None:
        """Let go of all states and groups."""
        self.state = self.states = None
        self.trained, self._lists, self.indices = [], [], ()
        self.shown.clear()

    # Steps

    @property
    def knows_of_skipped_steps(self) -> bool:
        """Whether the host knows about a step that was skipped, without waiting for a device."""
        dynamic = self.loss_scaler is not None and self.loss_scaler.dynamic
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
            self.settings.states.agreed()
        made = not (known and verdict.nonfinite)
        if made and self.max_grad_norm is not None:
            self.grad_norm = verdict.norm
        return made

    def end_step(self, verdict: _C.StepVerdict) -> None:
        if not self.knows_of_skipped_steps:
            self.skipped.add(verdict)
        if self.loss_scaler is not None:
            self.loss_scaler.note_step(verdict)

    def _of_step(self, divide_by: float | None) -> dict[str, Any]:
        """Further values that ranks compare, by the text that an error shows."""
        keywords = {f"step({name}={{}})": self.keywords[name] for name in sorted(self.keywords)}
        others = {"step() has divide_by={}": divide_by is not None}
        return {**others, "max_grad_norm={}": self.max_grad_norm, **keywords}
