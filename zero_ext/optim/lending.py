"""Lending: how code of torch's class gets the parameters and states that this rank works on.

Note [Lending]
While code of torch's class runs, its own object has other parameters in its groups and their
states: those that this rank works on. Settings, hooks and attributes stay. Afterwards groups and
states are the user's again, whatever the code has raised. Code that has put other groups there is
an error, because it would not see the next step's.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext._torch import TorchDispatchMode, schema_of
from zero_ext.engine.handle import Handle
from zero_ext.optim import elementwise
from zero_ext.optim.groups import Group, parameters_of, settings_of
from zero_ext.optim.states import States
from zero_ext.tensor.meshes import copy_whole, local_of
from zero_ext.tensor.shard_tensor import ShardTensor


class OwnCode:
    """The code of one optimizer's class, and small optimizers that are tried out.

    Args:
        kind: Makes optimizers like this one: called with groups and ``kwargs``.
        step: Its step, called with the optimizer and keywords. Hooks of torch's are left out.

    Attributes:
        probe: An optimizer of one small matrix.
        whole: Whether it needs whole parameters.
    """

    def __init__(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        kwargs: dict[str, Any],
        step: Callable[..., Any],
    ):
        self.kind, self.kwargs, self.whole = kind, kwargs, False
        self.name = getattr(kind, "__name__", repr(kind))
        self.probe = self.made_for(torch.nn.Parameter(torch.zeros(2, 2, device="cpu")), {})
        self.makes_states = any(map(self.probe.state.get, parameters_of(self.probe.param_groups)))
        self.step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._tried: dict[str, dict[str, bool]] = {}  # what ``try_out`` has found

    def made_for(self, parameter: Tensor, group: Group) -> torch.optim.Optimizer:
        """With a group of its own, which has the settings of ``group``."""
        settings = copy.deepcopy(settings_of(group))
        return self.kind([{**settings, "params": [parameter]}], **self.kwargs)

    def try_all(self, groups: Sequence[Group]) -> None:
        """Find out whether one of ``groups`` needs whole parameters."""
        for group in groups:
            try:
                self.try_out(group)
            except elementwise.WholeParametersError:
                self.whole = True

    def try_out(self, group: Group, keywords: dict[str, Any] | None = None) -> dict[str, bool]:
        """See ``elementwise.check``. Once for each kind of settings and keywords."""
        tried = elementwise.kind_of(group, keywords or {})
        if tried not in self._tried:
            self._tried[tried] = elementwise.check(self.kind, self.kwargs, group, keywords)
        return self._tried[tried]


@contextlib.contextmanager
def lent(
    optimizer: torch.optim.Optimizer, lists: Sequence[list[Tensor]], states: dict
) -> Iterator[list[dict]]:
    """See note [Lending].

    Args:
        lists: For each group, the parameters that the code gets.
    Yields:
        A list with ``states``, and afterwards with those that the code has left.
    """
    core, groups, shown = optimizer.zero_core, optimizer.param_groups, optimizer.state
    before = [(group, group["params"], own) for group, own in zip(groups, lists, strict=True)]
    for group, _, own in before:
        group["params"] = own
    optimizer.state, core.lent, left = states, True, [states]
    try:
        yield left
        now = optimizer.param_groups
        if not (len(now) == len(before) and now is groups) or any(
            group is not was or group["params"] is not own
            for group, (was, _, own) in zip(now, before, strict=True)
        ):
            raise RuntimeError(
                f"zero_ext: code of {type(optimizer).__name__} has put other parameters or groups "
                "into param_groups. Add groups with add_param_group(), between two steps."
            )
    finally:
        left[:] = [optimizer.state]
        optimizer.state, optimizer.param_groups, core.lent = shown, groups, False
        groups[:] = [group for group, _, _ in before]
        for group, parameters, _ in before:
            group["params"] = parameters


class WatchedWrites(TorchDispatchMode):
    """Notes what is written to, also through ``p.data`` and views."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for position, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                # Tensors of several parts, such as DTensors, hold no parameter of ours.
                if isinstance(each, Tensor) and not hasattr(each, "to_local"):
                    self._storages.add(_storage_of(each))
        return func(*args, **kwargs)

    def moved(self, now: Tensor, lent: Tensor) -> bool:
        """Whether code that was lent a parameter with these values has written to it."""
        return _storage_of(lent) in self._storages or _storage_of(now) != _storage_of(lent)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class OwnStates(States):
    """States that the class's own code keeps.

    Args:
        code: Of the optimizer.
        first_states: By id of a parameter, the whole state that the optimizer has by now: it was
            adopted, or its constructor has made states.
    """

    def __init__(
        self,
        handle: Handle,
        state: _C.OptimizerState,
        code: OwnCode,
        first_states: dict[int, dict[str, Any]],
    ):
        self._handle, self._state, self.code, self._first_states = handle, state, code, first_states
        self._away: dict[int, _C.OffloadedStorage] = {}  # in host memory, by storage

    def _gradient_of(self, parameter: Tensor, i: int) -> Tensor | None:
        """This rank's piece, flat."""
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, ShardTensor):
            return None if gradient is None else gradient.local
        local = local_of(gradient)
        if self._handle.replicated and local.stride() == local_of(parameter).stride():
            return local.as_strided((local.numel(),), (1,))
        return self._piece_of(gradient, parameter, i)  # all ranks hold it

    @torch.no_grad()
    def _piece_of(self, value: Tensor, parameter: Tensor, i: int) -> Tensor:
        """This rank's part of a value of the parameter's shape, flat; fp32, or of its own kind."""
        kind = torch.float32 if value.is_floating_point() else value.dtype
        piece = torch.empty_like(self._handle.engine.master_slice(i), dtype=kind)
        copy_whole(self._handle.as_parameter(piece, i, parameter), value)
        return piece

    def _check_there(self) -> None:
        if self._away:
            raise RuntimeError(_C.STATES_OFFLOADED)

    def _set_away(self, away: bool, states: dict[Any, Any]) -> None:
        """Move those of ``states`` that are tensors on a device to the host, or all back."""
        self._state.set_offloaded(away)
        while not away and self._away:
            self._away[next(reversed(self._away))].bring_back()  # stays away if there is no memory
            self._away.popitem()
        values = (v for k, state in states.items() if isinstance(k, Tensor) for v in state.values())
        for value in values if away else ():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                storage = _storage_of(value)  # which may hold several states
                if storage not in self._away:
                    self._away[storage] = _C.OffloadedStorage(value, _C.STATES_OFFLOADED)
