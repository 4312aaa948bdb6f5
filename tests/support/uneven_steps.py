"""Random steps in which ranks run different numbers of backwards."""

import contextlib
import random

import torch
from harness import rank_data
from setups import one_process
from torch import nn

import zero_ext
from zero_ext.engine.registry import find

WIDTH = 7
DIVIDE_BY = 4.0  # a power of two: all bits are those of one process


class Towers(nn.Module):
    """Layers of odd sizes; ``used`` says which of the towers run."""

    def __init__(self, towers: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, 13)
        self.towers = nn.ModuleList(nn.Linear(13, 13) for _ in range(towers))
        self.head = nn.Linear(13, 3)

    def forward(self, x, used=(0, 1, 2), fails: bool = False):
        x = torch.tanh(self.stem(x))
        if fails:
            x.register_hook(fail)  # when the head and the towers have their gradients
        for tower in used:
            x = torch.tanh(self.towers[tower](x))
        return self.head(x)


class PlannedError(Exception):
    pass


def fail(*_arguments):
    raise PlannedError


def loss_of(model, batch) -> torch.Tensor:
    x, used, factor = batch
    return model(x, used).float().square().mean() * factor


class OneProcess:
    """The library in one process, which runs the micro-batches of all ranks one after the other."""

    def __init__(self, **options):
        self.model = Towers()
        with one_process():
            self.optimizer = zero_ext.optim.SGD(
                self.model.parameters(), stage=1, process_group=None, **options
            )
        find(self.model.stem.weight)[0].engine.set_divide_factor(DIVIDE_BY)

    def backward(self, batch) -> None:
        loss_of(self.model, batch).backward()


class Step:
    """What each rank does in one step, drawn from ``seed``; the same on every rank."""

    def __init__(self, seed: int, world: int, branches: bool, throws: bool):
        draw = random.Random(seed)
        self.counts = [draw.choice((0, 1, 1, 2, 3, 5)) for _ in range(world)]
        if draw.random() < 0.2:
            self.counts = [self.counts[0]] * world
        self.batches = [
            [self._batch(draw, rank, seed, k, branches) for k in range(count)]
            for rank, count in enumerate(self.counts)
        ]
        self.failing = {
            (rank, draw.randrange(count))
            for rank, count in enumerate(self.counts)
            if count and draw.random() < 0.25 and throws
        }
        fewest = min(self.counts)
        self.zeroed_after = draw.randint(1, fewest) if fewest and draw.random() < 0.3 else 0
        self.clips = draw.random() < 0.4
        self.idle_forwards = [draw.choice((0, 0, 1, 2)) for _ in range(world)]
        self.late = draw.randrange(world)

    @staticmethod
    def _batch(draw, rank, seed, k, branches):
        used = [t for t in range(3) if not branches or draw.random() < 0.7]
        factor = float("nan") if draw.random() < 0.03 else 1.0
        return rank_data((2, WIDTH), rank, seed, k), used, factor

    def of_rank(self, rank: int, model, optimizer) -> None:
        if rank == self.late:  # while the others wait, or run their own
            torch.ones(300, 300) @ torch.ones(300, 300)
        for k, batch in enumerate(self.batches[rank]):
            fails = (rank, k) in self.failing
            if fails:
                with contextlib.suppress(PlannedError, RuntimeError):
                    model(batch[0], batch[1], fails=True).float().square().mean().backward()
            self._until_it_succeeds(model, batch)
            if k + 1 == self.zeroed_after:
                optimizer.zero_grad()
        for _ in range(self.idle_forwards[rank]):
            model(rank_data((2, WIDTH), rank))

    def _until_it_succeeds(self, model, batch) -> None:
        """Another rank that runs the same backward may have thrown."""
        for attempt in range(20):
            try:
                return loss_of(model, batch).backward()
            except RuntimeError as error:
                assert "it went on without this" in str(error), attempt
        raise AssertionError("the backward never succeeds")

    def of_all(self, one: OneProcess) -> None:
        for k in range(max(self.counts)):
            for batches in self.batches:
                if k < len(batches):
                    one.backward(batches[k])
            if k + 1 == self.zeroed_after:
                one.optimizer.zero_grad()
