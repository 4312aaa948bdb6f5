"""Ranks that write values to parameters: the same on every rank, or an error by name."""

import random
from itertools import pairwise

import pytest
import torch
from harness import gather_objects, mean_square, rank_data
from setups import values_of
from torch import nn

import zero_ext

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2)]
SIZES = (5, 7, 13, 3)
STEPS = 3


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(SIZES))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def element_of(value) -> int:
    """Any one, by what is written."""
    return int(1000 * value.abs().sum()) % value.numel()


WAYS = {
    "copy": lambda p, value: p.copy_(value),
    "data": lambda p, value: p.data.copy_(value),
    "element": lambda p, value: p.data.view(-1)[element_of(value)].copy_(value.view(-1)[0]),
    "storage": lambda p, value: setattr(p, "data", value.clone()),
    "part": lambda p, value: p.view(-1)[: p.numel() // 2].copy_(value.view(-1)[: p.numel() // 2]),
    "multiply": lambda p, value: p.mul_(1.5 if value.sum() > 0 else 0.5),
}


class Write:
    """What each rank writes in one step, drawn from a seed; the same draw on every rank."""

    def __init__(self, draw: random.Random, world: int, stage: int, device: str):
        names = list(dict(Layers().named_parameters()))
        self.names = draw.sample(names, draw.randint(1, 3))
        self.who = draw.choice(("nobody", "all", "one", "seeds"))
        self.writer = draw.randrange(world)
        # On a device a write through .data leaves no trace.
        left_out = ("storage",) * (stage == 3) + ("data", "element") * (device != "cpu")
        ways = [way for way in WAYS if way not in left_out]
        self.way = WAYS[draw.choice(ways)]
        self.early = draw.random() < 0.5  # before the forward
        self.seed = draw.randrange(1000)

    def diverges(self) -> bool:
        return self.who in ("one", "seeds")

    def values_of(self, name: str, like, rank: int):
        draw = torch.Generator("cpu").manual_seed(self.seed + len(name) + rank)
        return torch.randn(like.shape, generator=draw, device="cpu").to(like.device)

    def by(self, rank: int, model) -> None:
        if self.who == "nobody" or (self.who == "one" and rank != self.writer):
            return
        seed = rank if self.who == "seeds" else self.writer
        with torch.no_grad():
            for name in self.names:
                parameter = model.get_parameter(name)
                self.way(parameter, self.values_of(name, parameter, seed))


def write(model, stage: int, change) -> None:
    if stage == 3:
        with model.summon_full_params():
            change(model)
    else:
        change(model)


def mend(model, expected) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(expected[name])


def step_or_error(optimizer, rank: int) -> str:
    try:
        optimizer.step()
    except RuntimeError as error:
        prefix = f"zero_ext [rank {rank}, "
        assert str(error).startswith(prefix), error
        return str(error)[len(prefix) :]
    return ""


def run_program(seed: int, mesh, rank: int, world: int, stage: int) -> bool:
    """Returns whether the ranks raised an error."""
    draw = random.Random(seed)
    model = zero_ext.shard(Layers(), stage, mesh=mesh, bucket_mb=draw.choice((1e-6, 3e-4, 25.0)))
    options = {"lr": 0.25, "momentum": draw.choice((0.0, 0.5))}
    optimizer = zero_ext.optim.SGD(model.parameters(), **options)
    plain = Layers()
    reference = torch.optim.SGD(plain.parameters(), **options)
    raised = False
    for step in range(STEPS):
        change = Write(draw, world, stage, mesh.device_type)
        if change.early:
            write(model, stage, lambda m, change=change: change.by(rank, m))
            change.by(change.writer, plain)
        mean_square(model, rank_data((4, SIZES[0]), rank, step)).backward()
        if not change.early:
            write(model, stage, lambda m, change=change: change.by(rank, m))
        for r in range(world):
            (mean_square(plain, rank_data((4, SIZES[0]), r, step)) / world).backward()
        if not change.early:
            change.by(change.writer, plain)
        told = step_or_error(optimizer, rank)
        assert len(set(gather_objects(told))) == 1, (seed, step)
        if told:
            assert change.diverges(), (seed, step, told)
            assert any(
                f"parameter '{name}' was set to other values" in told for name in change.names
            )
            raised = True
            expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
            write(model, stage, lambda m, expected=expected: mend(m, expected))
            if change.early:  # ranks computed with other values than others
                optimizer.zero_grad()
                mean_square(model, rank_data((4, SIZES[0]), rank, step)).backward()
            optimizer.step()
        reference.step()
        for each in (optimizer, reference):
            each.zero_grad()
        for name, value in values_of(model).items():
            expected = plain.get_parameter(name)
            text = f"seed {seed}, step {step}, {name}"
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=text)
    return raised


