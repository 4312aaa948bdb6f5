"""OwnedOptimizer: any optimizer that updates each parameter by itself. ``wrap`` makes it.

Note [Owners] in owners.py says how. The state lies at the owner, whole and in whatever form the
given class keeps it.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext.engine.registry import find
from zero_ext.optim.elementwise import WholeParametersError
from zero_ext.optim.groups import (
    Group,
    named_in,
    parameters_of,
    settings_of,
    sharded_in,
    trained_in,
)
from zero_ext.optim.loading import SavedState
from zero_ext.optim.owned_methods import SharedValues, method_of
from zero_ext.optim.owner_masters import KeptMasters
from zero_ext.optim.owners import Owners
from zero_ext.optim.torch_optimizer import TorchOptimizer

_META = torch.device("meta")


class _Owned(NamedTuple):
    """A parameter at its owner."""

    whole: torch.nn.Parameter  # fp32, of the parameter's shape; has memory during a call alone
    inner: torch.optim.Optimizer


class OwnedOptimizer(TorchOptimizer):
    """A torch optimizer, run on whole fp32 parameters at their owners. Made by ``wrap``.

    ``state`` has the states of the parameters that this rank owns. ``state_dict()`` is collective:
    every rank gets all states, whole. Each parameter has an inner optimizer of its own. What these
    keep in their groups and under names is the same for all of them, as the trial has found.
    """

    def __init__(self, optimizer_class, params, kwargs, owner_mb: float, **sharding):
        self._owned: dict[Tensor, _Owned] = {}
        probed = torch.zeros(2, 2, device="cpu")
        super().__init__(optimizer_class, params, kwargs, probed, **sharding)
        self._owners = Owners(
            self._handle,
            owner_mb=owner_mb,
            element_bytes=2 * torch.float32.itemsize,  # master and gradient
        )
        self._masters = KeptMasters(self._owners)
        self.state.update(copy.deepcopy(named_in(self._probe.state)))

    _method_of = method_of
    _trial_may_raise = (WholeParametersError,)

    def _inners(self) -> list[torch.optim.Optimizer]:
        return [owned.inner for owned in self._owned.values()]

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for shape in {tuple(p.shape) for p in group["params"]}:  # Muon takes matrices alone
                inner = self._inner_of(torch.nn.Parameter(torch.empty(shape, device="meta")), group)
                # Some classes make their settings anew, such as a tensor of a rate.
                made = settings_of(inner.param_groups[0]).items()
                group.update((k, v) for k, v in made if getattr(v, "device", None) != _META)
        except BaseException:
            self.param_groups.pop()
            raise

    def _inner_of(self, whole: torch.nn.Parameter, group: Group) -> torch.optim.Optimizer:
        return self._make_inner({**copy.deepcopy(settings_of(group)), "params": [whole]})

    def _show_state(self, parameter: Tensor, i: int, group: Group) -> None:
        """States are there after the first step, at the owner."""

    def _forget_state(self, parameter: Tensor, i: int, group: Group) -> bool:
        owned = self._owned.get(parameter)
        if owned is None:
            return False
        made_at_once = any(map(self._probe.state.get, parameters_of(self._probe)))
        if had_some := bool(made_at_once or owned.inner.state.get(owned.whole)):
            del self._owned[parameter]  # it is made again when it is needed
        return had_some

    def _find_owners(self) -> dict[Tensor, Group]:
        """Give each parameter an owner. Returns the group of each parameter that trains."""
        groups = trained_in(self.param_groups)
        self._owners.assign({p: p.numel() for p in groups})
        return groups

    # The step

    def _update(self, verdict: _C.StepVerdict) -> None:
        groups, owners = self._find_owners(), self._owners
        stepped = [p for p in groups if p.grad is not None]
        masters = {p: self._handle.engine.master_slice(find(p)[1]) for p in stepped}
        shared = SharedValues(self)
        try:
            out_of_date = self._masters.out_of_date(masters)
            for wave in owners.waves(stepped):
                gradients = {p: self._gradient_of(p, masters[p]) for p in wave.parameters}
                (whole_gradients,) = owners.to_owners(wave, gradients)()
                whole_masters = self._masters.whole(wave, masters, out_of_date)
                with shared.agreed(f"step() of {self._class_name}"):
                    for p, master in whole_masters.items():
                        self._step_owned(p, groups[p], master, whole_gradients[p], shared)
                parts = owners.from_owners(wave, whole_masters, masters[wave.parameters[0]])()
                self._masters.write(parts, masters)
            self._count_in_groups_without_gradients(groups, stepped, shared)
        except BaseException:
            self._masters.forget()
            raise
        finally:  # masters that have moved are those of their parameters, whatever was raised
            self._sharded_state.apply_masters()
        shared.adopt()

    def _count_in_groups_without_gradients(
        self, groups: dict[Tensor, Group], stepped: list[Tensor], shared: SharedValues
    ) -> None:
        """Some optimizers count their steps in all groups. On every rank alike."""
        of_groups = {id(group): p for p, group in groups.items()}
        idle = of_groups.keys() - {id(groups[p]) for p in stepped}
        for group in (group for group in self.param_groups if id(group) in idle):
            shape = of_groups[id(group)].shape
            whole = torch.nn.Parameter(torch.empty(shape, device="meta"))
            inner = self._inner_of(whole, group)
            shared.give(inner, group)
            inner.step(**self._keywords)
            shared.take(inner, group)

    def _gradient_of(self, parameter: Tensor, master: Tensor) -> Tensor:
        """This rank's piece, flat."""
        gradient = parameter.grad
        if hasattr(gradient, "to_local"):
            return gradient.to_local()
        piece = torch.empty_like(master)  # of a whole one that all ranks hold, or a user has set
        self._handle.as_parameter(piece, find(parameter)[1], parameter).copy_(gradient)
        return piece

    def _step_owned(
        self,
        parameter: Tensor,
        group: Group,
        master: Tensor,
        gradient: Tensor,
        shared: SharedValues,
    ) -> None:
        """Update the whole ``master``, which is flat, in place."""
        values = self._shaped(master, parameter)
        with self._lent(parameter, group, values, gradient, shared) as (whole, inner):
            inner.step(**self._keywords)
            if whole.data_ptr() != values.data_ptr():  # the class has put another tensor there
                values.copy_(whole.data)

    @contextlib.contextmanager
    def _lent(
        self,
        parameter: Tensor,
        group: Group,
        values: Tensor,
        gradient: Tensor | None,
        shared: SharedValues,
    ) -> Iterator[_Owned]:
        """Its inner optimizer has the parameter, its gradient, and what all of them share."""
        owned = self._owned.get(parameter)
        if owned is None:  # some classes make their state when constructed, from the values
            whole = torch.nn.Parameter(values)
            owned = self._owned[parameter] = _Owned(whole, self._inner_of(whole, group))
        whole, inner = owned
        whole.data = values
        whole.grad = None if gradient is None else self._shaped(gradient, parameter)
        shared.give(inner, group)
        try:
            yield owned
        finally:
            whole.grad, whole.data = None, _without_memory(values)
        shared.take(inner, group)
        self.state[parameter] = inner.state[whole]

    def _shaped(self, flat: Tensor, parameter: Tensor) -> Tensor:
        return flat.as_strided(parameter.shape, self._handle.engine.strides(find(parameter)[1]))

    def stats(self) -> dict[str, int]:
        kept = {"bytes_owner_masters": self._masters.nbytes}
        return {**super().stats(), **self._owners.stats(), **kept}

    # The state

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with all states, whole, on every rank. Collective."""
        self._find_owners()
        places = dict(p_i for group in self.param_groups for p_i in sharded_in(group))
        mine = {i: dict(self.state[p]) for p, i in places.items() if p in self._owned}
        everything = self._owners.gather(mine)
        own = self.state
        whole = {p: everything[i] for p, i in places.items() if i in everything}
        self.state = type(own)(dict, {**whole, **named_in(own)})
        try:
            return super().state_dict()
        finally:
            self.state = own

    @torch.no_grad()
    def _checked_states(self, saved: Sequence[SavedState]) -> Callable[[], None]:
        self._offloaded.check()
        groups = self._find_owners()
        loaded: dict[Tensor, _Owned] = {}
        for each in saved:
            if each.parameter not in groups:
                each.warn_of_frozen()
                continue
            # Values of the parameter's shape may be sharded: all ranks take part.
            values = {
                name: value.full_tensor() if hasattr(value, "full_tensor") else value
                for name, value in each.values.items()
            }
            if values and self._owners.owns(each.parameter):
                loaded[each.parameter] = self._with_state(each, values)

        def load() -> None:
            for each in saved:  # others, which were taken out of their groups, keep their states
                self._owned.pop(each.parameter, None)
                self.state.pop(each.parameter, None)
            self._owned.update(loaded)
            for parameter, (whole, inner) in loaded.items():
                self.state[parameter] = inner.state[whole]

        return load

    def _with_state(self, saved: SavedState, values: dict[str, Any]) -> _Owned:
        master = self._handle.engine.master_slice(find(saved.parameter)[1])
        whole = torch.nn.Parameter(_without_memory(master.new_empty(saved.parameter.shape)))
        inner = self._inner_of(whole, saved.group)
        for name, value in values.items():
            if isinstance(value, Tensor) and name != "step":  # counts stay on the host
                value = value.detach().to(master.device, copy=True)
            inner.state[whole][name] = copy.deepcopy(value)
        # Converts what older versions have saved, as in torch.
        inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})
        return _Owned(whole, inner)

    def _set_state_offloaded(self, offloaded: bool) -> None:
        super()._set_state_offloaded(offloaded)
        self._masters.forget()


def _without_memory(tensor: Tensor) -> Tensor:
    """Of the same shape, dtype and device, with the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
