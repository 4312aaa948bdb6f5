"""The newest step with whole copies somewhere, and its values, for any number of ranks."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from zero_ext._warnings import warn
from zero_ext.checkpoint import pickles
from zero_ext.checkpoint.contents import Contents, first_of, warn_of_differing
from zero_ext.checkpoint.rank_values import digest_of
from zero_ext.elastic.copies import Copy, CopyName, Entry, dense_strides
from zero_ext.ranks.agreement import naming, of_all_ranks
from zero_ext.ranks.collectives import wait_for
from zero_ext.ranks.groups import Groups
from zero_ext.state.model_state import ModelState, held_value, plain_name
from zero_ext.tensor.shard_tensor import ShardTensor

_WHAT = "elastic.Run()"


def from_all_ranks(value: Any, groups: Groups) -> list[Any]:
    """Every rank's ``value``, also where one rank is alone. Collective."""
    return of_all_ranks(value, groups, _WHAT) if groups.world > 1 else [value]


class Copies(NamedTuple):
    """The copies of one step, of all ranks that have made it.

    Attributes:
        world: The number of ranks that have made it.
        readable: By the rank that made it, those in this host's memory.
        readers: By the rank that made it, the ranks that can read it now.
    """

    step: int
    world: int
    readable: dict[int, Copy]
    readers: dict[int, list[int]]


def newest_copies(
    folder: Path, model: ModelState, hosts: list[Any], groups: Groups
) -> Copies | None:
    """The copies of the newest step whose copy is whole for every rank on some host. Collective.

    Args:
        hosts: Of each rank. Ranks of one host have the same ``folder``.
    """
    peers = [r for r in range(groups.world) if hosts[r] == hosts[groups.rank]]
    files = sorted(folder.glob("*.copy"))[peers.index(groups.rank) :: len(peers)]
    held = {f"model.{name}": held_value(value) for name, value in model.tensors.items()}
    expected = {key: ([*v.shape], [*dense_strides(v)]) for key, v in held.items()}
    whole: list[tuple[int, CopyName]] = []
    refused: list[str] = []
    for file in files:
        try:
            name, copy = CopyName.of(file), Copy(file, checked=True)
            _check_model(copy, expected)
            whole.append((copy.step, name))
        except (ValueError, OSError) as error:
            refused.append(f"'{file}': {error}")
    found = (whole, refused)
    everyone = from_all_ranks(found, groups)
    if groups.rank == 0 and (told := [each for _, refused in everyone for each in refused]):
        warn(f"{groups.where}copies in memory that are not used: {'; '.join(told)}.")
    where: dict[tuple[int, str, int], dict[CopyName, list[int]]] = {}
    for finder, (found_there, _) in enumerate(everyone):
        readers = [r for r in range(groups.world) if hosts[r] == hosts[finder]]
        for step, name in found_there:
            of_step = step, name.era, name.world
            where.setdefault(of_step, {}).setdefault(name, []).extend(readers)
    complete = [of_step for of_step, readers in where.items() if len(readers) == of_step[2]]
    if not complete:
        return None
    newest = max(complete)
    readable = {
        name.rank: Copy(folder / str(name), checked=False)
        for name, readers in where[newest].items()
        if groups.rank in readers
    }
    readers_of = {name.rank: readers for name, readers in where[newest].items()}
    return Copies(newest[0], newest[2], readable, readers_of)


def _check_model(copy: Copy, expected: dict[str, Any]) -> None:
    of_model = {
        key: (entry.shape, entry.strides)  # lists
        for key, entry in copy.entries.items()
        if key.startswith("model.")
    }
    for key in sorted(expected.keys() | of_model.keys()):
        if expected.get(key) != of_model.get(key):
            raise ValueError(f"it is of another model, '{key.removeprefix('model.')}' differs")


class _Wanted(NamedTuple):
    """Elements that a rank needs. ``rank``: of the copy that has them, None for any one."""

    key: str
    begin: int
    end: int
    rank: int | None


