"""Whole values of a sharded model: parameters, gradients and optimizer states, read and written.

All functions are collective: every rank of the model must call them, in the same order. Every rank
gets the whole value. Only the value itself is gathered, also where stage 3 has released parameters.

The value of rank 0 is written on every rank. Other ranks may pass None; what else they pass is
checked and not used. Exception: where rank 0 passes a ``ShardTensor`` or a ``DTensor``, all ranks
must pass theirs.
"""

import contextlib
from collections.abc import Iterator
from numbers import Number

import torch
from torch import Tensor, nn

from zero_ext import _C, _torch
from zero_ext.engine.checks import check_module, is_ignored, stays_whole
from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import RegistryEntry, find
from zero_ext.optim.sharded import Sharded
from zero_ext.optim.whole import Whole
from zero_ext.ranks.agreement import all_or_none, calling, naming
from zero_ext.ranks.collectives import broadcast_
from zero_ext.ranks.groups import Groups
from zero_ext.state.model_state import entry_in_unit, handles_of, whole
from zero_ext.tensor.meshes import copy_whole, part_of
from zero_ext.tensor.shard_tensor import ShardTensor

_IS_SHARDED = "is_sharded"  # what rank 0 tells the others of a value that is to be written


@calling("full_tensor()")
@torch.no_grad()
def full_tensor(parameter: Tensor) -> Tensor:
    """The fp32 master of ``parameter``, whole. Collective.

    The next step starts from it. Values that were written to the parameter since the last step are
    in it, also those that ``summon_full_params(writeback=False)`` will forget.

    Returns:
        A new fp32 tensor of the parameter's shape on every rank, whatever the parameter's dtype.
        A frozen parameter has no master; its values are converted. Parameters that stay whole
        (quantised weights, float64), ``ignored_params`` and tensors that are no Parameters, such as
        buffers, are copied, in their own dtype. A ShardTensor is gathered in its own dtype.
    Raises:
        ValueError: this library does not know the parameter.
        RuntimeError: inside a backward, or ``offload_states`` has moved parameters or masters.
    """
    if isinstance(parameter, ShardTensor):  # of a state_dict()
        return parameter.full_tensor()
    if type(parameter) is Tensor or _is_whole(parameter):
        return whole(parameter.detach()).clone()
    handle, i = entry_of(parameter)
    if entry_in_unit(parameter) is None:
        return whole(parameter.detach()).float().clone()
    return _copy_of_whole(handle.as_parameter(handle.engine.current_master(i), i, parameter))


@calling("set_full_param()")
@torch.no_grad()
def set_full_param(parameter: Tensor, value: Tensor | None) -> None:
    """Give ``parameter`` and its fp32 master new values, on every rank. Collective.

    The master gets all bits of ``value``, the parameter its rounding; optimizer states stay. With
    stage 3 the call waits until no rank gathers the old value any more.

    Args:
        value: Of the parameter's shape, any dtype; rank 0's is used, others may pass None.
    Raises:
        ValueError, TypeError: another shape, no tensor, or a parameter that this library does not
            shard. Nothing is changed then.
        RuntimeError: another rank's value was rejected; inside a backward or
            ``summon_full_params(writeback=False)``; or ``offload_states`` has moved parameters or
            masters.
    """
    handle, i = entry_of(parameter)
    verb = "set_full_param()"
    with all_or_none(handle.groups, verb) as found:
        handle.refuse_forgotten_writes(verb)
        value = _checked(value, parameter, found, handle.groups, verb)
    value = _of_rank_0(value, parameter, found, handle.groups, verb)
    if entry_in_unit(parameter) is None:
        copy_whole(parameter, value)
    else:
        handle.engine.write_parameter(i, part_of(parameter, value))


@calling("full_grad()")
@torch.no_grad()
def full_grad(parameter: Tensor) -> Tensor | None:
    """The reduced gradient of ``parameter``, whole, in fp32. Collective.

    None where ``parameter.grad`` is None: no rank's loss reached the parameter, the gradients were
    zeroed, or the last backward ran in ``no_sync()`` and nothing is reduced yet.

    Raises:
        ValueError: this library does not shard the parameter.
    """
    entry_of(parameter)
    gradient = parameter.grad
    return None if gradient is None else _copy_of_whole(gradient).float()


