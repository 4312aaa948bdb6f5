"""ShardedOptimizer: what the optimizers here share, whatever their update is.

Owns this rank's part of the optimizer's state (in C++), and shows it in ``optimizer.state``; asks
before each update whether the gradients are finite and what their norm is, on all ranks alike.
"""

import contextlib
import copy
import operator
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import OffloadPolicy
from torch.utils.weak import WeakIdKeyDictionary

from zero_ext import _C
from zero_ext.engine.checks import stays_whole
from zero_ext.engine.handle import Handle
from zero_ext.engine.options import ShardingOptions, check_policy
from zero_ext.engine.registry import find
from zero_ext.optim.scaler import LossScaler
from zero_ext.ranks.agreement import check_same_on_all_ranks
from zero_ext.ranks.groups import resolve

# Between torch's implementations: no number of an update.
_SWITCHES = frozenset(("foreach", "fused", "capturable", "differentiable"))
_claimed = WeakIdKeyDictionary()  # Parameter -> weak reference to its optimizer


def _owner_of(parameter: Tensor) -> "ShardedOptimizer | None":
    owner = _claimed.get(parameter)
    return None if owner is None else owner()


class ShardedOptimizer(torch.optim.Optimizer):
    """What all optimizers here share. Use ``AdamW``, ``Adam``, ``SGD`` or ``wrap``.

    Args:
        params: As for torch: parameters, named parameters, or groups of them.
        stage: 1 shards the optimizer's state, 2 the gradients too. Of plain parameters only; those
            of a sharded module have the module's stage. Default 1.
        process_group: The ranks to shard over; default all. Of plain parameters only.
        bucket_mb: Size of a unit, MiB of gradients. Of plain parameters only.
        nonfinite: What a step does when a gradient holds NaN or Inf on any rank: ``"skip"`` it on
            all ranks with a warning, ``"raise"``, or ``"step"`` without looking.
        max_grad_norm: Each step first scales the gradients so that their global 2-norm is at most
            this: one pass that reads them, and a factor in the update. ``p.grad`` itself stays as
            it is; ``grad_norm`` is the norm before clipping, of the last step that was made.
        loss_scaler: Every loss is scaled by it, see ``zero_ext.LossScaler``. With a dynamic one,
            steps that overflow are skipped without a warning.
        offload_policy: As for ``shard``. Of plain parameters only.
    Raises:
        ValueError, TypeError: a parameter cannot be sharded, or is stepped by another optimizer;
            ranks make different ones.
    """

    # Names of per-element states, in the order in which the C++ side numbers them.
    _state_names: tuple[str, ...] = ()

    def __init__(
        self,
        params,
        defaults: dict[str, Any],
        *,
        stage: int | None,
        process_group: dist.ProcessGroup | None,
        bucket_mb: float,
        nonfinite: str,
        max_grad_norm: float | None = None,
        loss_scaler: LossScaler | None = None,
        offload_policy: OffloadPolicy | None = None,
    ):
        check_policy(offload_policy)
        if not isinstance(loss_scaler, LossScaler | None):
            raise TypeError(
                f"zero_ext: loss_scaler must be a zero_ext.LossScaler, not {loss_scaler!r}. "
                "torch's GradScaler is used as with any optimizer: scaler.step(optimizer)."
            )
        if nonfinite not in ("skip", "raise", "step"):
            raise ValueError(
                f"zero_ext: nonfinite must be 'skip', 'raise' or 'step', not {nonfinite!r}."
            )
        if loss_scaler is not None and loss_scaler.dynamic and nonfinite != "skip":
            raise ValueError(
                "zero_ext: a dynamic loss_scaler lives from skipped steps: it needs "
                f"nonfinite='skip', not {nonfinite!r}."
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"zero_ext: max_grad_norm must be positive, not {max_grad_norm}.")
        self._handle: Handle | None = None
        self._frozen: list[Tensor] = []  # without state until they are unfrozen
        self._taken_out = WeakIdKeyDictionary()  # Parameter -> None: of the groups, by hand
        self._compared = [name for name in defaults if name not in _SWITCHES]
        super().__init__(params, defaults)
        self.nonfinite = nonfinite
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        self._skipped_steps = 0
        self._unreported: list[_C.StepVerdict] = []
        named, whole = self._named_parameters()
        self._refuse_claimed(named)
        found = [find(p) for _, p in named]
        if any(found):
            self._handle = self._engine_of_module(named, found, stage, process_group)
            if offload_policy not in (None, self._handle.offload_policy):
                raise ValueError(
                    f"zero_ext: offload_policy={offload_policy}, but the module was sharded with "
                    f"{self._handle.offload_policy}. Leave it out."
                )
            self._handle.leave_whole(whole)
        else:
            self._handle = Handle(
                resolve(process_group, None, [p for _, p in named]),
                named,
                ShardingOptions(
                    stage=1 if stage is None else stage,
                    bucket_mb=bucket_mb,
                    offload_policy=offload_policy,
                ),
                whole=whole,
            )
        self.loss_scaler = loss_scaler
        try:
            if not any(found):
                self._equalise_frozen([*named, *whole])
            check_same_on_all_ranks(
                self._handle.groups,
                self._description(),
                "the optimizers",
                remedy="Make the same optimizers in the same order on every rank.",
            )
            if loss_scaler is not None:
                loss_scaler._attach(self)
            self._states_held = self._states_needed()
            self._sharded_state = _C.OptimizerState(self._handle.engine, self._states_held)
            self._handle.optimizers.add(self)
            for g in range(len(self.param_groups)):
                self._assign(g)
                self._claim(g)
            self._attach_scaler()
        except BaseException:  # whose traceback may keep this object alive
            self._give_up([p for _, p in named])
            if not any(found):
                self._handle.dissolve()
            raise
        self._backwards_seen = self._handle.engine.backwards
        self._remember_state()
        self._remember_groups()

    # Binding parameters to the engine

    def _equalise_frozen(self, named: list[tuple[str, Tensor]]) -> None:
        """The trained ones are equal when they have been sharded. Collective."""
        self._handle.broadcast([p for _, p in named if not p.requires_grad])

    def _named_parameters(
        self, first_group: int = 0
    ) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """Those that can be sharded, and those that stay whole, without state."""
        named = []
        for g, group in enumerate(self.param_groups[first_group:], first_group):
            names = group.get("param_names") or [
                f"parameter {i} of group {g}" for i in range(len(group["params"]))
            ]
            named.extend(zip(names, group["params"], strict=True))
        whole = [(name, p) for name, p in named if stays_whole(p)]
        return [(name, p) for name, p in named if not stays_whole(p)], whole

    @staticmethod
    def _sharded(group: dict[str, Any]) -> list[Tensor]:
        return [p for p in group["params"] if find(p) is not None]

    def _refuse_claimed(self, named: list[tuple[str, Tensor]]) -> None:
        for name, parameter in named:
            owner = _owner_of(parameter)
            if owner in (None, self):
                continue
            owner._follow_groups()  # it may have been taken out of them
            if _owner_of(parameter) is owner:
                raise ValueError(
                    f"zero_ext: '{name}' is stepped by another optimizer "
                    f"({type(owner).__name__}) already. Give each parameter to one optimizer; one "
                    "that is replaced gives all of them up in its retire()."
                )

    def _refuse_foreign(self, named: list[tuple[str, Tensor]]) -> None:
        for name, parameter in named:
            entry = find(parameter)
            if entry is not None and entry[0] is not self._handle:
                raise _foreign(name)

    def _description(self) -> list[str]:
        """What ranks must agree on. In which order they list a group's parameters is theirs."""
        kind = getattr(self, "_optimizer_class", type(self))  # the wrapped one, any callable
        return [
            f"{getattr(kind, '__name__', '')} nonfinite={self.nonfinite!r} "
            f"clips={self.max_grad_norm is not None} scales={self.loss_scaler is not None}",
            *(
                f"group {g}: {self._handle.engine.parameter_name(i)}"
                for g, group in enumerate(self.param_groups)
                for i in sorted(self._indices_of(group))
            ),
        ]

    @staticmethod
    def _engine_of_module(named, found, stage, process_group) -> Handle:
        handle = next(entry[0] for entry in found if entry)
        for (name, _), entry in zip(named, found, strict=True):
            if entry is None or entry[0] is not handle:
                raise _foreign(name)
        if stage not in (None, handle.engine.stage):
            raise ValueError(
                f"zero_ext: stage={stage}, but the module was sharded with stage "
                f"{handle.engine.stage}. Leave stage out."
            )
        if process_group is not None and process_group is not handle.groups.parent:
            raise ValueError("zero_ext: the module was sharded over another process_group.")
        return handle

    def _assign(self, g: int) -> None:
        """Make the state of a group. Nothing has changed if there is no memory for it."""
        self._sharded_state.assign(self._indices_of(self.param_groups[g]), g)

    def _claim(self, g: int) -> None:
        group = self.param_groups[g]
        for parameter in self._sharded(group):
            self._claim_one(parameter, group)

    def _claim_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        _claimed[parameter] = weakref.ref(self)
        _, i = find(parameter)
        if self._handle.engine.unit_of(i) >= 0:
            if parameter in self._taken_out and not self.state.get(parameter):
                self._forget_state(i)
            self._show_state(parameter, i, group)
        else:
            self._frozen.append(parameter)

    def _forget_state(self, i: int) -> None:
        self._sharded_state.step(i).zero_()
        for k in range(self._states_held):
            self._sharded_state.slice(k, i).zero_()

    def _give_up(self, parameters: Sequence[Tensor]) -> None:
        self._unclaim(parameters)
        self._handle.optimizers.discard(self)
        self._sharded_state = None
        self.state.clear()
        if self.loss_scaler is not None:
            self.loss_scaler._detach(self)
        if self._handle.scaled_by is not None and self._handle.scaled_by() is self:
            self._handle.scaled_by = None
            self._handle.engine.set_loss_scale(1.0)

    def retire(self) -> None:
        """Give up all parameters, to another optimizer that takes this one's place, and the state.

        It has no groups from then on.
        """
        self._give_up([p for group in self._followed for p in group])
        self.param_groups.clear()
        self._frozen.clear()
        self._remember_groups()

    def _unclaim(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if _owner_of(parameter) is self:
                del _claimed[parameter]

    def _show_state(self, parameter: Tensor, i: int, group: dict[str, Any]) -> None:
        self.state[parameter].update(self._held_state(parameter, i, self._states_of(group)))

    def _held_state(self, parameter: Tensor, i: int, count: int) -> dict[str, Tensor]:
        """The count of steps, and the first ``count`` of ``_state_names``."""
        state = {"step": self._sharded_state.step(i)}
        for k, name in enumerate(self._state_names[:count]):
            local = self._sharded_state.slice(k, i)
            state[name] = self._handle.as_parameter(local, i, parameter)
        return state

    def _states_of(self, group: dict[str, Any]) -> int:
        """How many of ``_state_names`` the parameters of ``group`` have, the first ones."""
        return len(self._state_names)

    def _states_needed(self) -> int:
        return max(map(self._states_of, self.param_groups))

    def _check_states(self, groups) -> None:
        if max(map(self._states_of, groups), default=0) > self._states_held:
            raise ValueError(
                f"zero_ext: a group of this {type(self).__name__} needs "
                f"'{self._state_names[self._states_held]}', which no group needed at construction: "
                "there is no memory for it. Set amsgrad or momentum in the constructor, and switch "
                "it off in the other groups."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. The parameters are sharded like the others; every rank must add the same."""
        if self._handle is None:  # still in torch's constructor
            super().add_param_group(param_group)
            return
        self._follow_groups()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        named, whole = self._named_parameters(len(self.param_groups) - 1)
        try:
            self._refuse_claimed(named)
            self._refuse_foreign(named)
            plain = [(name, p) for name, p in named if find(p) is None]
            self._check_states([group])
            if plain:
                self._handle.check_and_add(plain)
                self._equalise_frozen(plain)
            self._assign(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise
        self._handle.leave_whole(whole)
        self._claim(len(self.param_groups) - 1)
        self._remember_groups()

    def _remember_groups(self) -> None:
        self._followed = [list(group["params"]) for group in self.param_groups]
        self._states_followed = list(map(self._states_of, self.param_groups))

    def _groups_are_as_followed(self) -> bool:
        now = [group["params"] for group in self.param_groups]
        return (
            list(map(len, now)) == list(map(len, self._followed))
            and list(map(self._states_of, self.param_groups)) == self._states_followed
            and all(all(map(operator.is_, *both)) for both in zip(now, self._followed, strict=True))
        )

    def _follow_groups(self) -> None:
        """Users take groups and parameters out, move them, and switch on amsgrad or momentum."""
        if self._sharded_state is None:
            raise RuntimeError(
                f"zero_ext: this {type(self).__name__} was retired: it has no parameters. "
                "Use the optimizer that took its place."
            )
        if self._groups_are_as_followed():
            return
        self._check_states(self.param_groups)
        for g, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                entry = find(parameter)
                if stays_whole(parameter) or (entry and entry[0] is self._handle):
                    continue
                raise ValueError(
                    f"zero_ext: group {g} has a parameter of shape {tuple(parameter.shape)} that "
                    "was put there by hand, and is not sharded. Add it with add_param_group()."
                )
        self._refuse_claimed(self._named_parameters()[0])
        mine = {i for group in self.param_groups for i in self._indices_of(group)}
        self._sharded_state.unassign([i for i in self._sharded_state.indices if i not in mine])
        here = {id(p) for group in self.param_groups for p in group["params"]}
        gone = [p for group in self._followed for p in group if id(p) not in here]
        self._unclaim(gone)
        self._taken_out.update(dict.fromkeys(gone))
        # torch makes a state in the first step, and saves none of what is in no group.
        for parameter in gone:
            if not self.state.get(parameter, {}).get("step", True):
                del self.state[parameter]
        self._frozen = [p for p in self._frozen if id(p) in here]
        for g, group in enumerate(self.param_groups):
            self._assign(g)
            for parameter in self._sharded(group):
                if _owner_of(parameter) is not self:
                    self._claim_one(parameter, group)
                elif self.state.get(parameter):  # else it was emptied, which is followed later
                    self._show_again(parameter, group)
        self._remember_groups()

    def _indices_of(self, group: dict[str, Any]) -> list[int]:
        return [find(parameter)[1] for parameter in self._sharded(group)]

    def _remember_state(self) -> None:
        self._shown = self.state, self._states_with_values()

    def _states_with_values(self) -> int:
        return len(list(filter(None, self.state.values())))

    def _follow_state(self) -> None:
        """Users set ``state``, or that of a parameter, to an empty dictionary, or clear it, to
        begin anew."""
        state, count = self._shown
        if self.state is state and self._states_with_values() >= count:
            return
        wanted = dict(self.state)
        self.state = defaultdict(dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = {k: wanted.get(p, {}) for k, p in enumerate(parameters)}
        self._checked_states(range(len(parameters)), parameters, saved, self.param_groups)()

    def _show_again(self, parameter: Tensor, group: dict[str, Any]) -> None:
        _, i = find(parameter)
        if self._handle.engine.unit_of(i) >= 0:
            self._show_state(parameter, i, group)

    def _adopt_unfrozen(self) -> None:
        self._handle.adopt_unfrozen()  # a sharded module's forward may have done so already
        for parameter in self._frozen:
            _, i = find(parameter)
            if self._handle.engine.unit_of(i) < 0:
                continue
            for g, group in enumerate(self.param_groups):
                if any(p is parameter for p in group["params"]):
                    self._sharded_state.assign([i], g)
                    self._show_state(parameter, i, group)
            self._frozen = [p for p in self._frozen if p is not parameter]

    # The loss scale

    def _attach_scaler(self) -> None:
        """The engine has one scale: of the one optimizer that came with a scaler, else 1."""
        owner = self._handle.scaled_by and self._handle.scaled_by()
        if self.loss_scaler is None:
            if owner is None:
                self._handle.engine.set_loss_scale(1.0)
            return
        if owner is not None:
            raise ValueError(
                "zero_ext: another optimizer of this module has a loss_scaler already, which "
                "scales the gradients of all its parameters."
            )
        check_same_on_all_ranks(self._handle.groups, [repr(self.loss_scaler)], "the loss scalers")
        self._handle.scaled_by = weakref.ref(self)
        self.loss_scaler._tell()

    def scale(self, loss):
        """``loss_scaler.scale(loss)``, or the loss itself without one."""
        return loss if self.loss_scaler is None else self.loss_scaler.scale(loss)

    def _check_scaled(self) -> None:
        scaler, backwards = self.loss_scaler, self._handle.engine.backwards
        if scaler is None or scaler._losses_scaled or backwards == self._backwards_seen:
            return
        raise RuntimeError(
            f"{self._handle.groups.where}no loss was scaled by the optimizer's loss_scaler since "
            f"the last step: its gradients are {scaler.get_scale():g} times too small. Call "
            "optimizer.scale(loss).backward() in place of loss.backward(), or make the optimizer "
            "without loss_scaler where torch's GradScaler scales."
        )

    def __reduce_ex__(self, protocol):
        # What torch's would copy has no engine.
        raise RuntimeError(
            f"zero_ext: {type(self).__name__} can be neither copied nor pickled: its state belongs "
            "to the parameters of one sharded model. Make another one over the other model's "
            "parameters, and give it this one's state_dict()."
        )

    # The step

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None):
        """Update the parameters on all ranks. Collective.

        A parameter that no rank's loss reached is left alone, as in PyTorch.

        Raises:
            RuntimeError: inside a backward; the last backward ran in ``no_sync()``; a parameter's
                dtype or device changed; NaN or Inf with ``nonfinite="raise"``; another rank did not
                answer within the process group's timeout.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._handle.forwards.leave_abandoned()
        self._adopt_unfrozen()
        self._follow_groups()
        self._follow_state()
        self._check_scaled()
        verdict = self._sharded_state.prepare_step(
            nonfinite=self.nonfinite != "step",
            max_norm=self.max_grad_norm,
            settings=self._hash_of_settings(),
        )
        if verdict.settings_differ:
            self._refuse_different_settings()
        self._backwards_seen = self._handle.engine.backwards
        self._report_earlier_steps(wait=False)
        if self._must_know_verdicts():
            self._handle.engine.settle(verdict)
            self._judge(verdict)
        else:
            # The device decides, and tells later.
            self._make_update(verdict)
            self._unreported.append(verdict)
        if self.loss_scaler is not None:
            self.loss_scaler._step_made(verdict.nonfinite)
        self._remember_state()
        return loss

    def _hash_of_settings(self) -> int:
        """Of what updates multiply with; equal on ranks where all of it is."""
        if self._handle.groups.world == 1:
            return 0
        numbers = [_number_of(self.max_grad_norm), self._handle.engine.divide_factor]
        for group in self.param_groups:
            numbers.extend(map(_number_of, map(group.get, self._compared)))
        return hash(tuple(numbers))

    def _refuse_different_settings(self) -> None:
        check_same_on_all_ranks(
            self._handle.groups,
            [
                f"max_grad_norm={self.max_grad_norm}",
                f"gradient divide factor={self._handle.engine.divide_factor}",
                *(
                    f"{name}={_number_of(group.get(name))} of group {g}"
                    for g, group in enumerate(self.param_groups)
                    for name in self._compared
                ),
            ],
            "the settings of the optimizers",
            remedy="Give every rank the same, and repeat step(): nothing was updated.",
        )

    def _must_know_verdicts(self) -> bool:
        """Whether the host must know of NaN and Inf before it goes on."""
        dynamic = self.loss_scaler is not None and self.loss_scaler.dynamic
        return self._handle.knows_on_host or self.nonfinite == "raise" or dynamic

    @property
    def knows_of_skipped_steps(self) -> bool:
        """Whether ``skipped_steps`` is known after a step without waiting for a device."""
        return self._must_know_verdicts()

    def _judge(self, verdict: _C.StepVerdict) -> None:
        if verdict.nonfinite:
            self._skip(verdict)
        else:
            self._make_update(verdict)

    def _make_update(self, verdict: _C.StepVerdict) -> None:
        if self.max_grad_norm is not None:
            self.grad_norm = verdict.norm
        self._update(verdict)

    def _update(self, verdict: _C.StepVerdict) -> None:
        """Update the parameters as ``verdict`` says, of which the host may not know yet."""
        raise NotImplementedError

    def _report_earlier_steps(self, wait: bool) -> None:
        while self._unreported and (wait or self._unreported[0].is_settled):
            verdict = self._unreported.pop(0)
            self._handle.engine.settle(verdict)
            if verdict.nonfinite:
                self._skip(verdict)

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped for NaN or Inf. Waits for the device to know."""
        self._report_earlier_steps(wait=True)
        return self._skipped_steps

    def _skip(self, verdict: _C.StepVerdict) -> None:
        if self.loss_scaler is not None and self.loss_scaler._expects_overflow():
            self._skipped_steps += 1
            return
        seen = (
            f"first in '{verdict.parameter}' on rank {verdict.rank}"
            + (f", micro-batch {verdict.micro_batch}" if verdict.micro_batch >= 0 else "")
            if verdict.rank >= 0
            else "on some rank"
        )
        message = f"{self._handle.groups.where}gradients hold NaN or Inf, {seen}"
        if self.nonfinite == "raise":
            raise RuntimeError(
                f"{message}. Nothing was updated; nonfinite='skip' passes over such steps."
            )
        self._skipped_steps += 1
        warnings.warn(
            f"{message}; step skipped on all ranks ({self._skipped_steps} so far).", stacklevel=7
        )

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also drops what micro-batches inside ``no_sync()`` have added up."""
        self._adopt_unfrozen()
        self._follow_groups()
        mode = _C.ZeroGrad.to_none if set_to_none else _C.ZeroGrad.to_zero
        self._handle.engine.zero_grad(self._sharded_state.indices, mode)

    @torch.compiler.disable
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients so that their global 2-norm is at most ``max_norm``. Collective.

        One pass over this rank's fp32 gradients for the norm, and one to scale them where that is
        needed, so that ``p.grad`` shows clipped gradients; ``max_grad_norm`` spares the second. The
        norm has the same bits for any number of ranks.

        Args:
            max_norm: In the unit of the gradients as they are now.
            error_if_nonfinite: Raise where the norm is NaN or Inf; else such gradients are left as
                they are, and ``step`` deals with them.
        Returns:
            0-D fp32 tensor, the norm before scaling, equal on all ranks.
        Source: Pascanu et al. 2013, section 3.2.
        """
        self._adopt_unfrozen()
        self._follow_groups()
        # A norm that is not finite leaves the gradients alone.
        norm = self._sharded_state.clip_gradients(max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"{self._handle.groups.where}the norm of the gradients is "
                f"{norm.item()}; they were not clipped."
            )
        return norm

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside it accumulate locally, in fp32, and send nothing (stages 0 and 1).

        Stage 2 keeps its memory promise and reduces anyway. The last backward before ``step`` must
        run outside.
        """
        self._handle.engine.push_no_sync()
        try:
            yield
        finally:
            self._handle.engine.pop_no_sync()

    # Saving and loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but in place and without a cast: fp32 state stays fp32.

        Values may be ShardTensors, DTensors, or plain tensors of the parameters' shapes, such as a
        one-process checkpoint of torch's own optimizer holds.

        Raises:
            ValueError: groups or sizes differ; nothing is changed then.
        """
        self._checked_load(state_dict)()

    def _checked_load(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Checks all of it. What it returns loads it."""
        state_dict = state_dict.copy()  # hooks may change what they are given
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else result
        self._adopt_unfrozen()
        self._follow_groups()
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved_groups] != sizes:
            raise ValueError(
                f"zero_ext: the state has groups of "
                f"{[len(group['params']) for group in saved_groups]} parameters, the optimizer of "
                f"{sizes}."
            )
        keys = [key for group in saved_groups for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        settings = [
            {k: copy.deepcopy(v) for k, v in saved.items() if k not in ("params", "param_names")}
            for saved in saved_groups
        ]
        groups = [{**g, **saved} for g, saved in zip(self.param_groups, settings, strict=True)]
        self._check_states(groups)
        load_states = self._checked_states(keys, parameters, state_dict["state"], groups)

        @torch.no_grad()
        def load() -> None:
            load_states()
            for group, saved in zip(self.param_groups, settings, strict=True):
                group.update(saved)
            for hook in self._optimizer_load_state_dict_post_hooks.values():
                hook(self)

        return load

    def _checked_states(self, keys, parameters, saved, groups) -> Callable[[], None]:
        """Checks everything. What it returns writes into the state in place; zeros where none is
        saved.

        ``groups``: with their settings as they will be.
        """
        loads = []
        of_each = [group for group in groups for _ in group["params"]]
        for key, parameter, group in zip(keys, parameters, of_each, strict=True):
            if any(parameter is frozen for frozen in self._frozen):
                self._warn_of_forgotten(key, saved.get(key, {}))
                continue
            values = {k: v for k, v in saved.get(key, {}).items() if v is not None}
            values = self._completed(values)
            place = find(parameter)
            held = self._held_state(parameter, place[1], self._states_held) if place else {}
            for name, value in values.items():
                if name not in held:
                    raise ValueError(f"zero_ext: the optimizer has no state '{name}' to load into.")
                check_state_shape(name, key, value, held[name].shape)
            used = ("step", *self._state_names[: self._states_of(group)])
            loads.append((parameter, held, values, used))

        def load() -> None:
            for parameter, held, values, used in loads:
                for name, target in held.items():
                    value = values.get(name)
                    if value is None:
                        target.zero_()
                    else:
                        target.copy_(value if isinstance(value, Tensor) else torch.tensor(value))
                shown = {k: v for k, v in held.items() if k in used or k in values}
                self.state[parameter].update(shown)

        return load

    @staticmethod
    def _warn_of_forgotten(key, values: dict[str, Any]) -> None:
        if values:
            warnings.warn(
                f"zero_ext: parameter {key} is frozen, and its saved state "
                f"({', '.join(map(str, values))}) is passed over: it begins anew when the "
                "parameter is unfrozen. Thaw it before load_state_dict().",
                stacklevel=4,
            )

    def _completed(self, values: dict[str, Any]) -> dict[str, Any]:
        """One parameter's saved state, with what torch does not save."""
        return values

    def _set_state_offloaded(self, offloaded: bool) -> None:
        self._sharded_state.set_offloaded(offloaded)

    def stats(self) -> dict[str, int]:
        """See ``zero_ext.stats``."""
        return {**self._handle.stats(), "skipped_steps": self.skipped_steps}


def _foreign(name: str) -> ValueError:
    return ValueError(
        f"zero_ext: '{name}' is not a parameter of the sharded module that the others belong to. "
        "Give each sharded module its own optimizer, or shard one module that holds them: "
        "nn.ModuleList([one, another])."
    )


def check_state_shape(name: str, key, value, shape: torch.Size) -> None:
    """Raises where a saved state has another shape than the optimizer's."""
    if isinstance(value, Tensor) and value.shape != shape:
        raise ValueError(
            f"zero_ext: state '{name}' of parameter {key} has shape {tuple(value.shape)}, the "
            f"optimizer's has {tuple(shape)}."
        )


def _number_of(setting: Any) -> Any:
    """A number, or a tuple of them, with the same hash on every rank; 0 where it is no number."""
    if isinstance(setting, Number):  # bool is one, and so are numpy's
        return setting if setting == setting else 0  # every NaN has another hash
    if isinstance(setting, tuple | list):
        return tuple(map(_number_of, setting))
    if isinstance(setting, Tensor) and setting.device.type == "cpu" and setting.numel() == 1:
        return _number_of(setting.item())  # one on a device is not waited for
    return 0


def refuse_differentiable(differentiable: bool) -> None:
    """Raises for torch's argument that no update in C++ can honour."""
    if differentiable:
        raise NotImplementedError(
            "zero_ext: differentiable=True is not available: the update runs in C++ without a "
            "graph. Use torch.optim for meta-learning."
        )
