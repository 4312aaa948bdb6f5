"""Sharded: what turns an optimizer of torch's into one over sharded parameters.

The optimizer stays a real one of its class. All that sharding adds is its ``Core``, which owns this
rank's part of the optimizer's state, and shows it in ``optimizer.state``.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C, _torch
from zero_ext.engine.checks import check_number, check_order, is_ignored
from zero_ext.engine.clipping import checked_norm, clip_by_norm, serving_backwards
from zero_ext.engine.handle import Handle
from zero_ext.engine.options import ShardingOptions, check_policy
from zero_ext.engine.plan import plan_parameters
from zero_ext.engine.registry import find, find_all
from zero_ext.optim import groups, scaler
from zero_ext.optim.arguments import (
    Sharding,
    check_closure,
    check_divide_by,
    check_group,
    check_state_dict,
)
from zero_ext.optim.core import Core, Loader
from zero_ext.optim.states import check_same_states
from zero_ext.ranks.agreement import calling
from zero_ext.ranks.collectives import copy_from_rank_0
from zero_ext.ranks.groups import resolve


def _of_core(name: str) -> property:
    """An attribute that the optimizer's core has. Code of torch's class has one of its own."""

    def place(optimizer: Any) -> dict[str, Any]:
        core = getattr(optimizer, "zero_core", None)
        return vars(optimizer if core is None or core.lent else core)

    return property(
        lambda optimizer: place(optimizer)[name],
        lambda optimizer, value: place(optimizer).update({name: value}),
    )


class Sharded(torch.optim.Optimizer):
    """The base of all optimizers here. Use ``AdamW``, ``Adam``, ``SGD``, ``Muon`` or ``wrap``.

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
        args, kwargs: As for torch's class.
    Raises:
        ValueError, TypeError: a parameter cannot be sharded, or another optimizer steps it;
            ranks make different optimizers.
    """

    zero_core: Core  # none as long as torch's constructor runs
    nonfinite, max_grad_norm = _of_core("nonfinite"), _of_core("max_grad_norm")
    grad_norm, loss_scaler = _of_core("grad_norm"), _of_core("loss_scaler")
    # False, whatever the class and its constructor say. That is kept for ``retire``.
    _step_supports_amp_scaling = property(
        lambda _: False,
        lambda self, value: vars(self).update(_step_supports_amp_scaling=value),
    )

    def retire(self) -> None:
        """Give up the state and all parameters, so that another optimizer can step them.

        This optimizer has no groups from then on. One that was adopted has its class again.
        """
        _give_up(self)
        self.param_groups.clear()
        if self.zero_core.before_adoption is not None:
            self.__class__, step = self.zero_core.before_adoption
            del self.zero_core
            self.state = defaultdict(dict)
            if step is not None:
                self.step = step

    def __reduce_ex__(self, protocol):
        # A copy by torch's method would have no engine.
        raise RuntimeError(
            f"zero_ext: {type(self).__name__} can be neither copied nor pickled: one sharded model "
            "has its state. Use its state_dict(), or that of a scheduler that refers to it."
        )

    # Parameter groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. The parameters are sharded like the others; every rank must add the same."""
        check_group(param_group)
        core = getattr(self, "zero_core", None)
        if core is None or core.lent:
            super().add_param_group(param_group)
            return
        self.follow_groups()
        super().add_param_group(param_group)
        named, whole = groups.named_parameters(self.param_groups, len(self.param_groups) - 1)
        try:
            core.states.check_added(self.param_groups[-1])
            add_plain(core.handle, named, self)
            self.follow_groups()
        except BaseException:
            self.param_groups.pop()
            raise
        core.handle.leave_whole(whole)

    def follow_groups(self) -> None:
        """Make ownership and states follow what users have changed in groups and ``state``.

        Raises:
            ValueError: a parameter is not sharded, or another optimizer's; nothing has changed.
        """
        core = self.zero_core
        if core.state is None:
            raise RuntimeError(
                f"zero_ext: this {type(self).__name__} was retired: it has no parameters. "
                "Use the optimizer that took its place."
            )
        if not core.is_current(self.param_groups):
            core.states.check(self.param_groups)
            core.follow(self.param_groups, groups.claim(self.param_groups, core.handle, self))
        if self.state is not core.shown:
            self.state = core.take_over(self.state, self.param_groups)

    def _zero_catch_up(self) -> None:
        """Shard the parameters that were unfrozen, and follow the groups. Collective."""
        self.zero_core.handle.adopt_unfrozen()  # a sharded module's forward may have done so
        self.follow_groups()

    # The state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but in place and without a cast: fp32 state stays fp32.

        Values may be ShardTensors, DTensors, or plain tensors of the parameters' shapes, such as a
        one-process checkpoint of torch's own optimizer holds.

        Raises:
            ValueError: groups or sizes differ, or ranks pass different states; nothing is changed
                then.
        """
        with calling("load_state_dict()"):
            load = self.checked_load(state_dict)
            check_same_states(state_dict, self.zero_core.handle.groups)
            load()

    def checked_load(self, state_dict: dict[str, Any]) -> Loader:
        """Check all of ``state_dict``, without a change. The function that is returned loads it."""
        if isinstance(state_dict, dict):
            state_dict = state_dict.copy()  # hooks may change what they are given
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else result
        check_state_dict(state_dict)
        self._zero_catch_up()
        core = self.zero_core
        write = core.checked_load(state_dict, self.param_groups)

        def load() -> None:
            write()
            core.states.convert(self)
            for hook in self._optimizer_load_state_dict_post_hooks.values():
                hook(self)

        return load

    def set_state_offloaded(self, offloaded: bool) -> None:
        """See ``zero_ext.offload_states``."""
        core = self.zero_core
        core.states.set_offloaded(core.shown, offloaded)

    # The step

    def scale(self, loss):
        """``loss_scaler.scale(loss)``, or the loss itself without one."""
        return loss if self.loss_scaler is None else self.loss_scaler.scale(loss)

    @_torch.disable_compilation
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        divide_by: float | None = None,
        **keywords: Any,
    ) -> Any:
        """Update the parameters on all ranks. Collective.

        A parameter that no rank's loss reached is left alone, as in PyTorch. While this rank waits
        here, it takes part in the backwards that other ranks still run.

        Args:
            divide_by: This rank's number of tokens or samples in the step. The update then uses the
                sum of all gradients divided by the sum of these numbers over the ranks, instead of
                the average over the ranks. ``max_grad_norm`` clips the divided gradient, and
                ``grad_norm`` is its norm. ``p.grad`` still shows the average over the ranks, but
                with ``wrap`` it is divided as well.
            keywords: Only with ``wrap``, whose class gets them: scalars that are equal on all
                ranks, which are numbers, strings, None, or tensors of one element.
        Raises:
            ValueError: ``divide_by`` is negative or not finite; ranks pass different keywords.
            TypeError: torch's ``step`` has no such keyword, or it is no scalar, or with it the
                update depends on more than before. Nothing has changed.
            RuntimeError: inside a backward; the last backward ran in ``no_sync()``; a parameter's
                dtype or device changed; NaN or Inf with ``nonfinite="raise"``; another rank did not
                answer within the process group's timeout.
        """
        core, loss = self.zero_core, None
        if core.lent:  # the class calls its own step
            return core.states.code.step(self, closure, **keywords)
        check_closure(closure)
        check_divide_by(divide_by)
        if keywords:
            self._zero_check_keywords(keywords)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        core.handle.forwards.leave_abandoned()
        core.keywords = keywords
        try:
            verdict = self._zero_prepare_step(divide_by)
            if core.note_verdict(verdict, self.param_groups, divide_by):
                self._zero_update()
            core.end_step(verdict)
        finally:
            core.keywords = {}
        return loss

    def _zero_prepare_step(self, divide_by: float | None) -> _C.StepVerdict:
        core = self.zero_core
        core.handle.check_whole()
        if core.loss_scaler is not None:
            core.loss_scaler.check_scaled(core.handle)
        while True:
            self.follow_groups()
            core.take_edits(self.param_groups)
            verdict = core.prepare_step(self.param_groups, divide_by)
            if not verdict.unfrozen:
                return verdict
            core.handle.adopt(verdict.unfrozen)

    def _zero_check_keywords(self, keywords: dict[str, Any]) -> None:
        """Raise a TypeError for what the update does not take."""
        raise TypeError(f"step() got an unexpected keyword argument '{next(iter(keywords))}'")

    def _zero_update(self) -> None:
        """Update the parameters as the last verdict says, which the host may not know yet."""
        raise NotImplementedError

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped for NaN or Inf. Waits for the device to know."""
        self.zero_core.report_skipped(wait=True)
        return self.zero_core.skipped.count

    @_torch.disable_compilation
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Also discards the sums of micro-batches that ran inside ``no_sync()``."""
        core = self.zero_core
        if core.lent:
            super().zero_grad(set_to_none)
            return
        core.handle.check_whole()
        self.follow_groups()
        mode = _C.ZeroGrad.to_none if set_to_none else _C.ZeroGrad.to_zero
        while unfrozen := core.state.zero_grad(mode):
            core.handle.adopt(unfrozen)
            self.follow_groups()

    @_torch.disable_compilation
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
        self._zero_catch_up()
        core = self.zero_core
        if float(norm_type) != 2:
            rest = (max_norm, norm_type, error_if_nonfinite, foreach)
            return clip_by_norm(core.parameters, *rest)
        with serving_backwards(core.handle):
            return checked_norm(core.state.clip_gradients(max_norm), error_if_nonfinite)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside it accumulate locally, in fp32, and send nothing (stages 0 and 1).

        Stage 2 reduces anyway. The last backward before ``step`` must run outside.
        """
        engine = self.zero_core.handle.engine
        engine.push_no_sync()
        try:
            yield
        finally:
            engine.pop_no_sync()

    def stats(self) -> dict[str, int]:
        """See ``zero_ext.stats``."""
        core, stats = self.zero_core, {"skipped_steps": self.skipped_steps}
        for each in (core.handle.engine, core.owners, core.states):
            stats |= {} if each is None else each.stats()
        return stats


