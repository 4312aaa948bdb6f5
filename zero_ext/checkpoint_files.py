"""Writing and reading the files of a checkpoint, with torch.distributed.checkpoint."""

import contextlib
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from zero_ext.groups import Groups, all_or_none
from zero_ext.shard_tensor import ShardTensor, wrap

_VISIBLE_WITHIN_S = 60.0  # file systems of a network tell late what another host has made
_ALONE = "torch.distributed is disabled"  # a warning of dcp


def refuse_to_replace(path: Path) -> None:
    """Raises where ``path`` is something else than a checkpoint."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"zero_ext: '{path}' is a file; a checkpoint is a folder.")
    if path.is_dir() and not (path / ".metadata").exists() and any(path.iterdir()):
        raise ValueError(
            f"zero_ext: '{path}' holds something else than a checkpoint, which would be lost. "
            "Choose another name, or remove it."
        )


def write(path: Path, state: dict[str, Any], groups: Groups) -> None:
    """Write ``state``, and rename it to ``path`` when all of it is there. Collective.

    Raises:
        RuntimeError: some rank could not; what was at ``path`` still is.
    """
    what = f"save() of checkpoint '{path}'"
    incomplete = _beside(path, "incomplete")
    try:
        with all_or_none(groups, what):
            if groups.rank == 0 and incomplete.exists():  # of a process that died
                shutil.rmtree(incomplete)
        with _as_exceptions(groups, what):
            dcp.save(
                state,
                checkpoint_id=incomplete,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=groups.parent,
                no_dist=groups.world == 1,
            )
        with all_or_none(groups, what):
            _check_that_it_is_shared(incomplete)
        with all_or_none(groups, what):
            if groups.rank == 0:
                _replace(path, incomplete)
    except Exception:
        if groups.rank == 0:
            shutil.rmtree(incomplete, ignore_errors=True)
        raise


def _check_that_it_is_shared(incomplete: Path) -> None:
    """Each host would else keep its own part, and only rank 0's would be named."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while not (incomplete / ".metadata").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"zero_ext: what rank 0 has written to '{incomplete.parent}' is not there for this "
                "rank. Save to a folder that all ranks share."
            )
        time.sleep(0.1)
        os.listdir(incomplete.parent)  # which a network's file system then asks for anew


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.zero_ext-{suffix}")


def _replace(path: Path, new: Path) -> None:
    old = _beside(path, "replaced")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def read_metadata(path: Path) -> Metadata:
    if not (path / ".metadata").exists():
        raise ValueError(f"zero_ext: there is no checkpoint at '{path}'.")
    return dcp.FileSystemReader(path).read_metadata()


def read(path: Path, targets: dict[str, Any]) -> None:
    """Into ``targets``, tensors in place; this rank by itself, its parts of sharded ones."""
    if not targets:
        return
    with warnings.catch_warnings(), _as_exceptions(None, f"load() of checkpoint '{path}'"):
        warnings.filterwarnings("ignore", message=_ALONE)
        dcp.load(targets, checkpoint_id=path, no_dist=True)


@contextlib.contextmanager
def _as_exceptions(groups: Groups | None, what: str) -> Iterator[None]:
    """torch's CheckpointException is none, which `except Exception` would let through."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        where = f" [rank {groups.rank}]: {what}: rank {rank}" if groups else f": {what}"
        raise RuntimeError(f"zero_ext{where}: {type(cause).__name__}: {cause}") from error


def copied_to_host(value: Any) -> Any:
    if isinstance(value, ShardTensor):
        return wrap(value.to_local().to("cpu", copy=True), value)
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value


class Writer:
    """Saves over one process group, some of which run while training goes on.

    These have a group of their own: messages of two threads over one would meet.
    """

    def __init__(self):
        self._own_groups: Groups | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future | None = None

    def start(self, path: Path, state: dict[str, Any], groups: Groups) -> Future:
        if self._executor is None:
            self._own_groups = _apart(groups)
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="zero_ext checkpoint")
        if groups.world == 1:  # for good: no thread can change filters for itself
            warnings.filterwarnings("ignore", message=_ALONE)
        self._last = self._executor.submit(_write_meanwhile, path, state, self._own_groups)
        return self._last

    def write(self, path: Path, state: dict[str, Any], groups: Groups) -> None:
        """After all that were started."""
        if self._last is not None:
            self._last.exception()  # which is for whoever has its future
        with warnings.catch_warnings():
            if groups.world == 1:
                warnings.filterwarnings("ignore", message=_ALONE)
            write(path, state, groups)


def _write_meanwhile(path: Path, state: dict[str, Any], groups: Groups) -> None:
    try:
        write(path, state, groups)
    except Exception as error:  # of which nobody may ask the future
        warnings.warn(str(error), stacklevel=2)
        raise


_of_one_rank = Writer()
_writers: WeakKeyDictionary[dist.ProcessGroup, Writer] = WeakKeyDictionary()  # others, by parent


def writer_of(groups: Groups) -> Writer:
    return _of_one_rank if groups.world == 1 else _writers.setdefault(groups.parent, Writer())


def _apart(groups: Groups) -> Groups:
    """The same ranks with a process group that nobody else uses. Collective."""
    if groups.world == 1:
        return groups._replace(parent=None, mesh=None)
    ranks = dist.get_process_group_ranks(groups.parent)
    own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return groups._replace(parent=own, mesh=None)
