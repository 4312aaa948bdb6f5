"""Copies: what a rank holds after a step, in a file in host memory that outlives its process.

Note [Two files for each rank]
A rank writes two files by turns, so that one of them is whole at any time. Ranks are at most one
step apart, so the newest step that all of them have finished is whole on every rank. A file begins
with its digest, which is zero while the file is written:

    magic | digest | step, bytes of index, of values and of objects | index | values | objects

The index says which elements of which values lie where. Objects are pickled.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_ext import _C
from zero_ext.checkpoint.rank_values import digest_of
from zero_ext.tensor.shard_tensor import ShardTensor

_MAGIC = b"zeroext1"
_HEADER = struct.Struct("<8s8x4Q16x")  # the digest is written last, by itself
_DIGEST = struct.Struct("<Q")
_DIGESTED_FROM = len(_MAGIC) + _DIGEST.size
_ALIGNMENT = 64
_PAGE = 4096


class Entry(NamedTuple):
    """Elements ``[first, first + numel)`` of a value, in the order of its memory.

    ``whole``: each rank has all of them, perhaps with other values.
    ``offset``: of its bytes in the file's values.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    whole: bool
    first: int
    numel: int
    offset: int


def _aligned(size: int, to: int = _ALIGNMENT) -> int:
    return -(-size // to) * to


def _flat(key: str, value: Tensor) -> Tensor:
    """This rank's elements of a value, 1-D.

    Raises:
        TypeError: it is of a class of tensors whose memory is not known.
    """
    if isinstance(value, ShardTensor):
        return value.local
    if type(value) not in (Tensor, nn.Parameter):
        raise TypeError(
            f"zero_ext: '{key}' is a {type(value).__name__}, of which no copy can be kept in "
            "memory. Use zero_ext.checkpoint.save."
        )
    value = value.detach()
    dense = torch.empty_like(value)  # without gaps and overlaps
    dense = value if dense.stride() == value.stride() else dense.copy_(value)
    return dense.as_strided((value.numel(),), (1,), dense.storage_offset())


def dense_strides(value: Tensor) -> tuple[int, ...]:
    """The strides of a value's elements in a copy."""
    return value.stride() if isinstance(value, ShardTensor) else torch.empty_like(value).stride()


def _entries_of(values: Mapping[str, Tensor], flats: list[Tensor]) -> list[Entry]:
    entries, offset = [], 0
    for (key, value), flat in zip(values.items(), flats, strict=True):
        whole = not isinstance(value, ShardTensor)
        dtype, first = str(flat.dtype).removeprefix("torch."), 0 if whole else value.held_range[0]
        layout = tuple(value.shape), dense_strides(value)
        entries.append(Entry(key, dtype, *layout, whole, first, flat.numel(), offset))
        offset += _aligned(flat.nbytes)
    return entries


def _entries_in(index: bytes) -> list[Entry]:
    return [Entry(*each) for each in json.loads(index)]


class CopyName(NamedTuple):
    """The meeting of ranks that a file belongs to, its rank there, and the turn."""

    era: str
    rank: int
    world: int
    turn: int

    def __str__(self) -> str:
        return f"{self.era}-{self.rank}of{self.world}-{self.turn}.copy"

    @staticmethod
    def of(file: Path) -> "CopyName":
        """
        Raises:
            ValueError: it is no name of a copy.
        """
        era, ranks, turn = file.stem.split("-")
        rank, world = map(int, ranks.split("of"))
        return CopyName(era, rank, world, int(turn))


class CopyFile:
    """A file that copies are written to, one over the other."""

    def __init__(self, path: Path):
        self._path = path
        self._mapped: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # the same bytes
        # The entries of the last copy. They change when the optimizer or its states do.
        self._values: list[tuple[str, int, torch.dtype]] = []
        self._index, self._targets = b"", []

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def write(self, step: int, values: Mapping[str, Tensor], objects: bytes) -> Tensor:
        """Returns the copy as it lies in memory: uint8 [bytes].

        Raises:
            OSError: there is no memory for it.
            TypeError: see ``_flat``.
        """
        flats = [_flat(key, value) for key, value in values.items()]
        held = [(key, flat.numel(), flat.dtype) for key, flat in zip(values, flats, strict=True)]
        if held != self._values:
            self._values, self._targets = held, []
            self._index = json.dumps(_entries_of(values, flats)).encode()
        begin = _aligned(_HEADER.size + len(self._index))
        end = begin + sum(_aligned(flat.nbytes) for flat in flats)
        memory = self.begin(end + len(objects))
        if not self._targets:
            self._targets = [_values_of(memory[begin:], e) for e in _entries_in(self._index)]
        sizes = step, len(self._index), end - begin, len(objects)
        self._mapped[: _HEADER.size] = _HEADER.pack(_MAGIC, *sizes)
        self._mapped[_HEADER.size : _HEADER.size + len(self._index)] = self._index
        torch._foreach_copy_(self._targets, flats)
        self._mapped[end : end + len(objects)] = objects
        copy = memory[: end + len(objects)]
        self._write_digest(_C.digest(copy[_DIGESTED_FROM:].numpy()))
        return copy

    def begin(self, size: int) -> Tensor:
        """The memory of a copy that is to be written: uint8 [at least size]."""
        if self._memory.numel() < size:
            size = _aligned(size, _PAGE)
            with open(self._path, "a+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full file system kills later writes
                self._mapped = mmap.mmap(file.fileno(), size)
            self._memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
            self._targets = []
        if self._mapped is not None:
            self._write_digest(0)
        return self._memory

    def _write_digest(self, digest: int) -> None:
        self._mapped[len(_MAGIC) : _DIGESTED_FROM] = _DIGEST.pack(digest)


def _values_of(values: Tensor, entry: Entry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    return values[entry.offset : entry.offset + entry.numel * dtype.itemsize].view(dtype)


class Copy:
    """A copy that is read.

    Args:
        checked: Compare the digest.
    Raises:
        ValueError: it is no whole copy.
    """

    def __init__(self, path: Path, checked: bool):
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < _HEADER.size:
                raise ValueError("it was cut off")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        magic, self.step, index, values, objects = _HEADER.unpack_from(mapped)
        [digest] = _DIGEST.unpack_from(mapped, len(_MAGIC))
        begin = _aligned(_HEADER.size + index)
        end = begin + values
        if digest == 0:
            raise ValueError("its process ended while it was written")
        memory = memoryview(mapped)
        damaged = magic != _MAGIC or end + objects > len(mapped)
        if damaged or (checked and _C.digest(memory[_DIGESTED_FROM : end + objects]) != digest):
            raise ValueError("its bytes are not those that were written")
        self.objects = bytes(memory[end : end + objects])
        self._values = torch.frombuffer(mapped, dtype=torch.uint8)[begin:end]
        found = _entries_in(memory[_HEADER.size :][:index].tobytes())
        self.entries = {entry.key: entry for entry in found}

    def elements(self, key: str, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """The copied elements in ``[begin, end)``, 1-D, and the position of the first one."""
        entry = self.entries[key]
        first, last = max(begin, entry.first), min(end, entry.first + entry.numel)
        if first < last:
            yield first, _values_of(self._values, entry)[first - entry.first : last - entry.first]

    def digests(self) -> dict[str, int]:
        """Of the values that each rank has whole, by key."""
        whole = {key: entry for key, entry in self.entries.items() if entry.whole}
        return {key: digest_of(_values_of(self._values, entry)) for key, entry in whole.items()}
