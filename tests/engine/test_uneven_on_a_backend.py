"""Ranks that run different numbers of backwards where a device's own backend has the messages."""

import contextlib
import itertools
import os
import random
import re
import warnings

import pytest
import torch
from harness import MLP, assert_bits, gather_objects, mean_square, rank_data
from setups import everything
from uneven_steps import DIVIDE_BY, OneProcess, PlannedError, Step, Towers, loss_of

import zero_ext

pytestmark = [
    pytest.mark.dist,
    # NCCL needs a GPU for each rank, and its watchdog ends the process.
    pytest.mark.skipif(
        "lccl" not in os.environ.get("ZERO_EXT_TEST_BACKENDS", ""),
        reason="of the emulated device's backend",
    ),
]


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch):
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "2")


def wait_for_the_backend() -> None:
    """Until it has given up."""
    for _ in range(20):  # a wait raises one error, of one stream
        try:
            return torch.accelerator.synchronize()
        except RuntimeError:
            pass


def same_error(rank: int, error: BaseException | None, mixed_up: bool = False) -> str:
    """What every rank raised, without its own number; empty where none did. ``mixed_up``: messages
    of other units may meet. The backend may see that first, elsewhere on each rank."""
    text = str(error or "")
    wait_for_the_backend()
    if text:
        assert text.startswith(f"zero_ext [rank {rank}")
        text = text.replace(f"zero_ext [rank {rank}", "zero_ext [rank", 1)
    of_all = gather_objects(text)
    assert all(of_all) if mixed_up and any(of_all) else len(set(of_all)) == 1, of_all
    return text


@pytest.mark.world(min=2)
@pytest.mark.parametrize("counts", [(2, 1), pytest.param((0, 2), marks=pytest.mark.slow)], ids=str)
def test_every_rank_raises_who_waits_for_what(mesh, rank, world, counts, capfd):
    counts = [*counts, *[1] * (world - 2)]
    model = zero_ext.shard(MLP(), 2, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batches = [rank_data((3, 5), rank, k) for k in range(counts[rank])]
    with pytest.raises(RuntimeError) as raised:
        for batch in batches:
            mean_square(model, batch).backward()
        optimizer.step()
        optimizer.stats()
    error = same_error(rank, raised.value)
    most = max(counts)
    for r in range(world):
        # A rank without a backward takes part in one.
        assert re.search(rf"rank [\d, ]*\b{r}\b[\d, ]* with {max(counts[r], 1)} backward", error)
    assert re.search(
        rf"with {most} backward.* in this step: unit 'layers.* waited for its red", error
    )
    assert "with 1 backward(s) begun in this step: step() waited for the other" in error
    assert "every rank must run the same forwards and backwards of a step, see docs/un" in error
    assert error.split("]: ", 1)[1] in capfd.readouterr().err


@pytest.mark.world(min=2)
def test_a_branch_that_one_rank_takes(mesh, rank):
    """In stage 3 its gathers are collectives."""
    model = zero_ext.shard(Towers(), 3, mesh=mesh, bucket_mb=200 / 2**20)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batch = rank_data((3, 7), rank), (0, 1, 2) if rank == 0 else (0,)
    with pytest.raises(RuntimeError) as raised:
        mean_square(model, batch).backward()
        optimizer.step()
        optimizer.stats()
    error = same_error(rank, raised.value)
    assert "every rank must run the same forwards and backwards of a step, see docs/un" in error


class Program:
    """Some steps of which the last is drawn at random; in those before it all ranks do the same."""

    def __init__(self, seed: int, world: int, stage: int):
        draw = random.Random(seed)
        drawn = (Step(1000 * seed + n, world, True, True) for n in itertools.count())
        even = (step for step in drawn if self._is_even(step, stage))
        self.steps = [next(even) for _ in range(draw.randrange(3))]
        self.steps.append(Step(1000 * seed + 999, world, draw.random() < 0.7, draw.random() < 0.7))
        self.is_even = self._is_even(self.steps[-1], stage)

    @staticmethod
    def _is_even(step: Step, stage: int) -> bool:
        same = [step.counts, step.idle_forwards] if stage == 3 else [step.counts]
        used = {tuple(tuple(used) for _, used, _ in batches) for batches in step.batches}
        return (
            all(len(set(each)) == 1 for each in same)
            and not step.failing
            and (stage < 3 or len(used) == 1)
        )

    def run(self, rank: int, model, optimizer, one: OneProcess) -> None:
        for step in self.steps:
            self._run_step(step, rank, model, optimizer)
            step.of_all(one)
            if step.clips:
                one.optimizer.clip_grad_norm_(0.05)
            one.optimizer.step()
            one.optimizer.zero_grad()

    @staticmethod
    def _run_step(step: Step, rank: int, model, optimizer) -> None:
        idle = rank_data((2, 7), rank)  # a copy to the device waits, and raises the backend's error
        for k, batch in enumerate(step.batches[rank]):
            if (rank, k) in step.failing:
                with contextlib.suppress(PlannedError):
                    model(batch[0], batch[1], fails=True).float().square().mean().backward()
            loss_of(model, batch).backward()
            if k + 1 == step.zeroed_after:
                optimizer.zero_grad()
        for _ in range(step.idle_forwards[rank]):
            model(idle)
        if step.clips:
            optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        assert optimizer.skipped_steps >= 0  # the host waits
        optimizer.zero_grad()


def run_program(seed: int, mesh, rank: int, world: int, stage: int, monkeypatch) -> str:
    program = Program(seed, world, stage)
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "25" if program.is_even else "2")
    options = {"lr": 0.25, "momentum": 0.5, "nonfinite": "skip"}
    model = zero_ext.shard(Towers(), stage, mesh=mesh, bucket_mb=200 / 2**20)
    model.set_gradient_divide_factor(DIVIDE_BY)
    optimizer = zero_ext.optim.SGD(model.parameters(), **options)
    one = OneProcess(**options)
    raised = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # skipped steps
            program.run(rank, model, optimizer, one)
    except RuntimeError as error:
        raised = error.with_traceback(None)
    where = f"seed {seed}, counts {[step.counts for step in program.steps]}"
    error = same_error(rank, raised, mixed_up=stage == 3 or bool(program.steps[-1].failing))
    if error:
        assert not program.is_even, where
    else:
        assert_bits(everything(model, optimizer), everything(one.model, one.optimizer), where)
    return error


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_random_programs(mesh, rank, world, stage, monkeypatch):
    seeds = range(14 * stage, 14 * stage + 14)
    errors = [run_program(seed, mesh, rank, world, stage, monkeypatch) for seed in seeds]
    assert any(errors)
