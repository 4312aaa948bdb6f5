"""The plan of owners, without torch: balance, preference, waves and traffic."""

import importlib.util
import random
from itertools import pairwise
from pathlib import Path

import pytest

from zero_ext.ranks import owner_plan

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("plan_muon", ROOT / "benchmarks" / "plan_muon.py")
plan_muon = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plan_muon)


def plan(shapes, ranks):
    bounds = plan_muon.even_bounds([a * b for a, b in shapes], ranks)
    loads = [0] * ranks
    costs = [owner_plan.newton_schulz_cost(*shape) for shape in shapes]
    return bounds, costs, loads, owner_plan.assign(costs, bounds, loads)


@pytest.mark.parametrize("seed", range(20))
def test_loads_are_even_and_preferred_owners_hold_most(seed):
    draw = random.Random(seed)
    ranks = draw.randint(1, 9)
    shapes = [(draw.randint(1, 40), draw.randint(1, 40)) for _ in range(draw.randint(0, 60))]
    bounds, costs, loads, owners = plan(shapes, ranks)
    assert loads == [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == r)
        for r in range(ranks)
    ]
    # As for the rule of the longest processing time first.
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0)
    assert plan(shapes, ranks)[3] == owners  # every rank finds the same
    for cut, (a, b) in zip(bounds, shapes, strict=True):
        assert cut[0] == 0
        assert cut[-1] == a * b
        assert all(start <= stop for start, stop in pairwise(cut))
    if costs:  # the first one has its first choice
        first = max(range(len(costs)), key=lambda k: (costs[k], -k))
        held = owner_plan.held_by(bounds[first])
        assert held[owners[first]] == max(held.values())
    # Counted element by element.
    moved = [0] * ranks
    for owner, cut in zip(owners, bounds, strict=True):
        for e in range(cut[-1]):
            holder = next(r for r in range(ranks) if cut[r] <= e < cut[r + 1])
            moved[holder] += holder != owner
            moved[owner] += holder != owner
    assert plan_muon.travelling(owners, bounds, ranks) == moved


def test_new_parameters_follow_the_loads_that_are_there():
    loads = [100, 0, 10]
    assert owner_plan.assign([5, 50, 5], [[], [], []], loads) == [2, 1, 2]
    assert loads == [100, 50, 20]


@pytest.mark.parametrize("seed", range(20))
def test_each_owner_has_its_share_of_each_wave(seed):
    draw = random.Random(seed)
    ranks, limit = draw.randint(1, 5), draw.randint(1, 60)
    sizes = [draw.randint(0, 50) for _ in range(draw.randint(0, 60))]
    owners = [draw.randrange(ranks) for _ in sizes]
    waves = owner_plan.waves(sizes, owners, limit)
    assert sorted(k for wave in waves for k in wave) == [*range(len(sizes))]
    of_ranks = [[[k for k in wave if owners[k] == r] for wave in waves] for r in range(ranks)]
    for of_rank in of_ranks:
        for wave in of_rank:
            assert len([k for k in wave if sizes[k]]) <= 1 or sum(sizes[k] for k in wave) <= limit
        for earlier, later in pairwise(of_rank):  # no wave passes an owner by, until it is done
            assert earlier or not later
            if later:
                assert sum(sizes[k] for k in earlier) + sizes[later[0]] > limit
    assert not owner_plan.waves([], [], limit)


def test_the_plan_of_large_models_is_that_of_the_docs():
    for name, shapes in plan_muon.MODELS.items():
        for ranks in plan_muon.RANKS:
            found = plan_muon.plan(shapes, ranks)
            assert found.share <= (0.25 if ranks == 8 else 0.04), (name, ranks)
            matrices = 7 * shapes.layers
            if matrices >= 4 * ranks:
                assert found.load <= 1.1, (name, ranks)
    assert "\n".join(plan_muon.table()) in (ROOT / "docs" / "reference.md").read_text()
