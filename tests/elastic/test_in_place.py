"""Rounds of processes that stay alive: who is in one, and how a training goes through them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from elastic_training import Training

from zero_ext.elastic import Run, train_in_place
from zero_ext.elastic.in_place import Members, NewRound, current_members

RUN = "test"


def members_of(
    store, *, min_ranks: int = 1, settle_s: float = 0.1, answer_s: float = 60.0
) -> Members:
    return Members(store, RUN, min_ranks, settle_s, answer_s)


def places(met) -> list[tuple[int, int]]:
    return sorted((rank, world) for rank, world, _ in met)


def test_all_that_arrive_are_in_a_round():
    store = dist.HashStore()
    every = [members_of(store, min_ranks=3) for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        assert places(pool.map(Members.meet, every)) == [(0, 3), (1, 3), (2, 3)]
        assert not every[0].are_asked()

        late = members_of(store)
        of_late = pool.submit(late.meet)
        while not every[0].are_asked():
            pass
        assert all(each.are_asked() for each in every)
        for each in every[1:]:  # the first one is lost
            each.open_next()
        met = [*pool.map(Members.meet, every[1:]), of_late.result()]
        assert places(met) == [(0, 3), (1, 3), (2, 3)]


def test_survivors_of_a_lost_rank_do_not_wait_for_others():
    store = dist.HashStore()
    every = [members_of(store, min_ranks=2) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert len([*pool.map(Members.meet, every)]) == 4
        for each in every[1:]:
            each.open_next()
            each._settle_s = 1e6  # longer than the test may take
        assert places(pool.map(Members.meet, every[1:])) == [(0, 3), (1, 3), (2, 3)]


def test_a_process_that_dies_on_arrival_is_not_waited_for():
    store = dist.HashStore()
    dist.PrefixStore(f"zero_ext/{RUN}", store).add("0/arrived", 1)
    assert places([members_of(store).meet()]) == [(0, 1)]


def test_a_round_waits_for_enough_ranks():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(members_of(store, min_ranks=2, settle_s=0.01).meet)
        with pytest.raises(TimeoutError):
            first.result(timeout=0.2)
        second = members_of(store, min_ranks=2, settle_s=0.01).meet()
        assert places([first.result(), second]) == [(0, 2), (1, 2)]


def test_a_process_goes_on_alone_where_all_members_were_lost():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        assert len([*pool.map(Members.meet, [members_of(store), members_of(store)])]) == 2
    assert places([members_of(store, answer_s=0.05).meet()]) == [(0, 1)]


def test_a_run_that_has_ended_takes_nobody():
    store = dist.HashStore()
    members_of(store).end()
    assert members_of(store).meet() is None
    assert train_in_place(lambda: 1 / 0, store, run_id=RUN) is None


class Disturbed:
    """A training in rounds, in some of which something happens after the first step."""

    def __init__(self, folder, events: list[BaseException | None]):
        self.events, self.folder = events, folder
        self.began_with: list[int] = []

    def __call__(self) -> str:
        training = Training(2, 0, 1, mesh="alone")
        event = self.events.pop(0)
        with Run(
            training.model, training.optimizers, extra=training.extra, folder=self.folder
        ) as run:
            self.began_with.append(run.step)
            assert current_members() is not None
            if event is not None:
                training.run(run, run.step + 1, lambda: None)
                raise event
            training.run(run, 4, lambda: None)
            return training.fingerprint()


def test_a_training_goes_through_rounds(tmp_path):
    events = [RuntimeError("a rank was lost"), NewRound(), RuntimeError("another"), None]
    disturbed = Disturbed(tmp_path, events)
    found = train_in_place(disturbed, dist.HashStore(), run_id=RUN, settle_s=0.01, backend="gloo")
    assert disturbed.began_with == [0, 1, 2, 3]
    alone = Training(2, 0, 1, mesh="alone")
    for _ in range(4):
        alone.step()
    assert found == alone.fingerprint()
    assert not dist.is_initialized() and current_members() is None


def test_a_fault_of_the_script_is_raised():
    calls = []

    def train():
        calls.append(1)
        raise RuntimeError("always")

    with pytest.raises(RuntimeError, match="always"):
        train_in_place(train, dist.HashStore(), run_id=RUN, settle_s=0.01, backend="gloo")
    assert len(calls) == 3 and not dist.is_initialized()
    with pytest.raises(ZeroDivisionError):
        train_in_place(lambda: 1 / 0, dist.HashStore(), run_id=RUN, settle_s=0.01, backend="gloo")
    with pytest.raises(ValueError, match="min_ranks must be at least 1"):
        train_in_place(train, dist.HashStore(), run_id=RUN, min_ranks=0)