@calling("set_full_grad()")
@torch.no_grad()
def set_full_grad(parameter: Tensor, value: Tensor | None) -> None:
    """Give ``parameter`` a new reduced gradient, or none, on every rank. Collective.

    Args:
        value: Of the parameter's shape, any dtype; rank 0's is used. It replaces micro-batches that
            were added up in ``no_sync()``. None on rank 0: no gradient on any rank, the step
            leaves the parameter alone.
    Raises:
        ValueError, TypeError: another shape, no tensor, or a parameter that this library does not
            shard or that is frozen. Nothing is changed then.
        RuntimeError: another rank's value was rejected. Nothing is changed then.
    """
    handle, i = entry_of(parameter)
    verb = "set_full_grad()"
    with all_or_none(handle.groups, verb) as found:
        if handle.engine.unit_of(i) < 0:
            raise ValueError(f"zero_ext: {verb}: the parameter is frozen; it has no gradient.")
        if value is not None:
            value = _checked(value, parameter, found, handle.groups, verb)
    if _IS_SHARDED not in found:  # rank 0 has none
        handle.engine.zero_grad([i], _C.ZeroGrad.to_none)
    else:
        value = _of_rank_0(value, parameter, found, handle.groups, verb)
        handle.engine.write_gradient(i, part_of(parameter, value))


@contextlib.contextmanager
def local_gradients(module: nn.Module) -> Iterator[None]:
    """Inside, ``.grad`` holds this rank's own gradients, as in plain PyTorch. The end reduces them.
    Collective at its end.

    For code that writes gradients by hand, such as zero-bubble schedules of
    torch.distributed.pipelining::

        with zero_ext.local_gradients(model):
            schedule.step(inputs, target=targets)
        optimizer.step()

    Whole gradients are in memory inside, and autograd adds them in the parameters' dtype. The end
    averages them over the ranks, as one backward does, and adds them to those that were reduced
    before. Where an error leaves it, they are forgotten.

    Args:
        module: Sharded, or of sharded parameters.
    Raises:
        RuntimeError: inside a backward or another ``local_gradients()``; ``step()`` inside it.
    """
    check_module(module, "local_gradients()")
    taken: list[tuple[Handle, dict[int, Tensor]]] = []
    with contextlib.ExitStack() as stack:
        for handle in handles_of(module):
            handle.engine.keep_local_gradients()
            stack.callback(lambda of: taken.append((of, of.engine.take_local_gradients())), handle)
        yield
    for handle, gradients in taken:
        if gradients:
            parameters = [handle.parameters[i] for i in gradients]
            with _torch.hooks_are_off(parameters):  # they have seen these gradients inside
                torch.autograd.backward(parameters, [*gradients.values()])


@calling("full_state()")
@torch.no_grad()
def full_state(optimizer: Sharded, parameter: Tensor, name: str) -> Tensor:
    """A value of the optimizer's state, such as ``"exp_avg"``, whole. Collective.

    Returns:
        A new tensor on every rank: fp32 and of the parameter's shape, or 0-dim as ``"step"`` is.
    Raises:
        ValueError: the optimizer does not step the parameter, or has no state of that name.
    """
    value = state_of(optimizer, parameter, name)
    return _copy_of_whole(value) if isinstance(value, Tensor) else torch.tensor(value)


@calling("set_full_state()")
@torch.no_grad()
def set_full_state(optimizer: Sharded, parameter: Tensor, name: str, value) -> None:
    """Give a value of the optimizer's state new contents, on every rank. Collective.

    Args:
        value: A tensor of the state's shape, or a number; rank 0's is used, others may pass None.
    Raises:
        ValueError, TypeError: another shape, neither tensor nor number, a parameter that the
            optimizer does not step, a name that its state does not have, or a state that is not a
            tensor. Nothing is changed then.
        RuntimeError: another rank's arguments were rejected. Nothing is changed then.
    """
    groups = entry_of(parameter).handle.groups
    verb = f"set_full_state() of '{name}'"
    with all_or_none(groups, verb) as found:
        state = state_of(optimizer, parameter, name)
        if not isinstance(state, Tensor):
            raise ValueError(
                f"zero_ext: state '{name}' is a {type(state).__name__}, not a tensor: set it with "
                "load_state_dict()."
            )
        if isinstance(value, Number):
            value = torch.full(state.shape, value, dtype=torch.float32)
        value = _checked(value, state, found, groups, verb)
    copy_whole(state, _of_rank_0(value, state, found, groups, verb))


