"""Writer: the saves over one process group, some of which run while training goes on."""

import traceback
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from zero_ext.checkpoint import files
from zero_ext.ranks.comm_groups import timeout_of
from zero_ext.ranks.groups import Groups, make_group


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
            warnings.filterwarnings("ignore", message=files.ALONE)
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
                warnings.filterwarnings("ignore", message=files.ALONE)
            files.write(path, state, groups)


def _write_meanwhile(path: Path, state: dict[str, Any], groups: Groups) -> None:
    try:
        files.write(path, state, groups)
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
    """``groups`` with a process group of its own, of the same ranks. Collective."""
    if groups.world == 1:
        return groups._replace(parent=None, mesh=None)
    ranks = dist.get_process_group_ranks(groups.parent)
    own = make_group(ranks, "gloo", timeout_of(groups))
    return groups._replace(parent=own, mesh=None)
