"""Owners: which rank has a parameter whole, and how its pieces get there and back.

Note [Owners]
Each parameter has one owner among the ranks that share it. In a step its owner gets the pieces of
the averaged fp32 gradient and of the master, updates the whole tensors, and sends the new master's
pieces back. So matrices are never cut, and nothing depends on the number of ranks or the stage.

Every rank finds the same owners: the largest parameter first, each for the rank with the fewest
elements so far, in a tie for the one that holds most of it. Where every rank holds everything, all
of them own every parameter.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import find
from zero_ext.ranks.collectives import on_wire

# Elements of the parameters that are whole at their owners at a time, of all ranks together.
_WAVE_NUMEL = 2**26


class Owners:
    """The owners of one optimizer's parameters. Changes in ``assign`` alone."""

    def __init__(self, handle: Handle):
        self._handle = handle
        self._group = None if handle.replicated else handle.groups.mesh.get_group()
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        world = 1 if self._group is None else dist.get_world_size(self._group)
        self.numels = [0] * world  # of the parameters that each rank owns
        self._owner: dict[Tensor, int] = {}
        self._bounds: dict[Tensor, list[int]] = {}  # where each rank's elements begin, and the end

    def assign(self, parameters: Iterable[Tensor]) -> None:
        """Find owners for those that have none. Every rank must pass the same."""
        new = [p for p in dict.fromkeys(parameters) if p not in self._owner]
        for parameter in sorted(new, key=lambda p: -p.numel()):  # a stable sort
            bounds = self._handle.engine.bounds(find(parameter)[1])
            self._bounds[parameter] = [0, bounds[-1]] if self._group is None else bounds
            pieces = [self.piece(parameter, r) for r in range(len(self.numels))]
            held = [stop - start for start, stop in pieces]
            owner = min(range(len(held)), key=lambda r: (self.numels[r], -held[r], r))
            self.numels[owner] += parameter.numel()
            self._owner[parameter] = owner

    def owns(self, parameter: Tensor) -> bool:
        return self._owner.get(parameter) == self.rank

    def piece(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        """Begin and end of the elements that ``rank`` holds."""
        start, stop = self._bounds[parameter][rank : rank + 2]
        return start, stop

    def waves(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """The parameters in their order, so many at a time that their number is bounded."""
        wave: list[Tensor] = []
        numel = 0
        for parameter in parameters:
            if wave and numel + parameter.numel() > _WAVE_NUMEL:
                yield wave
                wave, numel = [], 0
            wave.append(parameter)
            numel += parameter.numel()
        if wave:
            yield wave

    def to_owners(self, wave: Sequence[Tensor], values: dict[Tensor, Tensor]) -> dict:
        """Whole values, flat, of those parameters of ``wave`` that this rank owns. Collective.

        Args:
            values: This rank's piece of each, fp32 of shape [elements held].
        """
        sent = [[values[p] for p in wave if self._owner[p] == r] for r in range(len(self.numels))]
        mine = [p for p in wave if self.owns(p)]
        lengths = [[self._length(p, r) for p in mine] for r in range(len(self.numels))]
        whole = {p: values[p].new_empty(p.numel()) for p in mine}
        for r, pieces in enumerate(self._exchange(sent, lengths, values[wave[0]])):
            for p, piece in zip(mine, pieces, strict=True):
                whole[p][slice(*self.piece(p, r))] = piece
        return whole

    def from_owners(
        self, wave: Sequence[Tensor], whole: dict[Tensor, Tensor], values: dict[Tensor, Tensor]
    ) -> None:
        """Write this rank's pieces of the owners' whole values into ``values``. Collective."""
        ranks = range(len(self.numels))
        sent = [[flat[slice(*self.piece(p, r))] for p, flat in whole.items()] for r in ranks]
        owned = [[p for p in wave if self._owner[p] == r] for r in ranks]
        lengths = [[self._length(p, self.rank) for p in of_rank] for of_rank in owned]
        received = self._exchange(sent, lengths, values[wave[0]])
        for parameters, pieces in zip(owned, received, strict=True):
            for p, piece in zip(parameters, pieces, strict=True):
                values[p].copy_(piece)

    def _length(self, parameter: Tensor, rank: int) -> int:
        start, stop = self.piece(parameter, rank)
        return stop - start

    def _exchange(
        self, sent: list[list[Tensor]], lengths: list[list[int]], like: Tensor
    ) -> list[list[Tensor]]:
        """Send each rank its pieces. Returns the pieces from each rank, of these lengths."""
        if self._group is None:
            return sent
        sizes = [sum(piece.numel() for piece in pieces) for pieces in sent]
        block = torch.cat([like.new_empty(0), *(piece for pieces in sent for piece in pieces)])
        wire = on_wire(block, self._group)
        received = wire.new_empty(sum(map(sum, lengths)))
        of_rank = [sum(numbers) for numbers in lengths]
        dist.all_to_all_single(received, wire, of_rank, sizes, self._group)
        blocks = received.to(like.device).split(of_rank)
        return [list(b.split(numbers)) for b, numbers in zip(blocks, lengths, strict=True)]

    def gather(self, mine: dict[int, dict]) -> dict[int, dict]:
        """What all owners have, of any kind. Collective."""
        if self._group is None:
            return mine
        of_ranks: list = [None] * len(self.numels)
        dist.all_gather_object(of_ranks, mine, self._group)
        return {key: value for each in of_ranks for key, value in each.items()}
