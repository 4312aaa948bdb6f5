"""The fake accelerator of the tests, see lagged_device/__init__.py."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import run_on_ranks

CASES = Path(__file__).parents[1] / "support" / "lagged_device" / "cases.py"
GROUP_CASES = CASES.with_name("group_cases.py")
QUIETLY = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.mark.timeout(600)  # the first run compiles the device, after the CUDA emulation
def test_the_device_shows_what_does_not_wait():
    """In a process of its own: a device must exist before the first backward, and no other test
    should meet it."""
    command = [sys.executable, *QUIETLY, str(CASES)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=CASES.parent)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.timeout(600)
def test_its_process_groups_order_streams_as_nccl_does():
    """On two ranks and on three, at once: much of it is waiting."""

    def run(ranks):
        return run_on_ranks(ranks, *QUIETLY, str(GROUP_CASES), cwd=CASES.parent, timeout_s=580)

    with ThreadPoolExecutor() as pool:
        for result in pool.map(run, [2, 3]):
            assert result.returncode == 0, result.stdout + result.stderr
