"""The pickled form of a ShardTensor for another process, which can save it.

``torch.distributed.checkpoint.async_save`` may save in a process beside each rank. That process has
process groups of its own, so it gets no mesh.
"""

from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor

from zero_ext.tensor.shard_tensor import InBoxes, Place, ShardTensor


class HeldSlice(InBoxes, Tensor):
    """A rank's flat slice of a tensor, 1-D, which is saved as the boxes that it consists of."""

    _places: list[Place]

    def places(self) -> list[Place]:
        return self._places


def _rebuild(local: Tensor, shape: torch.Size, places: list[Place]) -> HeldSlice:
    result = local.as_subclass(HeldSlice)
    result.local, result.whole_shape, result._places = local, shape, places
    return result


def _reduce(shard: ShardTensor):
    local = shard.local
    if not local.is_shared():  # torch would move its memory, which is an engine's
        local = local.clone()
    return _rebuild, (local, shard.shape, shard.places())


ForkingPickler.register(ShardTensor, _reduce)  # other pickles raise, see __reduce_ex__
