"""Whole masters that their owners keep, and how ranks find out which of them are out of date.

Note [Kept masters]
An owner keeps its parameters' masters whole from one step to the next. So a step sends it gradients
alone. What counts are the ranks' own parts of the masters: users, checkpoints and methods may write
to them at any time. Each rank digests its parts when a step has written them, and again before the
next step. The ranks tell each other which digests have changed, one byte per parameter, and send
those masters to their owners again. A digest misses a change once in 2^64.

Where every rank holds everything, nothing is sent, and nothing kept.
"""

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_ext import _C
from zero_ext.optim.owners import Owners, Values, Wave
from zero_ext.ranks.collectives import all_reduce_

_CHUNK = 1 << 20  # elements that a device digests at a time


class KeptMasters:
    """Owner: an optimizer, which passes its parts of the masters as they are now."""

    def __init__(self, owners: Owners):
        self._owners = owners
        self._whole: Values = {}  # flat, of the parameters that this rank owns
        self._digests: dict[Tensor, int] = {}  # of this rank's parts, as the last step wrote them

    @property
    def nbytes(self) -> int:
        return sum(whole.nbytes for whole in self._whole.values())

    def forget(self) -> None:
        """Any rank may do so: the next step sends it all masters again."""
        self._whole.clear()
        self._digests.clear()

    def out_of_date(self, masters: Values) -> set[Tensor]:
        """The parameters whose masters their owners do not have as they are. Collective.

        Args:
            masters: This rank's parts, of the same parameters on every rank.
        """
        group = self._owners.group
        if group is None:
            return {*masters}
        digests = zip(masters, digests_of(masters.values()), strict=True)
        changed = [self._digests.get(p) != digest for p, digest in digests]
        flags = torch.tensor(changed, dtype=torch.uint8, device="cpu")
        all_reduce_(flags, group, dist.ReduceOp.MAX)
        return {p for p, flag in zip(masters, flags.tolist(), strict=True) if flag}

    def whole(self, wave: Wave, masters: Values, out_of_date: set[Tensor]) -> Values:
        """Those of the parameters that this rank owns, flat; an update may write to them.

        Collective. An update that fails must be followed by ``forget``.
        """
        sent = [p for p in wave.parameters if p in out_of_date]
        if sent:
            part = wave if len(sent) == len(wave.parameters) else self._owners.wave(sent)
            (arrived,) = self._owners.to_owners(part, masters, kept=True)()
            if self._owners.group is None:
                return arrived
            self._whole.update(arrived)
        return {part.parameter: self._whole[part.parameter] for part in wave.mine}

    def write(self, parts: Values, masters: Values) -> None:
        """Give the masters this rank's parts of what their owners have by now."""
        for p, part in parts.items():
            masters[p].copy_(part)
        if self._owners.group is not None:
            digests = digests_of(masters[p] for p in parts)
            self._digests.update(zip(parts, digests, strict=True))


def digests_of(parts: Iterable[Tensor]) -> list[int]:
    """Of fp32 tensors, [elements], on one device. One element that changes always changes it."""
    parts = list(parts)
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
