"""Collectives on tensors of any device, dtype and layout."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from zero_ext import _C
from zero_ext.ranks.groups import Groups


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
    """Write rank 0's values into ``tensors`` of every rank. Collective."""
    for tensor in tensors if groups.world > 1 else ():
        # An inference tensor may be written to in inference mode alone.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            one = [slice(0, 1) if expanded else slice(None) for expanded in expansion(tensor)]
            own = tensor.detach()[tuple(one)]
            plain = own.resolve_conj().resolve_neg()
            dense = plain.clone(memory_format=torch.contiguous_format)
            # No backend knows every dtype.
            broadcast_(dense.reshape(-1).view(torch.uint8), groups.parent, 0)
            own.copy_(dense)


def expansion(tensor: Tensor) -> list[bool]:
    """Of each dimension, whether all its elements are one in memory."""
    return [n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
