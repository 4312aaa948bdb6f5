"""A rank is killed at any point, where devices read each other's memory.

On the device "lagged", and on a GPU that the ranks share, as scripts/gpu_suite.sh does.
"""

import os
import re
from pathlib import Path

import pytest
from struck_ranks import TIMEOUT_S, errors_of_others

DEVICE = os.environ.get("ZERO_EXT_TEST_DEVICE", "cpu")
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        DEVICE != "lagged" and "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" not in os.environ,
        reason="of one GPU that several ranks share",
    ),
]
RANKS, KILLED = 3, 1


def check(folder: Path, stage: int, seed: int) -> None:
    variables = {rank: {} for rank in range(RANKS)}
    errors = errors_of_others(folder, stage, DEVICE, variables, [KILLED], seed=seed)
    for rank, (error, seconds) in errors.items():
        assert error.startswith(f"zero_ext [rank {rank}"), error
        assert re.search(rf"\b[Rr]ank {KILLED}\b", error.split("]", 1)[1]), error
        assert seconds < TIMEOUT_S + 3, error


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_is_killed_is_named_by_all_others(tmp_path, stage):
    check(tmp_path, stage, seed=stage)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_many_ranks_that_are_killed_are_named(tmp_path, stage):
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check(folder, stage, seed)