@pytest.mark.parametrize("stage", range(4))
def test_random_programs(mesh, rank, world, stage):
    raised = [run_program(seed, mesh, rank, world, stage) for seed in range(8)]
    assert any(raised)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_random_programs_between_hosts(mesh, rank, world, stage, monkeypatch):
    if mesh.device_type != "cpu":
        pytest.skip("a step that is skipped on the device has no name")
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "0")
    raised = [run_program(seed, mesh, rank, world, stage) for seed in range(20, 24)]
    assert any(raised)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_many_random_programs(mesh, rank, world, stage):
    first = 1000 + 75 * stage
    raised = [run_program(seed, mesh, rank, world, stage) for seed in range(first, first + 75)]
    assert any(raised)


class FromData(nn.Module):
    """A scale that the first forward takes from the rank's own data."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.initialised = False

    def forward(self, x):
        if not self.initialised:
            self.initialised = True
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
        return x * self.scale


@pytest.mark.parametrize("stage", range(4))
def test_an_initialisation_from_a_ranks_own_data(mesh, rank, stage):
    torch.manual_seed(0)
    model = zero_ext.shard(nn.Sequential(nn.Linear(5, 7), FromData()), stage, mesh=mesh)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in values_of(model).items() if name != "1.scale"}
    for _ in range(2):
        mean_square(model, rank_data((4, 5), rank)).backward()
        with pytest.raises(RuntimeError, match=r"'1.scale' was set to other values on rank 1 than"):
            optimizer.step()
        for name, value in before.items():
            assert torch.equal(values_of(model)[name], value)


@pytest.mark.host
@pytest.mark.parametrize("stage", range(3))
def test_ranks_that_begin_with_other_values(mesh, rank, stage):
    """With sync_module_states=False; one element of the last parameter differs."""
    model = Layers()
    with torch.no_grad():
        model.layers[-1].bias[1] += rank
    zero_ext.shard(model, stage, mesh=mesh, sync_module_states=False)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    before = {name: value.clone() for name, value in values_of(model).items()}
    mean_square(model, rank_data((4, SIZES[0]), rank)).backward()
    with pytest.raises(RuntimeError, match=r"'layers.2.bias' was set to other values on rank 1"):
        optimizer.step()
    for name, value in values_of(model).items():
        assert torch.equal(value, before[name])
    mend(model, Layers().state_dict())
    optimizer.step()


@pytest.mark.host
@pytest.mark.parametrize("stage", range(4))
def test_two_signs_that_one_rank_changes(mesh, rank, stage):
    """Each of them is the highest bit of eight bytes."""
    model = zero_ext.shard(Layers(), stage, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)

    def change(m):
        m.layers[1].weight.data.view(-1)[1:5:2] *= -1 if rank == 1 else 1

    write(model, stage, change)
    mean_square(model, rank_data((4, SIZES[0]), rank)).backward()
    with pytest.raises(RuntimeError, match=r"'layers.1.weight' was set to other values"):
        optimizer.step()


@pytest.mark.parametrize("stage", range(4))
def test_the_same_values_on_every_rank_are_written(mesh, rank, stage):
    """Also where one rank alone writes what is there, and where all of them load a state."""
    model = zero_ext.shard(Layers(), stage, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    there = {name: value.clone() for name, value in values_of(model).items()}
    writes = there if rank == 1 else {}

    def change(m):
        with torch.no_grad():
            for name, value in writes.items():
                m.get_parameter(name).copy_(value)

    write(model, stage, change)
    mean_square(model, rank_data((4, SIZES[0]), rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    values = {name: value + 1 for name, value in values_of(model).items()}
    write(model, stage, lambda m: mend(m, values))
    optimizer.step()
    for name, value in values_of(model).items():
        assert torch.equal(value, values[name])


@pytest.mark.host
@pytest.mark.parametrize("before", ["load", "write", "two loads"])
def test_a_write_into_one_ranks_part_follows_one_of_all(mesh, rank, before):
    model = zero_ext.shard(Layers(), 3, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.01)
    values = {name: value + 1 for name, value in values_of(model).items()}
    for _ in range(2 if before == "two loads" else 1):
        if before == "write":
            with model.summon_full_params(), torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(values[name])
        else:
            model.load_state_dict(values)
        model(rank_data((4, 5), rank))
    with model.summon_full_params():
        for parameter in model.parameters():
            parameter.data.view(-1)[0] = 0.5
    mean_square(model, rank_data((4, 5), rank)).backward()
    assert step_or_error(optimizer, rank) == ""


@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_that_write_different_values(replicas_of, rank, world, stage):
    model = zero_ext.shard(Layers(), stage, mesh=replicas_of(2 if world % 4 == 0 else 1))
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)

    def change(m):
        with torch.no_grad():
            m.layers[1].weight.add_(rank // 2 if world % 4 == 0 else rank)

    write(model, stage, change)
    mean_square(model, rank_data((4, SIZES[0]), rank)).backward()
    with pytest.raises(RuntimeError, match=r"'layers.1.weight' was set to other values"):
        optimizer.step()