def shard_states(
    optimizer: Sharded, sharding: Sharding, what: str, make_states: Callable[[Core], None]
) -> None:
    """
    Args:
        what: Of its kind, what must be equal on all ranks.
        make_states: Gives the core its states, before the groups are followed.
    """
    own_policy = check_policy(sharding.offload_policy)
    named, whole = groups.named_parameters(optimizer.param_groups)
    of_module = groups.handle_of_module(named, sharding)
    if (handle := of_module) is None:
        options = ShardingOptions(
            stage=1 if sharding.stage is None else sharding.stage,
            bucket_mb=sharding.bucket_mb,
            offload_policy=own_policy,
        )
        resolved = resolve(sharding.process_group, None, [p for _, p in named])
        plan = plan_parameters(resolved, named, options, whole)
        check_order(resolved, named)
        handle = Handle(resolved, plan)
    core = Core(handle, optimizer.defaults, sharding)
    groups.replace_named(core.shown, groups.named_in(optimizer.state))
    optimizer.zero_core, optimizer.state = core, core.shown
    try:
        if of_module is None:
            broadcast_frozen(handle, [*named, *whole])
        else:
            add_plain(handle, named, optimizer)
            handle.leave_whole(whole)
        sharded = groups.claim(optimizer.param_groups, handle, optimizer)
        what += f" nonfinite={core.nonfinite!r} clips={core.max_grad_norm is not None} "
        what += f"scales={core.loss_scaler is not None}"
        groups.check_same_optimizers(handle, what, sharded)
        scaler.attach(core.loss_scaler, handle, optimizer)
        make_states(core)
        handle.optimizers.add(optimizer)
        core.follow(optimizer.param_groups, sharded)
    except BaseException:  # whose traceback may keep this object alive
        _give_up(optimizer)
        if of_module is None:
            handle.dissolve()
        raise


def add_plain(handle: Handle, named: groups.Named, optimizer: Sharded) -> None:
    """Shard what ``optimizer`` steps and no module has brought into the engine. Collective."""
    if None not in find_all([p for _, p in named]):
        return  # ``claim`` checks them
    groups.check_not_owned(named, optimizer)
    groups.check_of_engine([(n, p) for n, p in named if find(p) or is_ignored(p)], handle)
    plain = [(name, p) for name, p in named if find(p) is None]
    handle.check_and_add(plain)
    broadcast_frozen(handle, plain)


def broadcast_frozen(handle: Handle, named: groups.Named) -> None:
    """Set frozen parameters to rank 0's values; trained ones are equal already. Collective."""
    copy_from_rank_0(handle.groups, [p for _, p in named if not p.requires_grad])


def _give_up(optimizer: Sharded) -> None:
    core = optimizer.zero_core
    core.handle.optimizers.discard(optimizer)
    core.let_go()
    optimizer.state.clear()
    scaler.detach(core.loss_scaler, core.handle, optimizer)
