"""A host dies, or stops in the middle of what it sends: every other rank raises, and names a rank.

The hosts are two of this machine's: their ranks share no memory.
"""

import re
import signal
from pathlib import Path

import pytest
from struck_ranks import TIMEOUT_S, errors_of_others

HOSTS = {rank: {"ZERO_EXT_CROSS_MEMORY": str(1 + rank // 2)} for rank in range(4)}


def check(folder: Path, stage: int, way: signal.Signals, seed: int, struck=(2, 3)) -> None:
    """The store is with rank 0: where its host is struck, nobody knows who is missing."""
    errors = errors_of_others(folder, stage, "cpu", HOSTS, struck, way, seed, on_rank_0=True)
    assert {*errors} == {0, 1, 2, 3} - {*struck}
    named = set()
    for rank, (error, seconds) in errors.items():
        assert error.startswith(f"zero_ext [rank {rank}"), error
        assert seconds < TIMEOUT_S + 8, error  # not the minutes of a store that is gone
        found = {int(r) for r in re.findall(r"\b[Rr]ank (\d)\b", error.split("]", 1)[1])} - {rank}
        assert found or 0 in struck, error
        named |= found
    # One of the two may have waited for the other, which was to pass on what comes.
    assert named & {*struck} or 0 in struck, errors


# Stages 1 and 2 send what updates change along chains of ranks, stage 3 each rank's part.
@pytest.mark.parametrize(
    ("stage", "way", "struck"),
    [
        (2, signal.SIGKILL, (2, 3)),
        (1, signal.SIGSTOP, (2, 3)),
        (3, signal.SIGSTOP, (0, 1)),
    ],
)
def test_the_other_hosts_ranks_name_its_ranks(tmp_path, stage, way, struck):
    check(tmp_path, stage, way, stage, struck)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_at_many_times(tmp_path, stage, way):
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check(folder, stage, way, seed, (0, 1) if seed % 3 == 0 else (2, 3))
