"""The pickled form of a ShardTensor for another process, which can save it.

``torch.distributed.checkpoint.async_save`` may save in a process beside each rank. That process has
process groups of its own, so it gets no mesh.
"""

from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor

from zero_ext.tensor.shard_tensor import ShardTensor


class _Slice:
    """The attributes that ShardTensor's methods for torch.distributed.checkpoint read."""

    def __init__(
        self,
        local: Tensor,
        shape: torch.Size,
        stride: tuple[int, ...],
        held_range: tuple[int, int],
        part: tuple[torch.Size, tuple[int, ...], tuple[int, ...]],
    ):
        self._local_tensor, self.shape, self._stride = local, shape, stride
        self.held_range = held_range
        self.part_shape, self.part_stride, self.part_offset = part

    def dim(self) -> int:
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self._stride

    create_write_items = ShardTensor.__create_write_items__
    __create_chunk_list__ = ShardTensor.__create_chunk_list__
    get_tensor_shard = ShardTensor.__get_tensor_shard__
    _boxes = ShardTensor._boxes


class HeldSlice(Tensor):
    """A rank's flat slice of a tensor, 1-D, which is saved as the boxes that it consists of."""

    _slice: _Slice

    def __create_write_items__(self, fqn: str, object: Tensor):
        return self._slice.create_write_items(fqn, object)

    def __create_chunk_list__(self):
        return self._slice.__create_chunk_list__()

    def __get_tensor_shard__(self, index):
        return self._slice.get_tensor_shard(index)


def _rebuild(local: Tensor, *rest) -> HeldSlice:
    result = local.as_subclass(HeldSlice)
    result._slice = _Slice(local, *rest)
    return result


def _reduce(shard: ShardTensor):
    local = shard.local
    if not local.is_shared():  # torch would move its memory, which is an engine's
        local = local.clone()
    part = shard.part_shape, shard.part_stride, shard.part_offset
    return _rebuild, (local, shard.shape, shard.stride(), shard.held_range, part)


ForkingPickler.register(ShardTensor, _reduce)  # other pickles raise, see __reduce_ex__
