"""Where a checkpoint lies while it is written, replaced and looked for. No rank talks here.

Note [Two runs that save to one path]
A save writes to a folder of its own beside ``path``, `.NAME.zero_ext-incomplete-TOKEN`. When that
is whole, it moves what is at ``path`` to `.NAME.zero_ext-replaced-TOKEN`, renames its folder to
``path``, and removes what it has replaced.
- Every rename is to a name that no other save uses, except to ``path``. A folder can only be
  renamed to ``path`` while nothing is there. If another run was faster, its checkpoint is replaced.
- What was replaced is removed only after a checkpoint was seen at ``path``, and only if it had been
  replaced before. So some whole checkpoint always lies at ``path`` or in a replaced folder.
- A process that dies between the two renames leaves ``path`` empty. ``find`` then returns the
  newest replaced folder.
- A running save holds a lock in its folder. Later saves remove folders whose lock is free.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

_LOCK = ".zero_ext-lock"
METADATA = ".metadata"
_OTHER_PATH = "Choose another path."
_SAVED_PATH = "Pass the path that was given to save()."
_OURS = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp|\.zero_ext-[a-z]+(\.json)?")


class NewFolder:
    """The folder of one save, until it is renamed to ``path``.

    Args:
        token: Of this save alone, the same on all its ranks.
    """

    def __init__(self, path: Path, token: str):
        self.path = path
        self.folder = _beside(path, f"incomplete-{token}")
        self._lock: int | None = None

    def make(self) -> None:
        """Make the folder and hold its lock, after what dead saves left is removed. One rank."""
        remove_leftovers(self.path)
        self.folder.mkdir(parents=True)
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(OSError):  # no locks on this file system: it is never removed
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._lock, b"held")  # an empty lock file is not held yet

    def commit(self) -> None:
        """Rename the folder to ``path``, in place of what is there. One rank.

        The user's own files at ``path`` are moved into the new checkpoint.
        """
        _sync(self.folder)
        while not self._replace():
            pass
        _sync(self.path.parent)
        with contextlib.suppress(FileNotFoundError):  # another run may have replaced it
            os.unlink(self.path / _LOCK)
        self.release()
        remove_leftovers(self.path)

    def _replace(self) -> bool:
        """Whether the folder is at ``path`` now. Another save may come between the two renames."""
        old = None
        if self.path.exists():
            old = _beside(self.path, f"replaced-{secrets.token_hex(4)}")
            try:
                os.rename(self.path, old)
            except FileNotFoundError:
                return False
        try:
            os.rename(self.folder, self.path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            if old is not None and not self.path.exists():
                os.rename(old, self.path)
            raise
        return True

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Give up the lock, as the end of the process does."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_leftovers(path: Path) -> None:
    """Remove what other saves to ``path`` have left, if nobody needs it any more."""
    for folder in _siblings(path, "incomplete"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
    replaced = list(_siblings(path, "replaced"))
    if is_checkpoint(path):  # seen after the list was made: see the note
        for folder in replaced:
            _move_users_files(folder, path)
            shutil.rmtree(folder, ignore_errors=True)


def path_of(path: str | os.PathLike, verb: str = "", model: Any = None) -> Path:
    """``path`` without links.

    Raises:
        TypeError: it is no path, or what ``verb`` was given as its path and its model is swapped.
    """
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if isinstance(name, str):
        return Path(name).resolve()
    if isinstance(path, nn.Module) and verb and not isinstance(model, nn.Module):
        raise TypeError(
            f"zero_ext: {verb}() got a {type(path).__name__} as its path and a "
            f"{type(model).__name__} as its model. The path comes first: {verb}(path, model, "
            "optimizer)."
        )
    raise TypeError(
        f"zero_ext: the path of a checkpoint is {path!r}, a {type(path).__name__}. Pass a str "
        "or a pathlib.Path."
    )


def tagged(directory: str | os.PathLike, tag: str | int | None = None) -> Path:
    """The folder ``tag`` in ``directory``, or the one that its file ``latest`` names. Without both
    ``directory`` is a checkpoint itself."""
    latest = Path(directory) / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    return Path(directory) if tag is None else Path(directory) / str(tag)


def is_checkpoint(path: Path) -> bool:
    return (path / METADATA).is_file()


def numbered(folder: str | os.PathLike) -> list[tuple[int, Path]]:
    """The whole checkpoints in ``folder`` whose names end with a number, in its order."""
    found = Path(folder).iterdir() if Path(folder).is_dir() else ()
    numbers = {path: re.search(r"(\d+)$", path.name) for path in found if path.name[0] != "."}
    return sorted((int(n[1]), path) for path, n in numbers.items() if n and is_checkpoint(path))


def latest(folder: str | os.PathLike) -> Path | None:
    """The checkpoint in ``folder`` whose name ends with the largest number, such as ``step1500``.

    None, if there is no whole one. Not collective: ask on one rank where others may be saving.
    """
    return next((path for _, path in reversed(numbered(folder))), None)


def users_files(path: Path) -> list[Path]:
    """The entries of a folder that no save has written."""
    return [each for each in path.iterdir() if not _OURS.fullmatch(each.name)]


def find(path: Path) -> Path:
    """The folder of the last whole checkpoint that was saved to ``path``.

    Raises:
        ValueError: there is none.
    """
    if is_checkpoint(path):
        return path
    replaced = [each for each in _siblings(path, "replaced") if is_checkpoint(each)]
    if replaced:
        return max(replaced, key=lambda each: (each / METADATA).stat().st_mtime_ns)
    raise ValueError(f"zero_ext: {_why_none(path)}")


def refuse_to_replace(path: Path) -> None:
    """
    Raises:
        ValueError: ``path`` is something else than a checkpoint.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"zero_ext: '{path}' is a file; a checkpoint is a folder. {_OTHER_PATH}")
    if not path.is_dir() or is_checkpoint(path) or not users_files(path):
        return
    inside = _checkpoints_in(path)
    if inside:
        raise ValueError(
            f"zero_ext: '{path}' holds other checkpoints, such as '{inside[-1].name}', which would "
            f"be lost. Save to a folder of its own in it."
        )
    raise ValueError(
        f"zero_ext: '{path}' holds something else than a checkpoint, which would be lost. "
        f"{_OTHER_PATH}"
    )


