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

_VISIBLE_WITHIN_S = 60.0  # a network file system shows late what another host has made
_OURS = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp")
_ALONE = "torch.distributed is disabled"  # a warning of dcp


def refuse_to_replace(path: Path) -> None:
    """Raises where ``path`` is something else than a checkpoint."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"zero_ext: '{path}' is a file; a checkpoint is a folder.")
    if path.is_dir() and not (path / ".metadata").exists() and any(path.iterdir()):
        raise ValueError(
            f"zero_ext: '{path}' holds something else than a checkpoint, which would be lost. "
            "Choose another path."
        )


def write(path: Path, state: dict[str, Any], groups: Groups) -> None:
    """Write ``state`` beside ``path``, and rename it to ``path`` when it is whole. Collective.

    Raises:
        RuntimeError: some rank could not write. What was at ``path`` is unchanged.
    """
    what = f"save() of checkpoint '{path}'"
    incomplete = _beside(path, "incomplete")
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        with all_or_none(groups, what):
            if groups.rank == 0 and incomplete.exists():  # a process died
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
    except Exception:  # it is raised on all ranks, each of which may have a folder of its own
        shutil.rmtree(incomplete, ignore_errors=True)
        vars(planner).clear()  # its tensors, which the error would keep
        raise


def _check_that_it_is_shared(incomplete: Path, groups: Groups) -> None:
    """Raise if ranks write to different folders, of which only rank 0's would be renamed."""
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
        os.listdir(incomplete.parent)  # makes a network file system ask its server again


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.zero_ext-{suffix}")


def _replace(path: Path, new: Path) -> None:
    """Rename ``new`` to ``path``. The user's own files in the old checkpoint are moved there."""
    old = _beside(path, "replaced")
    _rescue(old, new)  # if a process died here
    if path.exists():
        path.rename(old)
    new.rename(path)
    _rescue(old, path)


def _rescue(old: Path, new: Path) -> None:
    """Remove ``old``, and move to ``new`` what is no file of a checkpoint."""
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
    """Read the values of ``targets``, tensors in place. Not collective.

    Of sharded tensors this rank reads its parts.
    """
    if not targets:
        return
    with warnings.catch_warnings(), _as_exceptions(None, f"load() of checkpoint '{path}'"):
        warnings.filterwarnings("ignore", message=_ALONE)
        dcp.load(targets, checkpoint_id=path, no_dist=True)


@contextlib.contextmanager
def _as_exceptions(groups: Groups | None, what: str) -> Iterator[None]:
    """Raise torch's CheckpointException, which `except Exception` does not catch, as another."""
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

    Saves that run meanwhile have a process group of their own: the messages of two threads over one
    group would mix.
    """

    def __init__(self):
        self._own_groups: Groups | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future | None = None

    def start(self, path: Path, state: dict[str, Any], groups: Groups) -> Future:
        if self._executor is None:
            self._own_groups = _apart(groups)
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="zero_ext checkpoint")
        if groups.world == 1:  # for good: the filters of warnings are the same in all threads
            warnings.filterwarnings("ignore", message=_ALONE)
        self._last = self._executor.submit(_write_meanwhile, path, state, self._own_groups)
        return self._last

    def wait(self) -> None:
        """Wait for all saves that were started."""
        if self._last is not None:
            self._last.exception()  # the caller's future raises it

    def write(self, path: Path, state: dict[str, Any], groups: Groups) -> None:
        """Write after all saves that were started."""
        self.wait()
        with warnings.catch_warnings():
            if groups.world == 1:
                warnings.filterwarnings("ignore", message=_ALONE)
            write(path, state, groups)


def _write_meanwhile(path: Path, state: dict[str, Any], groups: Groups) -> None:
    try:
        write(path, state, groups)
    except Exception as error:  # nobody may ask the future for it
        warnings.warn(str(error), stacklevel=2)
        _forget_locals(error)
        raise
    finally:
        state.clear()


def _forget_locals(error: BaseException) -> None:
    """Free the local variables of the functions that ended with ``error`` and its causes.

    They hold copies of all that was to be written, and a future holds the error.
    """
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
# Of several ranks, by the parent process group.
_writers: WeakKeyDictionary[dist.ProcessGroup, Writer] = WeakKeyDictionary()


def writer_of(groups: Groups) -> Writer:
    return _of_one_rank if groups.world == 1 else _writers.setdefault(groups.parent, Writer())


def _apart(groups: Groups) -> Groups:
    """The same ranks with a process group of their own. Collective."""
    if groups.world == 1:
        return groups._replace(parent=None, mesh=None)
    ranks = dist.get_process_group_ranks(groups.parent)
    # torch names a group of some ranks after these and the number of groups that each is in. Such a
    # name may be that of an earlier group whose addresses the store still holds.
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
