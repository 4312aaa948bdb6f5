"""ShardedOptimizer: what all optimizers here share, whatever their update is.

It is a real ``torch.optim.Optimizer``. It owns this rank's part of the optimizer's state, which
lies in C++, and shows it in ``optimizer.state``. Each step takes two calls of C++: one agrees with
the other ranks whether the gradients are finite and what their norm is, one updates.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import OffloadPolicy

from zero_ext import _C
from zero_ext.engine.checks import check_number
from zero_ext.engine.clipping import checked_norm, clip_by_norm, serving_backwards
from zero_ext.engine.handle import Handle
from zero_ext.engine.options import ShardingOptions, check_policy
from zero_ext.engine.plan import plan_parameters
from zero_ext.engine.registry import find
from zero_ext.optim import groups, scaler
from zero_ext.optim.arguments import (
    check_arguments,
    check_closure,
    check_divide_by,
    check_group,
    check_params,
)
from zero_ext.optim.loading import EmptiedState, SavedState, checked_load
from zero_ext.optim.shown_states import ShownStates
from zero_ext.optim.state_views import BlockCopies, views
from zero_ext.optim.verdicts import SkippedSteps, StepSettings
from zero_ext.ranks.agreement import calling
from zero_ext.ranks.groups import resolve


class ShardedOptimizer(torch.optim.Optimizer):
    """What all optimizers here share. Use ``AdamW``, ``Adam``, ``SGD`` or ``wrap``.

    Args:
        params: As for torch: parameters, named parameters, or groups of them.
        stage: 1 shards the optimizer's state, 2 the gradients too. For plain parameters only: the
            parameters of a sharded module have the module's stage. Default 1.
        process_group: The ranks to shard plain parameters over; default all. ``"alone"``: this one.
        bucket_mb: Size of a unit, MiB of gradients. For plain parameters only.
        nonfinite: What a step does when a gradient holds NaN or Inf on any rank: ``"skip"`` it on
            all ranks with a warning, ``"raise"``, or ``"step"`` without looking.
        max_grad_norm: Each step first scales the gradients so that their global 2-norm is at most
            this. That takes one pass that reads them, and a factor in the update. ``p.grad``
            itself is not scaled. ``grad_norm`` is the norm before clipping in the last step that
            was not skipped.
        loss_scaler: Every loss is scaled by it, see ``zero_ext.LossScaler``. With a dynamic one,
            steps that overflow are skipped without a warning.
        offload_policy: As for ``shard``. For plain parameters only.
    Raises:
        ValueError, TypeError: a parameter cannot be sharded, or another optimizer steps it;
            ranks make different optimizers.
    """

    # Names of per-element states, in the order in which the C++ side numbers them.
    _state_names: tuple[str, ...] = ()
    # Whether torch's optimizer has the state "step" as well.
    _counts_steps = True
    # How the C++ side stores them: "fp32", "bf16" or "int8".
    _stored_as = "fp32"
    # Whether Python code updates the masters: it must know whether to do so when a step is made.
    _updates_in_python = False
    # What the step that is being made was given for it.
    _keywords: dict[str, Any] = {}  # noqa: RUF012 (never written to)

    def __init__(
        self,
        params,
        defaults: dict[str, Any],
        *,
        stage: int | None = None,
        process_group: dist.ProcessGroup | Literal["alone"] | None = None,
        bucket_mb: float = 25.0,
        nonfinite: str = "skip",
        max_grad_norm: float | None = None,
        loss_scaler: scaler.LossScaler | None = None,
        offload_policy: OffloadPolicy | None = None,
    ):
        params = check_params(params)
        own_policy = check_policy(offload_policy)
        check_arguments(nonfinite, max_grad_norm, loss_scaler)
        self._handle: Handle | None = None  # as long as torch's constructor runs
        super().__init__(params, defaults)
        self.state = ShownStates(dict)
        self.nonfinite = nonfinite
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        self.loss_scaler = loss_scaler
        self._skipped = SkippedSteps()
        self._settings = StepSettings(defaults)
        self._followed = groups.FollowedGroups()
        self._emptied = EmptiedState(self.state)
        self._makers: dict[tuple[str, ...], Callable] = {}  # of states' views, by their names
        self._copies = BlockCopies()
        named, whole = groups.named_parameters(self.param_groups)
        groups.check_not_owned(named, self)
        of_module = groups.handle_of_module(named, stage, process_group, offload_policy)
        if (handle := of_module) is None:
            options = ShardingOptions(
                stage=1 if stage is None else stage, bucket_mb=bucket_mb, offload_policy=own_policy
            )
            resolved = resolve(process_group, None, [p for _, p in named])
            handle = Handle(resolved, plan_parameters(resolved, named, options, whole))
        self._handle = handle
        try:
            if of_module is None:
                self._broadcast_frozen([*named, *whole])
            else:
                self._handle.leave_whole(whole)
            groups.check_same_optimizers(self)
            scaler.attach(loss_scaler, self)
            self._states_held = max(map(self._states_of, self.param_groups))
            self._sharded_state = _C.OptimizerState(
                self._handle.engine, self._states_held, self._stored_as
            )
            self._handle.optimizers.add(self)
            self._follow_groups()
        except BaseException:  # whose traceback may keep this object alive
            self._give_up([p for _, p in named])
            if of_module is None:
                self._handle.dissolve()
            raise

    def _broadcast_frozen(self, named: groups.Named) -> None:
        """Those that train became equal when they were sharded. Collective."""
        self._handle.broadcast([p for _, p in named if not p.requires_grad])

    def _give_up(self, parameters: Sequence[Tensor]) -> None:
        groups.disown(parameters, self)
        self._handle.optimizers.discard(self)
        self._sharded_state = None
        self._makers.clear()
        self.state.clear()
        scaler.detach(self)

    def retire(self) -> None:
        """Give up the state and all parameters, so that another optimizer can step them.

        This optimizer has no groups from then on.
        """
        self._give_up(self._followed.parameters)
        self.param_groups.clear()
        self._followed = groups.FollowedGroups()

    def __reduce_ex__(self, protocol):
        # What torch's would copy has no engine.
        raise RuntimeError(
            f"zero_ext: {type(self).__name__} can be neither copied nor pickled: one sharded model "
            "has its state. Use its state_dict(), or that of a scheduler that refers to it."
        )

    # Parameter groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. The parameters are sharded like the others; every rank must add the same."""
        check_group(param_group)
        if self._handle is None:
            super().add_param_group(param_group)
            return
        self._follow_groups()
        super().add_param_group(param_group)
        named, whole = groups.named_parameters(self.param_groups, len(self.param_groups) - 1)
        plain = [(name, p) for name, p in named if find(p) is None]
        try:
            groups.check_not_owned(named, self)
            groups.check_of_engine([n for n in named if find(n[1]) is not None], self._handle)
            self._check_states(self.param_groups[-1:])
            if plain:
                self._handle.check_and_add(plain)
                self._broadcast_frozen(plain)
            self._follow_groups()
        except BaseException:
            self.param_groups.pop()
            raise
        self._handle.leave_whole(whole)

    def _follow_groups(self) -> None:
        if self._sharded_state is None:
            raise RuntimeError(
                f"zero_ext: this {type(self).__name__} was retired: it has no parameters. "
                "Use the optimizer that took its place."
            )
        if not self._followed.are_current(self):
            self._check_states(self.param_groups)
            self._followed.follow(self)

    def _catch_up(self) -> None:
        """Shard the parameters that were unfrozen, and follow the groups. Collective."""
        self._handle.adopt_unfrozen()  # a sharded module's forward may have done so already
        self._follow_groups()

    # The state

    def _states_of(self, group: groups.Group) -> int:
        """How many of ``_state_names`` the parameters of ``group`` have, the first ones."""
        return len(self._state_names)

    def _check_states(self, param_groups: Sequence[groups.Group]) -> None:
        if max(map(self._states_of, param_groups), default=0) > self._states_held:
            raise ValueError(
                f"zero_ext: a group of this {type(self).__name__} needs "
                f"'{self._state_names[self._states_held]}', which no group needed at construction: "
                "there is no memory for it. Set amsgrad or momentum in the constructor, and switch "
                "it off in the other groups."
            )

    def _held_state(self, parameter: Tensor, i: int) -> dict[str, Tensor]:
        """The count of steps, and each of ``_state_names`` that there is memory for."""
        names = self._with_count(self._state_names[: self._states_held])
        return self._maker_of(names)(parameter, i)

    def _maker_of(self, names: tuple[str, ...]) -> Callable[[Tensor, int], dict[str, Tensor]]:
        """What makes the views with these names, one for all parameters."""
        make = functools.partial(views, self._sharded_state, self._handle, self._copies, names)
        return self._makers.setdefault(names, make)

    def _end_copies(self) -> None:
        """States in blocks take what was written to their copies, and are copied anew when they
        are asked for."""
        self._copies.write_back()
        for i, parameter, names in self._copies.take():
            make = self._maker_of(names)
            if isinstance(self.state, ShownStates):
                self.state.show_anew(parameter, names, make, i)
            elif self.state.get(parameter):
                self.state[parameter].update(make(parameter, i))

    def _names_in(self, group: groups.Group) -> tuple[str, ...]:
        return self._with_count(self._state_names[: self._states_of(group)])

    def _with_count(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return ("step", *names) if self._counts_steps else names

    def _show_state(self, parameter: Tensor, i: int, group: groups.Group) -> None:
        self._handle.check_size(i, parameter)
        make = self._maker_of(self._names_in(group))
        if isinstance(self.state, ShownStates) and parameter not in self.state:
            self.state.show_later(parameter, make, i)
        else:
            self.state[parameter].update(make(parameter, i))

    def _forget_state(self, parameter: Tensor, i: int, group: groups.Group) -> bool:
        """Let its state begin anew. Returns whether there was one."""
        for value in self._held_state(parameter, i).values():
            value.zero_()
        self._copies.write_back()
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but in place and without a cast: fp32 state stays fp32.

        Values may be ShardTensors, DTensors, or plain tensors of the parameters' shapes, such as a
        one-process checkpoint of torch's own optimizer holds.

        Raises:
            ValueError: groups or sizes differ; nothing is changed then.
        """
        with calling("load_state_dict()"):
            checked_load(self, state_dict)()

    def _checked_states(self, saved: Sequence[SavedState]) -> Callable[[], None]:
        """Check all states. The function that is returned writes them in place, and zeros what was
        not saved."""
        writes = []
        for each in saved:
            place = find(each.parameter)
            if place is not None and self._handle.engine.unit_of(place[1]) < 0:
                each.warn_of_frozen()
                continue
            each = self._completed(each)
            held = {} if place is None else self._held_state(each.parameter, place[1])
            for name in each.values:
                if name not in held:
                    kind = type(self).__name__
                    raise ValueError(
                        f"zero_ext: {kind} has no state '{name}'. Load the kind that was saved."
                    )
                each.check_shape(name, held[name].shape)
            writes.append((each, held))

        def write() -> None:
            for each, held in writes:
                for name, target in held.items():
                    value = each.values.get(name)
                    if value is None:
                        target.zero_()
                    else:
                        target.copy_(value if isinstance(value, Tensor) else torch.tensor(value))
                shown = {*self._names_in(each.group), *each.values}
                self.state[each.parameter].update((k, v) for k, v in held.items() if k in shown)
            self._end_copies()

        return write

    def _completed(self, saved: SavedState) -> SavedState:
        """What torch does not save is added, what it saves as None is left out."""
        values = {name: value for name, value in saved.values.items() if value is not None}
        return saved._replace(values=values)

    def _set_state_offloaded(self, offloaded: bool) -> None:
        self._end_copies()
        self._sharded_state.set_offloaded(offloaded)

    # The step

    def scale(self, loss):
        """``loss_scaler.scale(loss)``, or the loss itself without one."""
        return loss if self.loss_scaler is None else self.loss_scaler.scale(loss)

    @torch.compiler.disable
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, divide_by: float | None = None
    ) -> Any:
        """Update the parameters on all ranks. Collective.

        A parameter that no rank's loss reached is left alone, as in PyTorch. While this rank waits
        here, it takes part in the backwards that other ranks still run.

        Args:
            divide_by: This rank's number of tokens or samples in the step. The update then uses the
                sum of all gradients divided by the sum of these numbers over the ranks, instead of
                the average over the ranks. ``max_grad_norm`` clips the divided gradient, and
                ``grad_norm`` is its norm. ``p.grad`` still shows the average over the ranks.
        Raises:
            ValueError: ``divide_by`` is negative or not finite.
            RuntimeError: inside a backward; the last backward ran in ``no_sync()``; a parameter's
                dtype or device changed; NaN or Inf with ``nonfinite="raise"``; another rank did not
                answer within the process group's timeout.
        """
        loss = None
        check_closure(closure)
        check_divide_by(divide_by)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._handle.forwards.leave_abandoned()
        verdict = self._prepare_step(divide_by)
        if verdict.settings_differ:
            self._settings.check_same(self, divides=divide_by is not None)
        known = self.knows_of_skipped_steps
        if known:
            self._skipped.add(verdict)
        self._skipped.report(self, wait=known)
        self._settings.agreed(self)
        if not (known and verdict.nonfinite):  # else the device decides, and tells later
            if self.max_grad_norm is not None:
                self.grad_norm = verdict.norm
            self._update(verdict)
        if not known:
            self._skipped.add(verdict)
        if self.loss_scaler is not None:
            self.loss_scaler._step_made(verdict)
        return loss

    def _prepare_step(self, divide_by: float | None) -> _C.StepVerdict:
        self._handle.check_whole()
        if self.loss_scaler is not None:
            self.loss_scaler._check_scaled(self._handle)
        while True:
            self._follow_groups()
            self._emptied.follow(self)
            if self._copies:
                self._end_copies()
            verdict = self._sharded_state.prepare_step(
                nonfinite=self.nonfinite != "step",
                max_norm=self.max_grad_norm,
                settings=self._settings.hash(self, divides=divide_by is not None),
                foreign=self._updates_in_python,
                divide_by=None if divide_by is None else float(divide_by),
            )
            if not verdict.unfrozen:
                return verdict
            self._handle.adopt(verdict.unfrozen)

    def _update(self, verdict: _C.StepVerdict) -> None:
        """Update the parameters as ``verdict`` says, which the host may not know yet."""
        raise NotImplementedError

    @property
    def knows_of_skipped_steps(self) -> bool:
        """Whether ``skipped_steps`` is known after a step without waiting for a device."""
        dynamic = self.loss_scaler is not None and self.loss_scaler.dynamic
        waits = self._updates_in_python or self.nonfinite == "raise" or dynamic
        return self._handle.knows_on_host or waits

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped for NaN or Inf. Waits for the device to know."""
        self._skipped.report(self, wait=True)
        return self._skipped.count

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Also discards the sums of micro-batches that ran inside ``no_sync()``."""
        self._catch_up()
        mode = _C.ZeroGrad.to_none if set_to_none else _C.ZeroGrad.to_zero
        self._handle.engine.zero_grad(self._sharded_state.indices, mode)

    @torch.compiler.disable
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``. Collective.

        The arguments are torch's. Without ``error_if_nonfinite``, ``step`` deals with NaN and Inf.

        Returns:
            0-D fp32 tensor, the norm before scaling, equal on all ranks. The 2-norm has the same
            bits for any number of ranks.
        Source: Pascanu et al. 2013, section 3.2.
        """
        check_number("max_norm", max_norm)
        check_number("norm_type", norm_type)
        self._catch_up()
        if float(norm_type) != 2:
            rest = (max_norm, norm_type, error_if_nonfinite, foreach)
            return clip_by_norm(self._followed.parameters, *rest)
        with serving_backwards(self._handle):
            return checked_norm(self._sharded_state.clip_gradients(max_norm), error_if_nonfinite)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside it accumulate locally, in fp32, and send nothing (stages 0 and 1).

        Stage 2 reduces anyway. The last backward before ``step`` must run outside.
        """
        self._handle.engine.push_no_sync()
        try:
            yield
        finally:
            self._handle.engine.pop_no_sync()

    def stats(self) -> dict[str, int]:
        """See ``zero_ext.stats``."""
        return {**self._handle.stats(), "skipped_steps": self.skipped_steps}
