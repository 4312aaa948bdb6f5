"""Keeper: writes a rank's copies, and exchanges them with other hosts."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero_ext._warnings import warn
from zero_ext.elastic.copies import CopyFile, CopyName
from zero_ext.ranks.agreement import naming
from zero_ext.ranks.collectives import wait_for
from zero_ext.ranks.groups import Groups


class Partners(NamedTuple):
    """``buddy``: the rank on the next host that keeps this rank's copies. ``sources``: the ranks
    whose copies this rank keeps."""

    buddy: int | None
    sources: tuple[int, ...]

    @staticmethod
    def of(rank: int, hosts: list[str]) -> "Partners":
        """``hosts``: of each rank."""
        by_host = {host: [r for r, h in enumerate(hosts) if h == host] for host in hosts}
        rows = [*by_host.values()]
        if len(rows) == 1:
            return Partners(None, ())
        buddies = {}
        for row, following in zip(rows, [*rows[1:], rows[0]], strict=True):
            buddies |= {r: following[i % len(following)] for i, r in enumerate(row)}
        return Partners(buddies[rank], tuple(r for r, b in buddies.items() if b == rank))


class Keeper:
    """
    Args:
        folder: This host's.
        era: Names the meeting of these ranks: other meetings write other files.
        partners: See ``Partners``.
        peers: A group for messages of the host; None if there are no partners.
    """

    def __init__(
        self, folder: Path, era: str, groups: Groups, partners: Partners, peers: Any = None
    ):
        self._folder, self._era, self._groups = folder, era, groups
        self._partners, self._peers = partners, peers
        self._own = self._files_of(groups.rank)
        self._others = {rank: self._files_of(rank) for rank in partners.sources}
        # Not those of a later era: a rank that was stopped for long may still be in this one.
        self._earlier = [*folder.glob("*.copy")]
        self._kept = 0
        self._is_full = False

    def _files_of(self, rank: int) -> tuple[CopyFile, ...]:
        names = (CopyName(self._era, rank, self._groups.world, turn) for turn in range(2))
        return tuple(CopyFile(self._folder / str(name)) for name in names)

    @property
    def nbytes(self) -> int:
        files = [*self._own, *(file for each in self._others.values() for file in each)]
        return sum(file.nbytes for file in files)

    def keep(self, step: int, values: dict[str, Tensor], objects: bytes) -> None:
        """Collective where copies go to another host. A full folder is a warning, once."""
        copy = torch.empty(0, dtype=torch.uint8, device="cpu")
        with self._telling_of_full_memory(step):
            copy = self._own[step % 2].write(step, values, objects)
        if self._partners.buddy is not None:
            self._exchange(step, copy)
        self._kept += 1
        if self._kept == 2:  # all ranks have kept one
            for file in self._earlier:
                file.unlink(missing_ok=True)  # the ranks of a host do it together

    @contextlib.contextmanager
    def _telling_of_full_memory(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._is_full:
                warn(
                    f"{self._groups.where}'{self._folder}' has no memory for a copy of step {step}:"
                    f" {error}. Until it has, a run that loses a rank begins with an earlier step. "
                    "Give the folder more memory, or use another one."
                )
            self._is_full = True

    def _exchange(self, step: int, copy: Tensor) -> None:
        """Send this rank's copy, which is empty where there was no memory, and keep the others'."""
        sizes = {rank: torch.empty(1, dtype=torch.int64, device="cpu") for rank in self._others}
        self._send(torch.tensor([copy.numel()], device="cpu"), sizes)
        received = {}
        for rank, files in self._others.items():
            size = int(sizes[rank])
            received[rank] = torch.empty(size, dtype=torch.uint8, device="cpu")
            with self._telling_of_full_memory(step):
                received[rank] = files[step % 2].begin(size)[:size]
        self._send(copy, received)

    def _send(self, own: Tensor, others: dict[int, Tensor]) -> None:
        work = [dist.isend(own, group=self._peers, group_dst=self._partners.buddy)]
        work += [dist.irecv(each, group=self._peers, group_src=r) for r, each in others.items()]
        with naming("elastic.Run.keep()"):
            for each in work:
                wait_for(each, own)