class _Reader:
    """Reads values of ``copies``, also of those that other hosts have.

    Args:
        entries: Of one copy, by key.
        source: The rank whose values this rank gets of what each rank has whole.
        peers: A process group for messages of the host; None where one rank is alone.
    """

    def __init__(
        self,
        copies: Copies,
        entries: dict[str, Entry],
        source: int,
        peers: dist.ProcessGroup | None,
        groups: Groups,
    ):
        self._copies, self._entries, self._source = copies, entries, source
        self._peers, self._groups = peers, groups
        ranks = range(groups.world)
        self._all_here = all(set(readers) >= set(ranks) for readers in copies.readers.values())

    def read(self, targets: dict[str, Any], allow_pickle: bool = False) -> None:
        """Collective."""
        wanted: dict[str, _Wanted] = {}
        flats: dict[str, Tensor] = {}
        for key, target in targets.items():
            if isinstance(target, ShardTensor):
                wanted[key] = _Wanted(key, *target.held_range, None)
                flats[key] = target.local
            else:
                entry, numel = self._entries[key], target.numel()
                wanted[key] = _Wanted(key, 0, numel, self._source if entry.whole else None)
                flats[key] = torch.empty(numel, dtype=getattr(torch, entry.dtype), device="cpu")
        missing = {key: flat.numel() for key, flat in flats.items()}
        done: set[tuple[str, int]] = set()
        for key, begin, values in self._elements(list(wanted.values())):
            if (key, begin) in done:  # several ranks have these elements
                continue
            done.add((key, begin))
            at = begin - wanted[key].begin
            flats[key][at : at + values.numel()].copy_(values)
            missing[key] -= values.numel()
        if short := [key for key, numel in missing.items() if numel]:
            raise RuntimeError(
                f"zero_ext: copies of step {self._copies.step} lack elements of "
                f"{first_of(short)}. Remove them and begin with a checkpoint."
            )
        for key, target in targets.items():
            if not isinstance(target, ShardTensor):
                entry = self._entries[key]
                target.copy_(flats[key].as_strided(entry.shape, entry.strides))

    def _elements(self, wanted: list[_Wanted]) -> Iterator[tuple[str, int, Tensor]]:
        yield from self._readable(wanted, self._copies.readable)
        if not self._all_here:
            yield from self._received(wanted)

    def _readable(
        self, wanted: list[_Wanted], copies: dict[int, Copy]
    ) -> Iterator[tuple[str, int, Tensor]]:
        for rank, copy in copies.items():
            for key, begin, end, source in wanted:
                if source in (None, rank):
                    for first, values in copy.elements(key, begin, end):
                        yield key, first, values

    def _received(self, wanted: list[_Wanted]) -> Iterator[tuple[str, int, Tensor]]:
        """The wanted elements from the memory of other hosts. Collective."""
        groups, readers = self._groups, self._copies.readers
        everyone = of_all_ranks(wanted, groups, _WHAT)
        # The first reader of a copy serves the ranks that cannot read it.
        served = {q: c for q, c in self._copies.readable.items() if readers[q][0] == groups.rank}
        parts: dict[int, list[tuple[str, int, Tensor]]] = {}
        for rank in range(groups.world):
            theirs = {q: copy for q, copy in served.items() if rank not in readers[q]}
            parts[rank] = [*self._readable(everyone[rank], theirs)]
        heads = {
            rank: [(key, first, v.numel(), v.dtype) for key, first, v in own]
            for rank, own in parts.items()
        }
        everyones_heads = of_all_ranks(heads, groups, _WHAT)
        work, received = [], []
        for rank in range(groups.world):
            if own := parts[rank]:
                wire = torch.cat([values.view(torch.uint8) for _, _, values in own])
                work.append((dist.isend(wire, group=self._peers, group_dst=rank), wire))
            if coming := everyones_heads[rank][groups.rank]:
                sizes = [numel * dtype.itemsize for _, _, numel, dtype in coming]
                buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
                work.append((dist.irecv(buffer, group=self._peers, group_src=rank), buffer))
                received.append((coming, buffer.split(sizes)))
        with naming(_WHAT):
            for each, wire in work:
                wait_for(each, wire)
        for coming, pieces in received:
            for (key, first, _, dtype), piece in zip(coming, pieces, strict=True):
                yield key, first, piece.clone().view(dtype)


def contents_of(copies: Copies, peers: dist.ProcessGroup | None, groups: Groups) -> Contents:
    """The values of ``copies`` in the form that ``checkpoint.load`` reads. Collective."""
    same = copies.world == groups.world
    source = groups.rank if same else 0
    serves = {q: c for q, c in copies.readable.items() if copies.readers[q][0] == groups.rank}
    told = {q: (copy.objects, copy.entries, copy.digests()) for q, copy in serves.items()}
    everyone = from_all_ranks(told, groups)
    by_rank = {q: each for found in everyone for q, each in found.items()}
    if not same and groups.rank == 0:
        _warn_of_differing([by_rank[q] for q in range(copies.world)])
    pickled, entries, _ = by_rank[source]
    objects = pickles.unpickled(io.BytesIO(pickled), _WHAT, True, "cpu")
    tensors = {key: _metadata_of(entry) for key, entry in entries.items()}
    names = [key.removeprefix("model.") for key in tensors if key.startswith("model.")]
    names += objects["model"]
    return Contents(
        Path("memory"),
        f"of step {copies.step}",
        tensors,
        {plain_name(name): f"model.{name}" for name in names},
        objects["model"],
        objects["optimizers"],
        objects["extra"],
        _Reader(copies, entries, source, peers, groups).read,
    )


def _metadata_of(entry: Entry) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
    return TensorStorageMetadata(properties, torch.Size(entry.shape), [])


def _warn_of_differing(by_rank: list[tuple[bytes, Any, dict[str, int]]]) -> None:
    found = []
    for pickled, _, digests in by_rank:
        objects = pickles.unpickled(io.BytesIO(pickled), _WHAT, True, "cpu")
        found.append({**digests, "extra": digest_of(objects["extra"])})
    differing = sorted(key for key in found[0] if len({each.get(key) for each in found}) > 1)
    warn_of_differing(f"the copies in memory are of {len(by_rank)} ranks", differing)
