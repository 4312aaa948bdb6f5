"""Digests of a checkpoint's files: made as they are written, checked as they are read.

A piece of a file is one entry of the checkpoint (a box of a tensor, or pickled objects). Each block
of `BLOCK` bytes of a piece has a digest of 64 bits. The digests are in a file of their own, which
plain torch does not look at. A checkpoint without that file is read without checks.
"""

import bisect
import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystem

from zero_ext import _C

FILE = ".zero_ext-digests.json"
BLOCK = 1 << 20


class DamagedError(ValueError):
    """Bytes of a checkpoint are not those that were written."""


class Piece(NamedTuple):
    offset: int
    length: int
    digests: tuple[int, ...]  # of its blocks


def of(data: bytes) -> tuple[int, ...]:
    """The digests of the blocks of a piece."""
    view = memoryview(data)
    return tuple(_C.digest(view[begin : begin + BLOCK]) for begin in range(0, len(view), BLOCK))


class DigestingFiles(FileSystem):
    """The files that are written, and their pieces by file and offset."""

    def __init__(self):
        self.pieces: dict[tuple[str, int], Piece] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            stream = _DigestingStream(file)
            yield stream
            stream.end_piece()
        for piece in stream.pieces:
            self.pieces[Path(path).name, piece.offset] = piece


class _DigestingStream:
    """A file that is written from its beginning to its end. A piece ends where someone asks for
    the position."""

    def __init__(self, file: Any):
        self._file = file
        self.flush, self.fileno, self.close = file.flush, file.fileno, file.close
        self.pieces: list[Piece] = []
        self._start = self._position = 0
        self._digests: list[int] = []
        self._pending = bytearray()  # the beginning of a block

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), BLOCK):
            self._write(view[begin : begin + BLOCK])
        return len(view)

    def _write(self, view: memoryview) -> None:
        """At most a block: it is still in the cache when it is written."""
        if not self._pending and len(view) == BLOCK:
            self._digests.append(_C.digest(view))
        else:
            missing = BLOCK - len(self._pending)
            self._pending += view[:missing]
            if len(self._pending) == BLOCK:
                self._digests.append(_C.digest(self._pending))
                self._pending = bytearray(view[missing:])
        self._file.write(view)
        self._position += len(view)

    def tell(self) -> int:
        self.end_piece()
        return self._position

    def end_piece(self) -> None:
        if self._position == self._start:
            return
        if self._pending:
            self._digests.append(_C.digest(self._pending))
        length = self._position - self._start
        self.pieces.append(Piece(self._start, length, tuple(self._digests)))
        self._start, self._digests, self._pending = self._position, [], bytearray()


class CheckedFiles(FileSystem):
    """Files that are read, whose blocks are checked the first time that they are needed."""

    def __init__(self, digests: dict[str, list[Piece]]):
        self._digests = digests
        self.damaged: tuple[str, Piece] | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with open(path, mode, buffering=0) as file:
            name = Path(path).name
            yield CheckedStream(file, self._digests[name], lambda piece: self._report(name, piece))

    def _report(self, name: str, piece: Piece) -> None:
        self.damaged = name, piece
        raise DamagedError(f"zero_ext: bytes of '{name}' are damaged.")


class CheckedStream(io.RawIOBase):
    """Reads at any position. ``report`` is called with a piece that is not as it was written."""

    def __init__(self, file: Any, pieces: list[Piece], report: Any):
        self._file, self._pieces, self._report = file, pieces, report
        self._starts = [piece.offset for piece in pieces]
        self._position = 0
        self._block, self._begin, self._end = memoryview(b""), 0, 0  # the last one that was copied
        self._scratch = memoryview(bytearray(BLOCK))

    def seekable(self) -> bool:
        return True

    readable = seekable

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_SET  # the view of an entry asks for nothing else
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        target, done = memoryview(buffer).cast("B"), 0
        while done < len(target):
            if not self._begin <= self._position < self._end:
                number = bisect.bisect_right(self._starts, self._position) - 1
                piece = self._pieces[number]
                within = self._position - piece.offset
                if within >= piece.length:  # nothing was written there
                    self._report(piece)
                begin = within // BLOCK * BLOCK
                size = min(BLOCK, piece.length - begin)
                if within == begin and size <= len(target) - done:
                    self._read_block(piece, begin, target[done : done + size])
                    self._position += size
                    done += size
                    continue
                self._end = self._begin  # until it is read
                self._block = self._scratch[:size]
                self._read_block(piece, begin, self._block)
                self._begin = piece.offset + begin
                self._end = self._begin + size
            take = min(self._end - self._position, len(target) - done)
            at = self._position - self._begin
            target[done : done + take] = self._block[at : at + take]
            self._position += take
            done += take
        return done

    def _read_block(self, piece: Piece, begin: int, target: memoryview) -> None:
        self._file.seek(piece.offset + begin)
        done = 0
        while done < len(target):
            count = self._file.readinto(target[done:])
            if not count:  # the file is truncated
                self._report(piece)
            done += count
        if _C.digest(target) != piece.digests[begin // BLOCK]:
            self._report(piece)


def write(folder: Path, digests: dict[str, list[Piece]]) -> None:
    """Write the file of digests. Its first line is the digest of the others."""
    text = json.dumps({"block": BLOCK, "files": digests}).encode()
    with open(folder / FILE, "wb") as file:
        file.write(b"%016x\n" % _C.digest(text) + text)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> dict[str, list[Piece]] | None:
    """By file, sorted by offset; None where the checkpoint was written without digests.

    Raises:
        DamagedError: the file of digests is damaged.
    """
    try:
        first, _, text = (folder / FILE).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if first != b"%016x" % _C.digest(text):
        raise DamagedError(
            f"zero_ext: '{folder / FILE}' is damaged: its own digest differs. Load an earlier "
            "checkpoint."
        )
    files = json.loads(text)["files"]
    return {
        name: sorted(Piece(offset, length, tuple(each)) for offset, length, each in pieces)
        for name, pieces in files.items()
    }