def _is_whole(parameter) -> bool:
    """Whether a sharded module may hold it beside what it shards."""
    if not isinstance(parameter, nn.Parameter):
        return False
    return is_ignored(parameter) or (find(parameter) is None and stays_whole(parameter))


def entry_of(parameter: Tensor) -> RegistryEntry:
    entry = find(parameter) if isinstance(parameter, Tensor) else None
    if entry is None:
        shape = f" of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else ""
        if _is_whole(parameter):
            raise ValueError(
                f"zero_ext: this {type(parameter).__name__}{shape} is not sharded: it is frozen in "
                "another dtype, or one of ignored_params. Use the parameter and its .grad directly."
            )
        raise ValueError(
            f"zero_ext: this {type(parameter).__name__}{shape} is not a parameter that zero_ext "
            "shards. Pass the Parameter itself, after shard() or the optimizer's constructor; an "
            "engine ends with the module or the optimizer that it belongs to."
        )
    return entry


def state_of(optimizer: Sharded, parameter: Tensor, name: str):
    if not isinstance(optimizer, Sharded):
        raise ValueError(
            f"zero_ext: {type(optimizer).__name__} is not an optimizer of zero_ext.optim."
        )
    core = optimizer.zero_core
    if isinstance(core.states, Whole):
        raise ValueError(
            "zero_ext: the states of this optimizer lie whole at their parameters' owners. Read "
            "them in state_dict(), which is collective, and write them with load_state_dict()."
        )
    handle, i = entry_of(parameter)
    if handle is not core.handle or core.state is None or i not in core.indices:
        raise ValueError(
            f"zero_ext: this {type(optimizer).__name__} does not step the parameter of shape "
            f"{tuple(parameter.shape)}."
        )
    state = optimizer.state.get(parameter, {})
    if name not in list(state):  # which need not be hashable
        names = ", ".join(f"'{key}'" for key in state) or "none (yet)"
        raise ValueError(f"zero_ext: the parameter has no state '{name}'; it has {names}.")
    return state[name]


def _copy_of_whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


def _checked(value, like: Tensor, found: dict, groups: Groups, verb: str) -> Tensor | None:
    """This rank's argument of ``_of_rank_0``. In ``found`` rank 0 says if its value is sharded."""
    where = f"{groups.where}{verb}"
    if value is not None or groups.rank == 0:
        if not isinstance(value, Tensor):
            raise TypeError(f"{where} takes a tensor, not {type(value).__name__}.")
        if value.shape != like.shape:
            raise ValueError(
                f"{where}: the value has shape {tuple(value.shape)}, it must have "
                f"{tuple(like.shape)}."
            )
    if groups.rank > 0:
        return value
    found[_IS_SHARDED] = hasattr(value, "full_tensor")
    return value if found[_IS_SHARDED] else _on_host(value)


def _of_rank_0(
    value: Tensor | None, like: Tensor, found: dict, groups: Groups, verb: str
) -> Tensor:
    """Rank 0's value in fp32, on every rank, after all have passed their checks. Collective."""
    if found[_IS_SHARDED]:
        with all_or_none(groups, verb):
            if not hasattr(value, "full_tensor"):
                raise TypeError(
                    f"{groups.where}{verb}: the value is sharded on rank 0, and here a "
                    f"{type(value).__name__}. Pass the sharded one on every rank, or rank 0's "
                    "full_tensor()."
                )
        value = _on_host(value.full_tensor())
    elif groups.rank > 0:
        value = torch.empty(like.shape, dtype=torch.float32, device="cpu")
    if groups.world > 1:
        with naming("rank 0's value"):
            broadcast_(value, groups.parent, 0)
    return value


def _on_host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float32, copy=True).contiguous()
