"""Collectives on tensors of any device, dtype and layout."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from zero_ext import _C
from zero_ext.ranks.groups import Groups

_TOGETHER_BYTES = 4 * 2**20


def on_wire(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``tensor``, or a copy on a device that ``group`` has a backend for."""
    kinds = {device.type for device in group._device_types}
    if tensor.device.type in kinds:
        return tensor
    return tensor.cpu() if "cpu" in kinds else tensor.to(next(iter(kinds)))


def wait_for(work: dist.Work, wire: Tensor) -> None:
    """Wait for a collective on ``wire``. Hears Ctrl-C, which torch's own wait does not."""
    if wire.device.type == "cpu":
        _C.wait_interruptibly(work)
    else:
        work.wait()


def all_reduce_(tensor: Tensor, group: dist.ProcessGroup, op=dist.ReduceOp.SUM) -> None:
    """In place."""
    wire = on_wire(tensor, group)
    wait_for(dist.all_reduce(wire, op, group, async_op=True), wire)
    if wire is not tensor:
        tensor.copy_(wire)


def broadcast_(tensor: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    """In place; contiguous."""
    wire = on_wire(tensor, group)
    wait_for(dist.broadcast(wire, group=group, group_src=rank, async_op=True), wire)
    if wire is not tensor:
        tensor.copy_(wire)


def copy_from_rank_0(groups: Groups, tensors: Iterable[Tensor]) -> None:
    """Write rank 0's values into ``tensors`` of every rank. Collective.

    Small neighbours on one device travel in one message.
    """
    together: list[Tensor] = []
    for tensor in tensors if groups.world > 1 else ():
        held = sum(each.nbytes for each in together)
        other_device = bool(together) and together[0].device != tensor.device
        if other_device or held + tensor.nbytes > _TOGETHER_BYTES:
            _copy_together(groups, together)
            together = []
        together.append(tensor)
    _copy_together(groups, together)


def _copy_together(groups: Groups, tensors: list[Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        owns = [_without_repetition(tensor) for tensor in tensors]
        parts = [_bytes_of(own) for own in owns]
        if not parts:
            return
        wire = torch.cat(parts) if len(parts) > 1 else parts[0]
        broadcast_(wire, groups.parent, 0)
    received = wire.split([part.numel() for part in parts])
    for tensor, own, part in zip(tensors, owns, received, strict=True):
        # An inference tensor may be written to in inference mode alone.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            own.copy_(part.clone().view(own.dtype).view(own.shape))


def _without_repetition(tensor: Tensor) -> Tensor:
    one = [slice(0, 1) if expanded else slice(None) for expanded in expansion(tensor)]
    return tensor.detach()[tuple(one)]


def _bytes_of(tensor: Tensor) -> Tensor:
    """A copy: no backend knows every dtype."""
    plain = tensor.resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def expansion(tensor: Tensor) -> list[bool]:
    """For each dimension, whether all its elements are one in memory."""
    return [n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
