"""Parameters that are unfrozen while ranks run different numbers of backwards."""

import random
import re
from itertools import pairwise

import pytest
import torch
from harness import GATHERS_TOGETHER, gather_objects, mean_square, rank_data
from setups import values_of
from torch import nn

import zero_ext

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2)]
SIZES = (5, 7, 13, 3)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(SIZES))
        for layer in self.layers[1:]:
            layer.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Program:
    """Steps in which a layer is unfrozen before, between or after the ranks' backwards."""

    def __init__(self, seed: int, world: int):
        draw = random.Random(seed)
        layers = draw.sample([1, 2], draw.randint(1, 2))
        self.unfrozen = {draw.randrange(3): layer for layer in layers}  # step -> layer
        self.early = draw.random() < 0.5
        self.counts = [[draw.choice((0, 0, 1, 2)) for _ in range(world)] for _ in range(3)]
        self.verbs = [draw.sample(("clip", "zero"), draw.randint(0, 2)) for _ in range(3)]

    def run(self, model, optimizer, ranks) -> None:
        for step, counts in enumerate(self.counts):
            layer = self.unfrozen.get(step)
            if layer is not None and self.early:
                model.layers[layer].requires_grad_(True)
            for k in range(max(counts[r] for r in ranks)):
                for r in ranks:
                    if k < counts[r]:
                        loss = mean_square(model, rank_data((2, SIZES[0]), r, step, k))
                        (loss / len(ranks)).backward()
            if layer is not None and not self.early:
                model.layers[layer].requires_grad_(True)
            if "zero" in self.verbs[step] and layer is not None and not self.early:
                optimizer.zero_grad()  # the ranks meet there, because a layer was unfrozen
            if "clip" in self.verbs[step]:
                if isinstance(optimizer, torch.optim.SGD) and len(ranks) > 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                else:
                    optimizer.clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()


def check(seeds, mesh, rank, world, stage) -> None:
    for seed in seeds:
        program = Program(seed, world)
        model = zero_ext.shard(Layers(), stage, mesh=mesh, bucket_mb=1e-6)
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
        program.run(model, optimizer, [rank])
        plain = Layers()
        program.run(plain, torch.optim.SGD(plain.parameters(), lr=0.5), range(world))
        for name, value in values_of(model).items():
            expected = plain.get_parameter(name)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6, msg=f"{seed} {name}")


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.skipif(GATHERS_TOGETHER, reason="every rank enters every collective")
def test_random_programs(mesh, rank, world, stage):
    check(range(6), mesh, rank, world, stage)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_random_programs_between_hosts(mesh, rank, world, stage, monkeypatch):
    if mesh.device_type != "cpu":
        pytest.skip("every rank enters every collective")
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "0")
    check(range(10, 16), mesh, rank, world, stage)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["1", "0"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.skipif(GATHERS_TOGETHER, reason="every rank enters every collective")
def test_many_random_programs(mesh, rank, world, stage, hosts, monkeypatch):
    if hosts == "0" and mesh.device_type != "cpu":
        pytest.skip("every rank enters every collective")
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", hosts)
    check(range(100, 140), mesh, rank, world, stage)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("verb", ["step", "zero_grad", "forward"])
def test_ranks_that_unfreeze_different_parameters_raise(mesh, rank, stage, verb):
    model = zero_ext.shard(Layers(), stage, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    layer = model.layers[1 if rank == 0 else 2]
    layer.weight.requires_grad_(True)
    message = "'layers.1.weight' was frozen when it came in, and requires a gradient now on rank 0"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=re.escape(message) + " and not on rank 1"):
            if verb == "forward":
                model(rank_data((2, SIZES[0]), rank))
            else:
                getattr(optimizer, verb)()
    model.layers[1].weight.requires_grad_(True)
    model.layers[2].weight.requires_grad_(True)
    mean_square(model, rank_data((2, SIZES[0]), rank)).backward()
    optimizer.step()
    values = gather_objects({k: v.tolist() for k, v in values_of(model).items()})
    assert all(each == values[0] for each in values)
