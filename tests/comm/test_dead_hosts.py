"""A host dies, or stops in the middle of what it sends: every other rank raises, and names a rank.

The hosts are two of this machine's: their ranks share no memory.
"""

import re
import signal
from pathlib import Path

import pytest
from struck_ranks import TIMEOUT_S, errors_of_others

HOSTS = {rank: {"ZERO_EXT_CROSS_MEMORY": str(1 + rank // 2)} for rank in range(4)}


def check(folder: Path, stage: int, way: signal.Signals, seed: int) -> None:
    errors = errors_of_others(folder, stage, "cpu", HOSTS, [2, 3], way, seed)
    assert {*errors} == {0, 1}
    named = set()
    for rank, (error, seconds) in errors.items():
        assert error.startswith(f"zero_ext [rank {rank}"), error
        found = {int(r) for r in re.findall(r"\b[Rr]ank (\d)\b", error.split("]", 1)[1])} - {rank}
        assert found, error
        named |= found
        assert seconds < TIMEOUT_S + 3, error
    # One of the two may have waited for the other, which was to pass on what comes.
    assert named & {2, 3}, errors


# Stages 1 and 2 send what updates change along chains of ranks, stage 3 each rank's part.
@pytest.mark.parametrize(
    ("stage", "way"), [(2, signal.SIGKILL), (1, signal.SIGSTOP), (3, signal.SIGSTOP)]
)
def test_the_other_hosts_ranks_name_its_ranks(tmp_path, stage, way):
    check(tmp_path, stage, way, seed=stage)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_at_many_times(tmp_path, stage, way):
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check(folder, stage, way, seed)
