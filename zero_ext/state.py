"""Whole values of a sharded model: parameters, gradients and optimizer states, read and written.

All functions are collective: every rank of the model calls them, in the same order, and every rank
gets the whole value. What is written is rank 0's, on every rank. With stage 3 parameters may be
released: nothing is gathered but the value itself.
"""

from numbers import Number

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext.groups import broadcast_
from zero_ext.handle import Handle, find
from zero_ext.sharded_optimizer import ShardedOptimizer


@torch.no_grad()
def full_tensor(parameter: Tensor) -> Tensor:
    """The fp32 master of ``parameter``, whole. Collective.

    What the next step starts from: values that were written to the parameter since the last step
    are in it.

    Returns:
        A new fp32 tensor of the parameter's shape on every rank, whatever the parameter's dtype.
        A frozen parameter has no master; its values are converted. Inside
        ``summon_full_params()`` what was written there is in it, also what will be forgotten.
    Raises:
        ValueError: this library does not shard the parameter.
        RuntimeError: inside a backward, or ``offload_states`` has moved parameters or masters.
    """
    handle, i = _place_of(parameter)
    if _is_loose(handle, i):
        return parameter.detach().float().clone()
    return _whole(handle.as_parameter(handle.engine.current_master(i), i, parameter))


@torch.no_grad()
def set_full_param(parameter: Tensor, value: Tensor) -> None:
    """Give ``parameter`` and its fp32 master new values, on every rank. Collective.

    The master gets all bits of ``value``, the parameter its rounding; optimizer states stay. With
    stage 3 it waits until no rank gathers the old value any more.

    Args:
        value: Of the parameter's shape, any dtype; rank 0's counts.
    Raises:
        ValueError: another shape, or a parameter that this library does not shard. Nothing is
            changed then.
        RuntimeError: inside a backward or ``summon_full_params(writeback=False)``, or
            ``offload_states`` has moved parameters or masters.
    """
    handle, i = _place_of(parameter)
    handle.refuse_forgotten_writes("set_full_param()")
    value = _agreed(handle, parameter, value, "set_full_param()")
    if _is_loose(handle, i):
        parameter.copy_(value)
    else:
        handle.engine.write_parameter(i, value)


@torch.no_grad()
def full_grad(parameter: Tensor) -> Tensor | None:
    """The reduced gradient of ``parameter``, whole, in fp32. Collective.

    None where ``parameter.grad`` is None: no rank's loss reached the parameter, the gradients were
    zeroed, or the last backward ran in ``no_sync()`` and nothing is reduced yet.

    Raises:
        ValueError: this library does not shard the parameter.
    """
    _place_of(parameter)
    gradient = parameter.grad
    return None if gradient is None else _whole(gradient).float()


@torch.no_grad()
def set_full_grad(parameter: Tensor, value: Tensor | None) -> None:
    """Give ``parameter`` a new reduced gradient, or none, on every rank. Collective.

    Args:
        value: Of the parameter's shape, any dtype; rank 0's counts. It replaces micro-batches that
            were added up in ``no_sync()``. None on all ranks: no gradient, the step leaves the
            parameter alone.
    Raises:
        ValueError: another shape, or a parameter that this library does not shard or that is
            frozen. Nothing is changed then.
    """
    handle, i = _place_of(parameter)
    if handle.engine.unit_of(i) < 0:
        raise ValueError("zero_ext: set_full_grad(): the parameter is frozen; it has no gradient.")
    if value is None:
        handle.engine.zero_grad([i], _C.ZeroGrad.to_none)
        return
    handle.engine.write_gradient(i, _agreed(handle, parameter, value, "set_full_grad()"))


@torch.no_grad()
def full_state(optimizer: ShardedOptimizer, parameter: Tensor, name: str) -> Tensor:
    """A value of the optimizer's state, such as ``"exp_avg"``, whole. Collective.

    Returns:
        A new tensor on every rank: fp32 and of the parameter's shape, or 0-dim as ``"step"`` is.
    Raises:
        ValueError: the optimizer does not step the parameter, or has no state of that name.
    """
    value = _state_of(optimizer, parameter, name)
    return _whole(value) if isinstance(value, Tensor) else torch.tensor(value)


@torch.no_grad()
def set_full_state(optimizer: ShardedOptimizer, parameter: Tensor, name: str, value) -> None:
    """Give a value of the optimizer's state new contents, on every rank. Collective.

    Args:
        value: A tensor of the state's shape, or a number; rank 0's counts.
    Raises:
        ValueError: another shape, a parameter that the optimizer does not step, a name that its
            state does not have, or a state that is not a tensor. Nothing is changed then.
    """
    state = _state_of(optimizer, parameter, name)
    if not isinstance(state, Tensor):
        raise ValueError(
            f"zero_ext: state '{name}' is a {type(state).__name__}, not a tensor: set it with "
            "load_state_dict()."
        )
    if isinstance(value, Number):
        value = torch.full(state.shape, value, dtype=torch.float32)
    state.copy_(_agreed(optimizer._handle, state, value, f"set_full_state() of '{name}'"))


def _place_of(parameter: Tensor) -> tuple[Handle, int]:
    place = find(parameter) if isinstance(parameter, Tensor) else None
    if place is None:
        shape = f" of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else ""
        raise ValueError(
            f"zero_ext: this {type(parameter).__name__}{shape} is not a parameter that zero_ext "
            "shards. Pass the Parameter itself, after shard() or the optimizer's constructor; an "
            "engine ends with the module or the optimizer that it belongs to."
        )
    return place


def _is_loose(handle: Handle, i: int) -> bool:
    """Frozen, and not sharded: with stage 3 frozen parameters are."""
    return handle.engine.unit_of(i) < 0 and handle.engine.frozen_unit_of(i) < 0


def _state_of(optimizer: ShardedOptimizer, parameter: Tensor, name: str):
    if not isinstance(optimizer, ShardedOptimizer):
        raise ValueError(
            f"zero_ext: {type(optimizer).__name__} is not an optimizer of zero_ext.optim."
        )
    handle, i = _place_of(parameter)
    if i not in optimizer._sharded_state.indices or handle is not optimizer._handle:
        raise ValueError(
            f"zero_ext: this {type(optimizer).__name__} does not step the parameter of shape "
            f"{tuple(parameter.shape)}."
        )
    state = optimizer.state.get(parameter, {})
    if name not in state:
        names = ", ".join(f"'{key}'" for key in state) or "none (yet)"
        raise ValueError(f"zero_ext: the parameter has no state '{name}'; it has {names}.")
    return state[name]


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


def _agreed(handle: Handle, like: Tensor, value: Tensor, verb: str) -> Tensor:
    """Rank 0's ``value`` in fp32, checked against ``like``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"zero_ext: {verb} takes a tensor, not {type(value).__name__}.")
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if value.shape != like.shape:
        raise ValueError(
            f"zero_ext [rank {handle.groups.rank}]: {verb}: the value has shape "
            f"{tuple(value.shape)}, it must have {tuple(like.shape)}."
        )
    value = value.detach().to("cpu", torch.float32, copy=True).contiguous()
    if handle.groups.world > 1:
        broadcast_(value, handle.groups.parent, 0)
    return value
