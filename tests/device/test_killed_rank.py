"""A rank is killed at any point, where devices read each other's memory.

On the device "lagged", and on a GPU that the ranks share, as scripts/gpu_suite.sh does.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from launching import forks

DEVICE = os.environ.get("ZERO_EXT_TEST_DEVICE", "cpu")
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        DEVICE != "lagged" and "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" not in os.environ,
        reason="of one GPU that several ranks share",
    ),
]
RANKS, KILLED = 3, 1
TIMEOUT_S = 2

# A rank that has raised stays until all have: else it would be the next one that is gone.
TRAINS = """
import datetime, pathlib, sys, time, torch
import torch.distributed as dist
import device_gloo
import lagged_device
import zero_ext

stage, rank, world, device = *map(int, sys.argv[1:4]), sys.argv[4]
folder = pathlib.Path.cwd()
if device == "lagged":
    lagged_device.load()
    lagged_device.share_memory()
    lagged_device.set_lag(2_000)
    zero_ext._C.set_kernels(torch.device(device), lagged_device.kernels_address())
else:
    device_gloo.register()
dist.init_process_group(
    "cpu:gloo,lagged:lccl" if device == "lagged" else "cpu:gloo,cuda:gccl",
    init_method=f"file://{folder}/store", rank=rank, world_size=world,
    timeout=datetime.timedelta(seconds=20),
)
model = torch.nn.Sequential(*(torch.nn.Linear(13, 13) for _ in range(4))).to(device)
zero_ext.shard(model, stage, bucket_mb=1e-5)
optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
try:
    while True:
        model(torch.ones(2, 13, device=device) * (rank + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        (folder / f"began {rank}").touch()
except RuntimeError as error:
    (folder / f"raising {rank}").write_text(str(error))
    (folder / f"raising {rank}").rename(folder / f"raised {rank}")
    deadline = time.monotonic() + 10
    while len(list(folder.glob("raised *"))) < world - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
"""


def errors_after_a_kill(folder: Path, stage: int, seed: int) -> dict[int, tuple[str, float]]:
    """What each survivor raised, and how many seconds after the kill."""
    (folder / "script.py").write_text(TRAINS)
    support = Path(__file__).parents[1] / "support"
    path = os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "ZERO_EXT_TIMEOUT_S": str(TIMEOUT_S)}
    programs = []

    def wait_for(is_there, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_there():
            assert time.monotonic() < deadline, said.read_text()[-3000:]
            time.sleep(0.005)

    said = folder / "said"
    with said.open("w") as out:
        try:
            for rank in range(RANKS):
                arguments = map(str, ["script.py", stage, rank, RANKS, DEVICE])
                programs.append(
                    forks().start([*arguments], folder, env, out.fileno(), out.fileno())
                )
            wait_for(lambda: len(list(folder.glob("began *"))) == RANKS, 50)
            time.sleep(random.Random(seed).uniform(0, 0.1))  # some steps
            programs[KILLED].send_signal(signal.SIGKILL)
            begin, errors = time.monotonic(), {}

            def all_raised() -> bool:
                for rank in {*range(RANKS)} - {KILLED, *errors}:
                    if (folder / f"raised {rank}").exists():
                        text = (folder / f"raised {rank}").read_text()
                        errors[rank] = text, time.monotonic() - begin
                return len(errors) == RANKS - 1

            wait_for(all_raised, 4 * TIMEOUT_S + 20)
            return errors
        finally:
            for program in programs:
                program.send_signal(signal.SIGKILL)
                program.wait()


def check(folder: Path, stage: int, seed: int) -> None:
    for rank, (error, seconds) in errors_after_a_kill(folder, stage, seed).items():
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
