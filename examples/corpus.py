"""Text as bytes: Python's own standard library, or any file or directory, with a held-out split."""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Not everywhere installed, or not text that was written by people.
SKIPPED_DIRECTORIES = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "__pycache__",
}
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    train: Tensor  # [train bytes], uint8
    held_out: Tensor  # [held-out bytes], uint8


def load(path: str | None) -> Corpus:
    """The text of ``path``, a file or a directory with all its files; else the standard library.

    The order is that of the sorted relative names, and the split hashes the name, so that it
    depends on nothing but the text. Of a single file the end is held out.
    """
    root = Path(path or sysconfig.get_path("stdlib"))
    if root.is_file():
        data = root.read_bytes()
        cut = len(data) - len(data) // HELD_OUT_ONE_IN
        return _corpus(str(root), data[:cut], data[cut:])
    names = sorted(
        name
        for file in root.rglob("*.py" if path is None else "*")
        if not SKIPPED_DIRECTORIES.intersection((name := file.relative_to(root)).parts)
        and file.is_file()
    )
    train: list[bytes] = []
    held_out: list[bytes] = []
    for name in names:
        split = held_out if zlib.crc32(name.as_posix().encode()) % HELD_OUT_ONE_IN == 0 else train
        split.append((root / name).read_bytes())
    return _corpus(str(root), b"\n".join(train), b"\n".join(held_out))


def _corpus(source: str, train: bytes, held_out: bytes) -> Corpus:
    if min(len(train), len(held_out)) < 4096:
        raise ValueError(
            f"{source}: {len(train)} bytes to train on and {len(held_out)} held out are too few. "
            "Give --text a larger file, or a directory with more files."
        )
    return Corpus(
        *(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out))
    )


def sample(
    text: Tensor, batch_size: int, sequence: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random windows of ``text``, and the same one byte later, both [batch_size, sequence]."""
    starts = torch.randint(len(text) - sequence - 1, (batch_size,), generator=generator)
    return _windows(text, starts, sequence)


def evenly_spaced(text: Tensor, windows: int, sequence: int) -> tuple[Tensor, Tensor]:
    """As ``sample``, but always the same windows, spread over the whole text."""
    starts = torch.linspace(0, len(text) - sequence - 1, windows, dtype=torch.float64).long()
    return _windows(text, starts, sequence)


def _windows(text: Tensor, starts: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    window = text[starts[:, None] + torch.arange(sequence + 1)].long()
    return window[:, :-1], window[:, 1:]
