"""Owners: which rank has a parameter whole, and how its pieces get there and back.

Note [Owners]
Each parameter has one owner among the ranks that share it. In a step its owner gets the pieces of
what the update needs whole, and sends the pieces of the result back. So matrices are never cut, and
nothing depends on the number of ranks or the stage. Every rank finds the same owners (owner_plan.py
says how).

The parameters of a step travel in waves, with one message each way between two ranks. A wave has so
many parameters that those of an owner fill its ``owner_mb``, or a single larger one.

Note [Kept masters]
An owner keeps its parameters' masters whole from one step to the next. So a step sends it gradients
alone. What counts are the ranks' own parts of the masters: users, checkpoints and methods may write
to them at any time. Each rank digests its parts when a step has written them, and again before the
next step. The ranks tell each other which digests have changed, one byte per parameter, and send
those masters to their owners again. A digest misses a change once in 2^64.

Where every rank holds everything, nothing is sent, and nothing kept.

Note [Owners beside other dimensions]
Where parameters are DTensors, an owner has its rank's local part of one, and works on it together
with the owners on the other dimensions of its mesh. So these must have the same owners and waves.
The ranks there hold other pieces: there, owners depend on costs and on whole sizes alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero_ext import _C
from zero_ext.engine.handle import Handle
from zero_ext.ranks import owner_plan
from zero_ext.ranks.collectives import all_reduce_, on_wire, wait_for

OWNER_MB = 256.0

_CHUNK = 1 << 20  # elements that a device digests at a time

Values = dict[int, Tensor]  # by the index of a parameter


class Part(NamedTuple):
    """The elements of parameter i from ``start`` to ``stop``."""

    i: int
    start: int
    stop: int


class Wave(NamedTuple):
    """Parameters that travel at a time.

    Attributes:
        indices: Of all of them.
        mine: Those that this rank owns, as the parts of them that this rank holds.
        away: By owner, this rank's parts of the others.
        near: By rank, the other ranks' parts of those that this rank owns.
        mine_numel: How many elements those have that this rank owns.
    """

    indices: list[int]
    mine: list[Part]
    away: list[list[Part]]
    near: list[list[Part]]
    mine_numel: int


class Owners:
    """The owners of one optimizer's parameters. They change in ``assign`` alone.

    Args:
        element_bytes: What an owner has of each element of its parameters in a wave.
        split_replicas: Where every rank holds everything, each parameter has one owner as well;
            else all ranks own all parameters.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        owner_mb: float,
        element_bytes: int,
        split_replicas: bool = False,
    ):
        self._handle = handle
        self._element_bytes = element_bytes
        self._limit = owner_mb * 2**20 / element_bytes
        self.group: dist.ProcessGroup | None = None  # of ranks that hold parts, or share the work
        if not handle.replicated:
            self.group = handle.groups.mesh.get_group()
        elif split_replicas and handle.groups.world > 1:
            self.group = handle.groups.parent
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        world = 1 if self.group is None else dist.get_world_size(self.group)
        self.loads = [0] * world  # the cost of what each rank owns
        self._owner: dict[int, int] = {}
        self._bounds: dict[int, list[int]] = {}  # where each rank's part begins, and the end
        self._planned: tuple[list[int], list[Wave]] = ([], [])
        self._held = self._peak = self._sent = 0  # bytes

    def assign(self, costs: dict[int, int]) -> None:
        """Find owners for those parameters that have none. Every rank must pass the same.

        Args:
            costs: Of the updates of whole parameters; owners share them evenly.
        """
        new = [i for i in costs if i not in self._owner]
        if new:
            handle = self._handle
            self._bounds |= {i: handle.engine.bounds(i) for i in new}
            anywhere = handle.replicated or handle.across_meshes is not None
            bounds = [[] if anywhere else self._bounds[i] for i in new]
            owners = owner_plan.assign([costs[i] for i in new], bounds, self.loads)
            self._owner.update(zip(new, owners, strict=True))

    def owns(self, i: int) -> bool:
        return self._owner.get(i) == self.rank

    def stats(self) -> dict[str, int]:
        return {"bytes_sent_for_owners": self._sent, "bytes_peak_owners": self._peak}

    # Waves

    def waves(self, indices: list[int]) -> list[Wave]:
        """Every rank must pass the same in the same order."""
        self._held = 0  # also where the last step raised
        if indices != self._planned[0]:
            owners = [self._owner[i] for i in indices]
            sizes = [self._handle.parameters[i].numel() for i in indices]
            numbers = owner_plan.waves(sizes, owners, self._limit)
            waves = [self.wave([indices[k] for k in of_wave]) for of_wave in numbers]
            self._planned = indices, waves
        return self._planned[1]

    def _part(self, i: int, rank: int) -> Part:
        """The elements of parameter i that ``rank`` holds."""
        bounds = self._bounds[i]
        return (
            Part(i, 0, bounds[-1]) if self._handle.replicated else Part(i, *bounds[rank : rank + 2])
        )

    def wave(self, indices: list[int]) -> Wave:
        """One of these parameters, however large it is."""
        owned: list[list[int]] = [[] for _ in self.loads]
        for i in indices:
            owned[self._owner[i]].append(i)
        mine = owned[self.rank]
        near = [[self._part(i, r) for i in mine] for r in range(len(owned))]
        away = [[self._part(i, self.rank) for i in of_rank] for of_rank in owned]
        near[self.rank], away[self.rank] = [], []
        numel = sum([self._bounds[i][-1] for i in mine])
        return Wave(indices, [self._part(i, self.rank) for i in mine], away, near, numel)

    # The way there and back. Each call starts an exchange; what it returns waits for the end.

    def to_owners(
        self, wave: Wave, *values: Values, kept: bool = False
    ) -> Callable[[], tuple[Values, ...]]:
        """Whole values, flat, of those parameters of ``wave`` that this rank owns. Collective.

        They count as held until ``from_owners``, unless they are ``kept`` by the caller.

        Args:
            values: This rank's parts, of shape [elements held] and one dtype.
        """
        like = values[0][wave.indices[0]]
        near = [] if self._handle.replicated else wave.near
        away = [] if self._handle.replicated else wave.away
        sent = [[each[i] for each in values for i, *_ in of] for of in away]
        arrive = self._exchange(like, sent, [_numel(of) * len(values) for of in near])

        def finish() -> tuple[Values, ...]:
            whole: tuple[Values, ...] = tuple([{} for _ in values])
            for each, own in zip(whole, values, strict=True):
                for i, start, stop in wave.mine:
                    each[i] = like.new_empty(self._bounds[i][-1])
                    each[i][start:stop].copy_(own[i])
            parts = [each[i][start:stop] for of in near for each in whole for i, start, stop in of]
            pieces = arrive().split([part.numel() for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece)
            if not kept:
                self._count(self._element_bytes * wave.mine_numel)
            return whole

        return finish

    def from_owners(
        self, wave: Wave, whole: Values, like: Tensor, *, kept: bool = False
    ) -> Callable[[], Values]:
        """This rank's parts of the owners' whole values. Collective.

        Args:
            like: Of their dtype and device.
            kept: As of ``to_owners``.
        """
        sent = [[whole[i][start:stop] for i, start, stop in of] for of in wave.near]
        arrive = self._exchange(like, sent, [_numel(of) for of in wave.away])

        def finish() -> Values:
            away = [part for of in wave.away for part in of]
            pieces = arrive().split([stop - start for _, start, stop in away])
            parts = {i: piece for (i, *_), piece in zip(away, pieces, strict=True)}
            parts |= {i: whole[i][start:stop] for i, start, stop in wave.mine}
            if not kept:
                self._count(-self._element_bytes * wave.mine_numel)
            return parts

        return finish

    def _exchange(
        self, like: Tensor, sent: list[list[Tensor]], numels: list[int]
    ) -> Callable[[], Tensor]:
        """Send each rank its tensors. What is returned has so many elements of each, flat."""
        if self.group is None or not numels:
            return lambda: like.new_empty(0)
        block = torch.cat([like.new_empty(0), *(piece for of in sent for piece in of)])
        wire = on_wire(block, self.group)
        received = wire.new_empty(sum(numels))
        size = block.element_size()
        work = dist.all_to_all_single(
            received.view(torch.uint8),  # no backend knows every dtype
            wire.view(torch.uint8),
            [size * numel for numel in numels],
            [size * sum([piece.numel() for piece in of]) for of in sent],
            self.group,
            async_op=True,
        )
        self._sent += block.nbytes
        self._count(wire.nbytes + received.nbytes)

        def arrive() -> Tensor:
            wait_for(work, received)
            self._count(-wire.nbytes - received.nbytes)
            return received.to(like.device)

        return arrive

    def _count(self, nbytes: int) -> None:
        self._held += nbytes
        self._peak = max(self._peak, self._held)

    def gather(self, mine: dict[int, dict]) -> dict[int, dict]:
        """The entries of all owners: values of any kind. Collective."""
        if self.group is None:
            return mine
        of_ranks: list = [None] * len(self.loads)
        dist.all_gather_object(of_ranks, mine, self.group)
        return {key: value for each in of_ranks for key, value in each.items()}


def _numel(parts: Sequence[Part]) -> int:
    return sum([stop - start for _, start, stop in parts])


class KeptMasters:
    """Owner: an optimizer, which passes its parts of the masters as they are now."""

    def __init__(self, owners: Owners):
        self._owners = owners
        self._whole: Values = {}  # flat, of the parameters that this rank owns
        self._digests: dict[int, int] = {}  # of this rank's parts, as the last step wrote them

    @property
    def nbytes(self) -> int:
        return sum([whole.nbytes for whole in self._whole.values()])

    def forget(self) -> None:
        """Any rank may do so: the next step sends it all masters again."""
        self._whole.clear()
        self._digests.clear()

    def out_of_date(self, masters: Values) -> set[int]:
        """The parameters whose masters their owners do not have as they are. Collective.

        Args:
            masters: This rank's parts, of the same parameters on every rank.
        """
        group = self._owners.group
        if group is None:
            return {*masters}
        digests = zip(masters, digests_of([*masters.values()]), strict=True)
        changed = [self._digests.get(i) != digest for i, digest in digests]
        flags = torch.tensor(changed, dtype=torch.uint8, device="cpu")
        all_reduce_(flags, group, dist.ReduceOp.MAX)
        return {i for i, flag in zip(masters, flags.tolist(), strict=True) if flag}

    def whole(self, wave: Wave, masters: Values, out_of_date: set[int]) -> Values:
        """The masters of the parameters that this rank owns, flat. An update may write to them.

        Collective. An update that fails must be followed by ``forget``.
        """
        if sent := [i for i in wave.indices if i in out_of_date]:
            part = wave if len(sent) == len(wave.indices) else self._owners.wave(sent)
            (arrived,) = self._owners.to_owners(part, masters, kept=True)()
            if self._owners.group is None:
                return arrived
            self._whole.update(arrived)
        return {i: self._whole[i] for i, *_ in wave.mine}

    def write(self, parts: Values, masters: Values) -> None:
        """Give the masters this rank's parts of what their owners have by now."""
        for i, part in parts.items():
            masters[i].copy_(part)
        if self._owners.group is not None:
            digests = digests_of([masters[i] for i in parts])
            self._digests.update(zip(parts, digests, strict=True))


def digests_of(parts: Sequence[Tensor]) -> list[int]:
    """Digests of fp32 tensors, [elements], on one device. One changed element changes a digest."""
    if not parts or parts[0].device.type == "cpu":
        return [_C.digest(part.numpy()) for part in parts]
    return torch.stack([_digest_on_device(part) for part in parts]).tolist()


def _digest_on_device(values: Tensor) -> Tensor:
    """The sum of words times odd random numbers modulo 2^64; sums of chunks are words again."""
    factors = _factors(values.device)
    words: Sequence[Tensor] = values.view(torch.int32).split(_CHUNK)
    while True:
        sums = torch.stack([(part * factors[: len(part)]).sum() for part in words])
        if len(sums) == 1:
            return sums[0]
        words = sums.split(_CHUNK)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bounds = torch.iinfo(torch.int64)
    factors = torch.randint(bounds.min, bounds.max, (_CHUNK,), generator=generator, device="cpu")
    return (factors | 1).to(device)
