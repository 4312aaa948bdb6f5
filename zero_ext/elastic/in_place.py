"""Rounds: processes that stay alive meet again when one of them was lost, or one more has come.

Note [Meeting through a store]
A round is a number in the store. A process that wants to train arrives in the open round. When
nobody else has arrived for a while, any of them closes it: the first one to write the list of
members wins. A process that is not in the list asks the members to meet again, and waits for the
next round. A member that has lost another one opens the next round and arrives in it. Where all
members were lost, nobody answers, and the process that has asked opens the next round.
"""

import contextlib
import gc
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from zero_ext.engine.checks import check_count

_POLL_S = 0.01
_SETTLE_S = 0.1  # where all but one of the last round's members have arrived
_ATTEMPTS = 3  # without a finished step
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class NewRound(BaseException):
    """Ends a round between two steps. No ``except Exception`` of a script keeps it."""


class Members:
    """The rounds as one process knows them."""

    def __init__(
        self, store: dist.Store, run_id: str, min_ranks: int, settle_s: float, answer_s: float
    ):
        self._store = dist.PrefixStore(f"zero_ext/{run_id}", store)
        self.run_id, self._min_ranks = run_id, min_ranks
        self._settle_s, self._answer_s = settle_s, answer_s
        self._name = secrets.token_hex(4)
        self._round, self._expected = 0, float("inf")
        self.failures = 0  # since the last finished step

    def are_asked(self) -> bool:
        """Whether another process waits to take part."""
        return self._store.check([f"{self._round}/asked"])

    def meet(self) -> tuple[int, int, dist.Store] | None:
        """This process's rank, the number of ranks and their store; None if the run has ended."""
        while not self._store.check(["ended"]):
            self._round = max(self._round, self._open_round())
            place = self._store.add(f"{self._round}/arrived", 1)
            self._store.set(f"{self._round}/{place}", self._name)
            members = self._closed()
            if self._name in members:
                rank, self._expected = members.index(self._name), len(members) - 1
                return rank, len(members), dist.PrefixStore(f"round{self._round}", self._store)
            self._ask()
        return None

    def _ask(self) -> None:
        """Wait for the next round, or open it."""
        self._store.set(f"{self._round}/asked", self._name)
        deadline = time.monotonic() + self._answer_s
        while self._open_round() == self._round and not self._store.check(["ended"]):
            if time.monotonic() > deadline:
                self.open_next()
                return
            time.sleep(_POLL_S)

    def _open_round(self) -> int:
        return int(self._store.compare_set("round", "", "0"))

    def _closed(self) -> list[str]:
        """The members of the round, once it is closed."""
        key = f"{self._round}/members"
        count, since = 0, time.monotonic()
        while not self._store.check([key]):
            if (now := self._store.add(f"{self._round}/arrived", 0)) != count:
                count, since = now, time.monotonic()
            names = [f"{self._round}/{place}" for place in range(1, count + 1)]
            there = [self._store.get(name).decode() for name in names if self._store.check([name])]
            settle_s = self._settle_s if count < self._expected else min(self._settle_s, _SETTLE_S)
            waited = time.monotonic() - since >= settle_s
            if waited and len(there) >= self._min_ranks:
                return json.loads(self._store.compare_set(key, "", json.dumps(there)))
            time.sleep(_POLL_S)
        return json.loads(self._store.get(key))

    def open_next(self) -> None:
        """Open the next round, if no other member has done it."""
        self._store.compare_set("round", str(self._round), str(self._round + 1))
        self._round += 1

    def end(self) -> None:
        self._store.set("ended", "")


_current: ContextVar[Members | None] = ContextVar("members", default=None)


def current_members() -> Members | None:
    """The members of the ``train_in_place`` that this code runs in."""
    return _current.get()


def train_in_place(
    train: Callable[[], _Result],
    store: dist.Store,
    *,
    run_id: str,
    min_ranks: int = 1,
    settle_s: float = 0.3,
    backend: str | None = None,
    timeout_s: float = 60.0,
) -> _Result | None:
    """Call ``train()`` in a process group of all processes that take part, again after each loss.

    Any process that calls it takes part, also later: the others end their step, and all begin a new
    round. ``train`` makes model and optimizer anew, and goes on by ``elastic.Run``, which it has to
    use. Where a rank is lost, the others' ``RuntimeError`` begins a new round without it.

    Args:
        store: Survives the processes: a TCPStore of the process that has started them.
        run_id: The same in all processes.
        min_ranks: Fewer do not begin a round.
        settle_s: A round begins when nobody has arrived for so long, or for 0.1 s where all but
            one of the last round's ranks are there.
        backend: As of ``init_process_group``.
        timeout_s: Of the process group: after that a rank that has stopped is lost. Longer than a
            step: members that do not answer a new process in two steps are lost.
    Returns:
        What ``train`` has returned; None if the run had ended when this process came.
    Raises:
        RuntimeError: that of ``train``, where three rounds in a row have not finished a step.
    """
    check_count("min_ranks", min_ranks)
    members = Members(store, run_id, min_ranks, settle_s, 2 * timeout_s)
    token = _current.set(members)
    try:
        while (place := members.meet()) is not None:
            try:
                with _group_of(*place, backend, timedelta(seconds=timeout_s)):
                    result = train()
                    members.end()
                    return result
            except NewRound:
                pass
            except RuntimeError as error:
                members.failures += 1
                if members.failures == _ATTEMPTS:
                    raise
                _log.warning("zero_ext: begins a new round: %s", error)
            gc.collect()  # the model of this round
            members.open_next()
        return None
    finally:
        _current.reset(token)


@contextlib.contextmanager
def _group_of(
    rank: int, world: int, store: dist.Store, backend: str | None, timeout: timedelta
) -> Iterator[None]:
    """Inside it there is a default process group."""
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # its ranks may be gone
            if dist.is_initialized():
                dist.destroy_process_group()
