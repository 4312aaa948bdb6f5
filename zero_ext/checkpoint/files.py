"""Writing and reading the files of a checkpoint, with torch.distributed.checkpoint."""

import contextlib
import os
import re
import shutil
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from zero_ext.ranks.agreement import all_or_none, of_all_ranks
from zero_ext.ranks.comm_groups import timeout_of
from zero_ext.ranks.groups import Groups
from zero_ext.tensor.shard_tensor import ShardTensor, wrap

_VISIBLE_WITHIN_S = 60.0  # file systems of a network tell late what another host has made
_OURS = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp")
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
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        with all_or_none(groups, what):
            if groups.rank == 0 and incomplete.exists():  # of a process that died
                shutil.rmtree(incomplete)
        with _as_exceptions(groups, what):
            dcp.save(
                state,
                checkpoint_id=incomplete,
                planner=planner,
                process_group=groups.parent,
                no_dist=groups.world == 1,
            )
        with all_or_none(groups, what):
            _check_that_it_is_shared(incomplete, groups)
        with all_or_none(groups, what):
            if groups.rank == 0:
                _replace(path, incomplete)
    except Exception:  # on all ranks, each of which may have a folder of its own
        shutil.rmtree(incomplete, ignore_errors=True)
        vars(planner).clear()  # its tensors, which the error would keep
        raise


def _check_that_it_is_shared(incomplete: Path, groups: Groups) -> None:
    """Each host would else keep its own part, and only rank 0's would be named."""
    patience_s = _VISIBLE_WITHIN_S
    if groups.world > 1:  # the others wait meanwhile
        patience_s = min(patience_s, timeout_of(groups).total_seconds() / 2)
    deadline = time.monotonic() + patience_s
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
    """What the user keeps beside a checkpoint's files goes on into the new one."""
    old = _beside(path, "replaced")
    _rescue(old, new)  # of a process that died
    if path.exists():
        path.rename(old)
    new.rename(path)
    _rescue(old, path)


def _rescue(old: Path, new: Path) -> None:
    """Remove ``old``, but for what is not a checkpoint's, which is moved to ``new``."""
    if not old.exists():
        return
    for entry in old.iterdir():
        if not _OURS.fullmatch(entry.name) and not (new / entry.name).exists():
            entry.rename(new / entry.name)
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
        where = "zero_ext: "
        if groups is not None:
            what, where = f"{what}: rank {groups.global_ranks[rank]}", groups.where
        raise RuntimeError(f"{where}{what}: {type(cause).__name__}: {cause}") from error


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

    def wait(self) -> None:
        """For all that were started."""
        if self._last is not None:
            self._last.exception()  # which is for whoever has its future

    def write(self, path: Path, state: dict[str, Any], groups: Groups) -> None:
        """After all that were started."""
        self.wait()
        with warnings.catch_warnings():
            if groups.world == 1:
                warnings.filterwarnings("ignore", message=_ALONE)
            write(path, state, groups)


def _write_meanwhile(path: Path, state: dict[str, Any], groups: Groups) -> None:
    try:
        write(path, state, groups)
    except Exception as error:  # of which nobody may ask the future
        warnings.warn(str(error), stacklevel=2)
        _forget_locals(error)
        raise
    finally:
        state.clear()


def _forget_locals(error: BaseException) -> None:
    """Of what has ended with ``error`` and its causes: they hold copies of all that was to be
    written, and a future holds the error."""
    errors: list[BaseException | None] = [error]
    for each in errors:
        if each is None:
            continue
        traceback.clear_frames(each.__traceback__)
        causes = [each.__cause__, each.__context__]
        if isinstance(each, CheckpointException):
            causes += [cause for cause, _ in each.failures.values()]
        errors += [cause for cause in causes if all(cause is not known for known in errors)]


_of_one_rank = Writer()
_writers: WeakKeyDictionary[dist.ProcessGroup, Writer] = WeakKeyDictionary()  # others, by parent


def writer_of(groups: Groups) -> Writer:
    return _of_one_rank if groups.world == 1 else _writers.setdefault(groups.parent, Writer())


def _apart(groups: Groups) -> Groups:
    """The same ranks with a process group that nobody else uses. Collective."""
    if groups.world == 1:
        return groups._replace(parent=None, mesh=None)
    ranks = dist.get_process_group_ranks(groups.parent)
    # A group of some ranks, which the others do not make, is called after these and the number of
    # groups that each is in, and may have the name of one whose addresses the store still holds:
    # only where not all ranks are here.
    some = len(ranks) < dist.get_world_size()
    if some:
        _be_in_equally_many_groups(groups)
    own = dist.new_group(ranks, timeout_of(groups), "gloo", use_local_synchronization=some)
    return groups._replace(parent=own, mesh=None)


def _be_in_equally_many_groups(groups: Groups) -> None:
    count = len(distributed_c10d._world.pg_names)
    most = max(of_all_ranks(count, groups, "save(async_=True)"))
    for _ in range(count, most):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
