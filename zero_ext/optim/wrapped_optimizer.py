"""WrappedOptimizer: any elementwise torch optimizer on this rank's masters. ``wrap`` makes it."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext.engine.checks import check_positive
from zero_ext.engine.registry import find
from zero_ext.optim import elementwise
from zero_ext.optim.arguments import ShardingArguments, check_differentiable
from zero_ext.optim.attributes import attributes_of, carry
from zero_ext.optim.groups import Group, named_in, parameters_of, replace_named, settings_of
from zero_ext.optim.lending import method_of
from zero_ext.optim.loading import SavedState
from zero_ext.optim.owned_optimizer import OwnedOptimizer
from zero_ext.optim.owners import OWNER_MB
from zero_ext.optim.sharded_optimizer import ShardedOptimizer
from zero_ext.optim.torch_optimizer import TorchOptimizer


def wrap(optimizer_class: type[torch.optim.Optimizer], params, **kwargs: Any) -> ShardedOptimizer:
    """Shard the state of any optimizer that updates each parameter by itself.

    An elementwise one runs on 1-D fp32 shards of the parameters. For another one (Muon, Adafactor,
    LAMB, …) each parameter has an owner, a rank on which it is updated whole, in fp32.

    Args:
        optimizer_class: Called as ``optimizer_class(params, **kwargs)``.
        kwargs: Arguments of ``optimizer_class``, and the keyword arguments of
            ``ShardedOptimizer``. ``max_grad_norm`` scales ``p.grad`` itself, before the update.
            ``owner_mb``: MiB of masters and gradients that an owner has whole at a time.
    Raises:
        TypeError: an update or a state depends on other parameters or on random numbers, found by
            trying, not by name.
    """
    names = {"owner_mb", *ShardingArguments.__annotations__} & kwargs.keys()
    sharding = {name: kwargs.pop(name) for name in names}
    return sharded(optimizer_class, params, kwargs, **sharding)


def sharded(
    optimizer_class,
    params,
    kwargs: dict[str, Any],
    *,
    owner_mb: float = OWNER_MB,
    **sharding: Any,
) -> ShardedOptimizer:
    """The optimizer for what a trial has found out about ``optimizer_class``."""
    check_positive("owner_mb", owner_mb)
    if isinstance(params, Iterator):  # which is read twice
        params = list(params)
    try:
        return WrappedOptimizer(optimizer_class, params, kwargs, **sharding)
    except elementwise.WholeParametersError:
        return OwnedOptimizer(optimizer_class, params, kwargs, owner_mb, **sharding)


class Template:
    """Makes optimizers that update as ``given`` does: of its class, defaults and attributes.

    Called as a class of optimizers is. The constructor of ``given``'s class is not called, except
    where it has made states: then it is asked for those of the new parameters.
    """

    def __init__(self, given: torch.optim.Optimizer, arguments: dict[str, Any]):
        self.__name__ = type(given).__name__
        self._kind, self._arguments = type(given), arguments
        self._defaults, self._attributes = given.defaults, attributes_of(given)
        self._given = given
        self._makes_states = any(map(given.state.get, parameters_of(given)))
        self._named = named_in(given.state)

    def __call__(self, groups, **settings: Any) -> torch.optim.Optimizer:
        optimizer = self._kind.__new__(self._kind)
        torch.optim.Optimizer.__init__(optimizer, groups, {**self._defaults, **settings})
        carry(self._attributes, optimizer, self._given)
        if self._makes_states:
            own = [{**group} for group in optimizer.param_groups]
            optimizer.state = self._kind(own, **self._arguments).state
        optimizer.state.update(copy.deepcopy(self._named))
        return optimizer


class WrappedOptimizer(TorchOptimizer):
    """Any elementwise torch optimizer, run on this rank's 1-D fp32 masters. Made by ``wrap``."""

    def __init__(self, optimizer_class, params, kwargs, **sharding):
        check_differentiable(kwargs.get("differentiable", False))
        if not callable(optimizer_class):
            raise TypeError(
                "zero_ext: wrap() takes an optimizer's class, such as torch.optim.RMSprop, and not "
                f"a {type(optimizer_class).__name__}."
            )
        if isinstance(optimizer_class, type) and issubclass(optimizer_class, ShardedOptimizer):
            raise TypeError(
                f"zero_ext: {optimizer_class.__name__} shards its state already. Use it unwrapped."
            )
        elementwise.check(optimizer_class, kwargs, {})
        self._kinds_checked = {elementwise.kind_of({})}
        self._inner: torch.optim.Optimizer | None = None
        self._shards: dict[Tensor, torch.nn.Parameter] = {}
        # By name: which states have a value for each element.
        self._per_element: dict[str, bool] = {}
        probed = torch.zeros(1, device="cpu")
        super().__init__(optimizer_class, params, kwargs, probed, **sharding)

    _method_of = method_of

    def _inners(self) -> list[torch.optim.Optimizer]:
        return [] if self._inner is None else [self._inner]

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):  # else torch says what it must be
            kind = elementwise.kind_of(param_group)
            if kind not in self._kinds_checked:
                elementwise.check(self._optimizer_class, self._kwargs, param_group)
                self._kinds_checked.add(kind)
        super().add_param_group(param_group)

    def _show_state(self, parameter: Tensor, i: int, group: Group) -> None:
        if parameter not in self._shards:  # else taken out of its group and put back, or emptied
            shard = torch.nn.Parameter(self._handle.engine.master_slice(i))
            self._shards[parameter] = shard
            self._inner = self._with_group(self._inner, shard, group)
            if len(self._shards) == 1:
                self._show_named_state_made()
        if self._inner.state.get(self._shards[parameter]):
            self._show_inner_state(parameter, self._shards[parameter])

    def _forget_state(self, parameter: Tensor, i: int, group: Group) -> bool:
        shard = self._shards.get(parameter)
        if shard is None or not self._inner.state.get(shard):
            return False
        made = self._with_group(None, shard, group).state
        self._inner.state[shard] = made.get(shard, {})
        for key, value in named_in(made).items():
            self.state.setdefault(key, value)
        return True

    def _with_group(self, inner, shard: Tensor, group: Group) -> torch.optim.Optimizer:
        inner_group = {**settings_of(group), "params": [shard]}
        alone = self._make_inner(dict(inner_group))
        if inner is None:
            return alone
        inner.add_param_group(inner_group)
        # Some optimizers make their state when constructed, and only then.
        for name, value in alone.state.get(shard, {}).items():
            inner.state[shard].setdefault(name, value)
        return inner

    def _update(self, verdict: _C.StepVerdict) -> None:
        if self._inner is None:  # nothing to train
            return
        group_of = self._carry_in()
        try:
            self._inner.step(**self._keywords)
        finally:  # masters that have moved are those of their parameters, whatever it raised
            self._drop_gradients()
            self._sharded_state.apply_masters()
            self._carry_out(group_of)

    def _carry_in(self) -> dict[int, Group]:
        """Give the inner optimizer settings, gradients and what is kept under names.

        Returns:
            The group of each parameter that is in one, by the parameter's id.
        """
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        for inner_group, (parameter, shard) in zip(
            self._inner.param_groups, self._shards.items(), strict=True
        ):
            outer = group_of.get(id(parameter))  # None: taken out of its group
            if outer is not None:
                inner_group.update(settings_of(outer))
            gradient = None if outer is None else parameter.grad
            if gradient is None:
                shard.grad = None
            elif hasattr(gradient, "to_local") or gradient.numel() == shard.numel():
                shard.grad = _local(gradient)
            else:  # a whole one that a user has set, of which no step has made a part yet
                shard.grad = self._slice_of(gradient, parameter, shard)
        replace_named(self._inner.state, named_in(self.state))
        return group_of

    def _drop_gradients(self) -> None:
        for shard in self._shards.values():
            shard.grad = None  # which would count as kept by somebody

    def _carry_out(self, group_of: dict[int, Group]) -> None:
        """Show the settings and states that the inner optimizer has by now."""
        for inner_group, (parameter, shard) in zip(
            self._inner.param_groups, self._shards.items(), strict=True
        ):
            if id(parameter) in group_of:  # some optimizers count in their groups
                group_of[id(parameter)].update(settings_of(inner_group))
                self._show_inner_state(parameter, shard)
        named = named_in(self._inner.state)
        for name, value in named.items():
            if name not in self.state:
                self._settings.states.add(-1, name, None, value)
        replace_named(self.state, named)

    def _show_named_state_made(self) -> None:
        """What is kept under names from construction on, unless there is a value already."""
        for key, value in named_in(self._inner.state if self._inner else {}).items():
            self.state.setdefault(key, value)

    @torch.no_grad()
    def _checked_states(self, saved: Sequence[SavedState]) -> Callable[[], None]:
        self._offloaded.check()
        # torch's optimizers make their state in the first step, or some of it when constructed: a
        # new one takes what is saved.
        inner, loaded = None, {}
        of_shapes = _of_shapes(saved)
        for each in saved:
            shard = self._shards.get(each.parameter)
            if shard is None:
                each.warn_of_frozen()
                continue
            inner = self._with_group(inner, shard, each.group)
            loaded[each.parameter] = shard
            inner.state[shard].update(self._inner_state(each, shard, of_shapes))
        settings = self._inner.param_groups if self._inner else []
        places = zip(self._shards.items(), settings, strict=True)
        away = {p: (shard, group) for (p, shard), group in places if p not in loaded}
        for shard, group in away.values():  # taken out of their groups: they keep their states
            inner = self._with_group(inner, shard, group)
            inner.state[shard].update(self._inner.state.get(shard, {}))
        if inner is not None:  # converts what older versions have saved, as in torch
            inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})

        def load() -> None:
            if inner is not None and self._inner is not None:
                vars(inner).update(attributes_of(self._inner))
            self._inner = inner
            self._shards = loaded | {parameter: shard for parameter, (shard, _) in away.items()}
            self._show_named_state_made()
            for parameter, shard in loaded.items():
                self.state[parameter].clear()
                self._show_inner_state(parameter, shard)

        return load

    def _inner_state(
        self, saved: SavedState, shard: Tensor, of_shapes: dict[str, bool]
    ) -> dict[str, Any]:
        """What torch's optimizer gets of a saved state: of per-element values this rank's part.

        Args:
            of_shapes: Says what is one, of what the first step does not make.
        """
        made = self._states_of_a_step(saved.group, shard.device)
        missing = made.keys() - saved.values.keys() if saved.values else set()
        if missing:
            raise ValueError(
                f"zero_ext: the state of {saved.name} lacks '{min(missing)}', which "
                f"{self._class_name} has. Load what it has saved."
            )
        shape, state = saved.parameter.shape, {}
        for name, value in saved.values.items():
            if made.get(name, of_shapes.get(name)):
                saved.check_shape(name, shape)
                value = self._slice_of(value, saved.parameter, shard)
            state[name] = copy.deepcopy(value)
        return state

    def _states_of_a_step(self, group: Group, device: torch.device) -> dict[str, bool]:
        """Which states a step makes, and which have a value for each element. Found by trying with
        two sizes: any other state may have the shape of one parameter."""
        probes = [torch.nn.Parameter(torch.zeros(numel, device=device)) for numel in (2, 3)]
        for probe in probes:
            probe.grad = torch.zeros_like(probe)
        optimizer = self._make_inner({**copy.deepcopy(settings_of(group)), "params": probes})
        elementwise.begin_training(optimizer)
        optimizer.step()
        return {
            name: all(_has_shape(optimizer.state[p].get(name), p.shape) for p in probes)
            for name in optimizer.state[probes[0]]
        }

    def _slice_of(self, value: Tensor, parameter: Tensor, shard: Tensor) -> Tensor:
        local = torch.empty_like(shard, requires_grad=False)
        self._handle.as_parameter(local, find(parameter)[1], parameter).copy_(value)
        return local

    def _every_rank_has_some(self, i: int) -> bool:
        """Of the elements of parameter i. Some optimizers make no state where there are none."""
        bounds = self._handle.engine.bounds(i)
        return self._handle.replicated or all(a < b for a, b in itertools.pairwise(bounds))

    def _show_inner_state(self, parameter: Tensor, shard: Tensor) -> None:
        _, i = find(parameter)
        state = self.state[parameter]
        for name, value in self._inner.state[shard].items():
            if not self._is_per_element(name, value, shard):
                if name not in state and self._every_rank_has_some(i):
                    owner = self._handle.engine.parameter_name(i)
                    self._settings.states.add(i, name, owner, value)
                state[name] = value
            elif name not in state or _local(state[name]).data_ptr() != value.data_ptr():
                state[name] = self._handle.as_parameter(value, i, parameter)

    def _is_per_element(self, name: str, value: Any, shard: Tensor) -> bool:
        if not _has_shape(value, shard.shape):
            return False
        if name not in self._per_element:  # another one may have this shape, too
            places = [*zip(self._inner.param_groups, self._shards.values(), strict=True)]
            group = next(group for group, each in places if each is shard)
            of_shapes = all(
                _has_shape(self._inner.state[each][name], each.shape)
                for _, each in places
                if name in self._inner.state.get(each, ())
            )
            made = self._states_of_a_step(group, shard.device)
            self._per_element[name] = made.get(name, of_shapes)
        return self._per_element[name]


def _of_shapes(saved: Sequence[SavedState]) -> dict[str, bool]:
    """By name: whether that state has its parameter's shape, of all parameters that have it."""
    of_shapes: dict[str, bool] = {}
    for each in saved:
        for name, value in each.values.items():
            if value is not None:
                of_shape = _has_shape(value, each.parameter.shape)
                of_shapes[name] = of_shapes.get(name, True) and of_shape
    return of_shapes


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _local(gradient: Tensor) -> Tensor:
    if hasattr(gradient, "to_local"):
        return gradient.to_local()
    return gradient.as_strided((gradient.numel(),), (1,))