def _why_none(path: Path) -> str:
    """The error about the file or folder at ``path`` that is no checkpoint, with a remedy."""
    if path.is_file():
        if is_checkpoint(path.parent):
            return f"'{path}' is a file of a checkpoint. Pass its folder '{path.parent}'."
        return (
            f"'{path}' is a file; a checkpoint is a folder. Read the file with the library that "
            "has written it, such as torch.load for torch.save."
        )
    if not path.exists():
        there = next(each for each in path.parents if each.exists())
        return f"there is no checkpoint at '{path}': only '{there}' exists. {_SAVED_PATH}"
    inside = _checkpoints_in(path)
    if inside:
        return (
            f"there is no checkpoint at '{path}': it holds {len(inside)} checkpoints. Pass one of "
            f"them; the newest is '{inside[-1]}'."
        )
    if any(path.glob("*.distcp")):
        return (
            f"there is no whole checkpoint at '{path}': it lacks the file '{METADATA}'. Load an "
            "earlier checkpoint."
        )
    names = sorted(each.name for each in path.iterdir())
    found = f"it holds '{names[0]}' and no '{METADATA}'" if names else "the folder is empty"
    return f"there is no checkpoint at '{path}': {found}. {_SAVED_PATH}"


def _checkpoints_in(path: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last."""
    found = [each for each in path.iterdir() if each.name[0] != "." and is_checkpoint(each)]
    return sorted(found, key=lambda each: (each / METADATA).stat().st_mtime_ns)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.zero_ext-{suffix}")


def _siblings(path: Path, kind: str) -> Iterator[Path]:
    start = _beside(path, kind).name
    if path.parent.is_dir():
        names = sorted(name for name in os.listdir(path.parent) if name.startswith(start))
        yield from (path.with_name(name) for name in names)


def _is_abandoned(folder: Path) -> bool:
    try:
        with open(folder / _LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock.read() != ""
    except OSError:  # a running save holds it, or there is none
        return False


def _move_users_files(old: Path, new: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another save does the same
        for entry in users_files(old):
            if not (new / entry.name).exists():
                os.rename(entry, new / entry.name)


def _sync(folder: Path) -> None:
    """Make renames in ``folder`` durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
