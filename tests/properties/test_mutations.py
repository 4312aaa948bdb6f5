"""Small models and loops that are mutated at random, against plain PyTorch in one process.

make mutations              # 1,000 programs for each stage
make mutations PROGRAMS=5000
"""

import collections
import os

import pytest
from mutated_models import MODELS
from mutated_runs import run_all
from mutations import MUTATIONS, draw_plan

PROGRAMS = int(os.environ.get("PROGRAMS", 1000))
AT_ONCE = 100
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def check(seeds, stage: int) -> None:
    verdicts = run_all(seeds, stage)
    faults = {
        f"seed {seed}, {draw_plan(seed).base.__name__}, {draw_plan(seed).names}": verdict
        for seed, verdict in verdicts.items()
        if verdict.is_fault
    }
    assert not faults, "\n".join(f"{where}: {v.kind}: {v.text}" for where, v in faults.items())
    kinds = collections.Counter(verdict.kind for verdict in verdicts.values())
    assert kinds["same"] >= 0.9 * len(verdicts), kinds  # else the programs show little


def test_every_mutation_is_drawn_with_every_model():
    drawn = {(draw_plan(seed).base, draw_plan(seed).names[0]) for seed in range(PROGRAMS)}
    assert len(drawn) >= len(MODELS) * len(MUTATIONS)


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.world(min=2)
@STAGES
def test_mutated_programs_are_one_process(stage, mesh):
    check(range(stage, PROGRAMS, 37), stage)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.dist
@pytest.mark.host
@pytest.mark.world(min=2)
@STAGES
@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))
def test_all_mutated_programs_are_one_process(stage, first, mesh):
    check(range(first, min(first + AT_ONCE, PROGRAMS)), stage)
