"""Rank0Buffers: ``shard(broadcast_buffers=True)``."""

import torch
from torch import nn

from zero_ext.ranks.agreement import naming
from zero_ext.ranks.collectives import copy_from_rank_0
from zero_ext.ranks.groups import Groups


class Rank0Buffers:
    """Gives every rank rank 0's buffers before a forward, in the forwards in which DDP does so.

    Those are the first forward, and each that follows a forward that was recorded for a backward
    outside of ``no_sync()``.
    """

    def __init__(self, groups: Groups):
        self._groups = groups
        self._due = True
        self.no_syncs = 0  # contexts that are open

    def before_forward(self, module: nn.Module) -> None:
        if self._due:
            with naming("a forward with broadcast_buffers=True"):
                # Listed anew each time: a forward may put another tensor in a buffer's place.
                copy_from_rank_0(self._groups, module.buffers())

    def after_forward(self) -> None:
        self._due = torch.is_grad_enabled() and self.no_syncs == 0
