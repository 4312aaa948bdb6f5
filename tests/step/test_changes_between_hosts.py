"""Gathers after an update between hosts: only changes are sent, and no value differs for it."""

import random

import pytest
import torch
from edited_models import ACTIONS, BF16, GROUP, HOSTS, OPTIMIZERS, Edits, batch_of, sharded, step
from harness import MLP, Odd, Tied, assert_bits, mean_square
from memory_formula import ranges_of
from torch import nn

import zero_ext

STAGES = pytest.mark.parametrize("stage", [1, 2])
pytestmark = [pytest.mark.dist, pytest.mark.host]
ALIGNED = 16  # elements: a parameter begins at a multiple


@pytest.fixture
def on_hosts(rank, monkeypatch):
    """Shards a model as on these hosts; None: all ranks are on one."""

    def make_on(hosts, make, stage, mesh, optimizer="AdamW", **options):
        number = 0 if hosts is None else HOSTS[hosts](rank)
        monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", str(1 + number))
        return sharded(make, stage, mesh, optimizer, **options)

    return make_on


def in_order(model):
    """The bits of all parameters as they lie in a unit."""
    bits = [p.detach().flatten().view(torch.int16) for p in model.parameters()]
    return torch.cat([nn.functional.pad(b, (0, -len(b) % ALIGNED)) for b in bits])


def assert_equal(model, other, what):
    for (name, parameter), expected in zip(
        model.named_parameters(), other.parameters(), strict=True
    ):
        assert_bits(parameter, expected, f"{what} {name}")


@STAGES
@pytest.mark.parametrize(
    "seed", [*range(3), *[pytest.param(s, marks=pytest.mark.slow) for s in range(3, 20)]]
)
def test_random_programs_have_the_bits_of_one_host(on_hosts, mesh, rank, stage, seed, shared_path):
    draw = random.Random(f"{stage} {seed}")
    hosts, optimizer = draw.choice([*HOSTS]), draw.choice([*OPTIMIZERS])
    make = draw.choice([lambda: MLP(57, layers=3), lambda: Odd(BF16), lambda: Tied(13)])
    runs = []
    for k, each in enumerate([hosts, None]):
        model, stepper = on_hosts(each, make, stage, mesh, optimizer)
        runs.append(Edits(model, stepper, rank, random.Random(seed), shared_path / f"{k}"))
    token = None
    for turn in range(14):
        action = draw.choice([*ACTIONS, "step", "step"])
        for run in runs:
            run.run(action)
        assert_equal(*(run.model for run in runs), f"{hosts} {optimizer} {turn} {action}")
        if draw.random() < 0.3:
            token = zero_ext.change_token(runs[0].model)
    del token


@STAGES
@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-4, 10.0])
def test_bytes_are_those_of_marks_and_changes(on_hosts, mesh, rank, world, stage, lr):
    model, optimizer = on_hosts("each alone", lambda: MLP(57, layers=3), stage, mesh, bucket_mb=25)
    optimizer.param_groups[0]["lr"] = lr
    assert model.stats()["units"] == 1
    [(in_range, _, _)] = ranges_of(model, [[n for n, _ in model.named_parameters()]], world, stage)
    for _ in range(3):
        before = in_order(model)
        sent = model.stats()["bytes_to_hosts"]
        step(model, optimizer, rank)
        own = slice(rank * in_range, (rank + 1) * in_range)
        changed = (before != in_order(model))[own].sum().item()
        marks = GROUP // 8 * -(-in_range // GROUP)
        expected = (world - 1) * (8 + min(2 * in_range, marks + 2 * changed))
        assert model.stats()["bytes_to_hosts"] - sent == expected
    assert (changed == 0) == (lr == 0.0)


@pytest.mark.parametrize("checks", [{}, {"nonfinite": "step"}], ids=["checks", "no checks"])
@STAGES
def test_a_write_on_one_rank_is_named_and_can_be_taken_back(on_hosts, mesh, rank, stage, checks):
    """It leaves no trace in the version, and is not where two elements are compared."""
    runs = []
    for hosts in ("each alone", None):
        model, optimizer = on_hosts(hosts, lambda: MLP(57), stage, mesh)
        optimizer.retire()
        runs.append((model, zero_ext.optim.AdamW(model.parameters(), lr=1e-5, **checks)))
    for model, optimizer in runs:
        step(model, optimizer, rank)
    model, optimizer = runs[0]
    mean_square(model, batch_of(model, rank)).backward()
    values = model.layers[1].weight.data.view(-1)
    kept = values[5].item()
    values[5] = 3 + rank
    with pytest.raises(RuntimeError, match=r"layers.1.weight.* was set to other values on rank"):
        optimizer.step()
    values[5] = kept
    optimizer.step()
    optimizer.zero_grad()
    step(*runs[1], rank)
    for model, optimizer in runs:
        step(model, optimizer, rank)
    assert_equal(runs[0][0], runs[1][0], "afterwards")


@STAGES
def test_what_all_ranks_write_alike_is_kept(on_hosts, mesh, rank, stage):
    runs = [on_hosts(hosts, lambda: MLP(57), stage, mesh) for hosts in ("each alone", None)]
    for model, optimizer in runs:
        for k in range(3):
            step(model, optimizer, rank)
            model.layers[1].weight.data.view(-1)[3 + k] = 0.5 + k
            with torch.no_grad():
                model.layers[0].bias.copy_(torch.full_like(model.layers[0].bias, k))
        step(model, optimizer, rank)
    assert_equal(runs[0][0], runs[1][0], "written")


@STAGES
def test_an_update_may_bring_back_what_was_before_a_write(on_hosts, mesh, stage):
    """The new value is then that of the old master, but not that of the other ranks."""
    model, optimizer = on_hosts("each alone", lambda: nn.Linear(1083, 1, False), stage, mesh, "SGD")
    weight = model.weight
    optimizer.param_groups[0].update(lr=0.25, momentum=0.0)
    for value in (1.0, 1.25):
        weight.data.fill_(value)
        model(torch.ones(1, 1083, dtype=BF16)).sum().backward()
        if value == 1.0:
            optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.25
    assert_bits(weight, torch.ones_like(weight), "weight")
