"""Ranks: a function on N processes of this machine."""

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero_ext.testing import worker
from zero_ext.testing.faults import Fault

_START_S = 300.0  # for a process to import torch on a busy machine
_STACKS_S = 1.0  # for one to write its stacks


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        kind: The exception's class name, ``"died"`` (killed, or exited), or ``"hung"``.
        message: The exception's, or what is known.
        details: The traceback, or the stacks of a process that hung.
    """

    kind: str
    message: str
    details: str = ""


class RanksError(AssertionError):
    """At least one rank failed.

    Attributes:
        failures: By rank, of those that failed.
        results: By rank, of those that did not.
    """

    def __init__(self, failures: dict[int, Failure], results: dict[int, Any]):
        self.failures = dict(sorted(failures.items()))
        self.results = results
        lines = [f"rank {rank}: {f.kind}: {f.message}" for rank, f in self.failures.items()]
        details = [
            f"--- rank {rank}\n{f.details}" for rank, f in self.failures.items() if f.details
        ]
        super().__init__("\n".join([*lines, *details]))


def _pickled(function: Callable, args: tuple, kwargs: dict[str, Any]) -> bytes:
    """The call for the processes: names to import, or values where a notebook defines them."""
    main = sys.modules["__main__"]
    is_notebook = not hasattr(main, "__file__") and not getattr(main, "__spec__", None)
    try:
        pickler = importlib.import_module("cloudpickle") if is_notebook else pickle
        return pickler.dumps((function, args, kwargs))
    except ImportError as error:
        raise ImportError(
            "zero_ext: functions of a notebook are sent to other processes by cloudpickle, which "
            "is not installed. Install it: pip install cloudpickle"
        ) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"zero_ext: {function!r} and its arguments cannot be sent to other processes: {error}. "
            "Put the function at the top of a module, and make inside it what cannot be pickled."
        ) from error


@dataclass
class _Process:
    process: Any
    link: Connection
    stacks: Path


class Ranks:
    """N processes that are ranks of a gloo process group, each with one thread.

    They start with the first run and live until ``close()`` or the end of a ``with`` block, so that
    only the first run pays for imports. After a run that failed they are new ones. Nothing
    is forked, so a notebook may have used threads of torch or a GPU before.

    Args:
        world: Number of ranks.
        timeout_s: Limit of a run, in seconds. What waits for another rank gives up after half of
            it, so that every rank can say why.
    """

    def __init__(self, world: int, timeout_s: float = 60.0):
        if not isinstance(world, int) or world < 1:
            raise ValueError(f"zero_ext: the number of ranks is {world!r}: at least 1 is needed.")
        if not timeout_s > 0:
            raise ValueError(f"zero_ext: the timeout is {timeout_s!r} s: it must be positive.")
        self.world = world
        self.timeout_s = timeout_s
        self._runs = 0
        self._processes: list[_Process] = []
        self._folder: tempfile.TemporaryDirectory | None = None
        self._store: dist.TCPStore | None = None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def run(
        self, function: Callable, *args: Any, fault: Fault | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank, in a process group of their own.

        Args:
            function: At the top of a module that can be imported, or of a cell of a notebook; like
                all arguments picklable. ``torch.distributed.get_rank()`` tells it its rank.
            fault: What goes wrong on one rank.
        Returns:
            What each rank returned, in rank order. Tensors come as copies.
        Raises:
            TypeError: ``function`` or an argument cannot be sent.
            ImportError: in a notebook: cloudpickle, which sends them, is not installed.
            RanksError: a rank raised an exception, died, or did not end in time.
        """
        if fault is not None and not 0 <= fault.rank < self.world:
            raise ValueError(f"zero_ext: the fault is on rank {fault.rank} of {self.world}.")
        pickled = _pickled(function, args, kwargs)
        self._runs += 1
        try:
            if not self._processes:
                self._start()
            for each in self._processes:
                each.link.send_bytes(pickle.dumps((self._runs, pickled, fault)))
            results, failures = self._collect()
        except BaseException:  # such as Ctrl-C, while the processes are in the function
            self._stop()
            raise
        if failures:
            self._stop()
            raise RanksError(failures, results)
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End the processes."""
        self._stop()
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._folder = tempfile.TemporaryDirectory(prefix="zero_ext")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            stacks = Path(self._folder.name) / f"rank{rank}"
            arguments = (rank, self.world, self._store.port, self.timeout_s / 2, str(stacks))
            process = context.Process(target=worker.serve, args=(*arguments, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process ends the link
            self._processes.append(_Process(process, ours, stacks))
        for rank, each in enumerate(self._processes):
            try:
                started = each.link.poll(_START_S) and each.link.recv_bytes() == worker.READY
            except EOFError:
                started = False
            if not started:
                self._stop()
                raise RanksError({rank: Failure("died", "while it started")}, {})

    def _stop(self) -> None:
        for each in self._processes:
            each.link.close()
            each.process.kill()
        for each in self._processes:
            each.process.join()
        self._processes = []

    def _collect(self) -> tuple[dict[int, Any], dict[int, Failure]]:
        """Every rank's result or failure."""
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        waiting = {each.link: rank for rank, each in enumerate(self._processes)}
        deadline = time.monotonic() + self.timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for link in ready:
                rank = waiting.pop(link)
                try:
                    result, failure = pickle.loads(link.recv_bytes())
                except (EOFError, ConnectionResetError):
                    failures[rank] = Failure("died", self._how_it_ended(rank))
                    continue
                if failure is None:
                    results[rank] = result
                else:
                    failures[rank] = Failure(*failure)
        failures.update({rank: self._hung(rank) for rank in waiting.values()})
        return results, failures

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank].process
        process.join()
        code = process.exitcode
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def _hung(self, rank: int) -> Failure:
        each = self._processes[rank]
        os.kill(each.process.pid, worker.STACKS)
        deadline = time.monotonic() + _STACKS_S
        # The main thread's stack is written last, and a line at a time.
        while not each.stacks.read_text().endswith("in <module>\n"):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return Failure("hung", f"no end within {self.timeout_s:g} s", each.stacks.read_text())
