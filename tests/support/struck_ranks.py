"""Trains on several ranks, strikes some of them down, and tells what the others raise."""

import os
import random
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from launching import OUTER, forks

TIMEOUT_S = 2

# A rank that has raised stays until all have: else it would be the next one that is gone.
TRAINS = """
import datetime, pathlib, sys, time, torch
import torch.distributed as dist
import device_gloo
import lagged_device
import zero_ext

stage, rank, world, device, others = *map(int, sys.argv[1:4]), sys.argv[4], int(sys.argv[5])
store_on_rank_0 = sys.argv[6] == "True"
folder = pathlib.Path.cwd()


def meet():
    if not store_on_rank_0:
        return dist.FileStore(str(folder / "store"), world)
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "new port").write_text(str(store.port))
        (folder / "new port").rename(port)
        return store
    deadline = time.monotonic() + 20
    while not port.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(port.read_text()))


if device == "lagged":
    lagged_device.load()
    lagged_device.share_memory()
    lagged_device.set_lag(2_000)
    zero_ext._C.set_kernels(torch.device(device), lagged_device.kernels_address())
elif device == "cuda":
    device_gloo.register()
backends = {"cpu": "gloo", "lagged": "cpu:gloo,lagged:lccl", "cuda": "cpu:gloo,cuda:gccl"}
dist.init_process_group(
    backends[device],
    store=meet(), rank=rank, world_size=world,
    timeout=datetime.timedelta(seconds=20),
)
model = torch.nn.Sequential(*(torch.nn.Linear(13, 13) for _ in range(4))).to(device)
if device == "cpu":
    model.bfloat16()
zero_ext.shard(model, stage, bucket_mb=1e-5)
optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
values = torch.ones(2, 13, device=device, dtype=model[0].weight.dtype) * (rank + 1)
try:
    while True:
        model(values).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        (folder / f"began {rank}").touch()
except RuntimeError as error:
    (folder / f"raising {rank}").write_text(str(error))
    (folder / f"raising {rank}").rename(folder / f"raised {rank}")
    deadline = time.monotonic() + 10
    while len(list(folder.glob("raised *"))) < others and time.monotonic() < deadline:
        time.sleep(0.01)
"""


def errors_of_others(
    folder: Path,
    stage: int,
    device: str,
    variables: Mapping[int, Mapping[str, str]],
    struck: Collection[int],
    with_signal: signal.Signals = signal.SIGKILL,
    seed: int = 0,
    on_rank_0: bool = False,
) -> dict[int, tuple[str, float]]:
    """What each other rank raises, and how many seconds later. ``variables``: of each rank.
    ``on_rank_0``: the store where ranks meet is there, and goes with it. Else it is a file."""
    (folder / "script.py").write_text(TRAINS)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if not name.startswith(OUTER)}
    env |= {"PYTHONPATH": path, "ZERO_EXT_TIMEOUT_S": str(TIMEOUT_S), "OMP_NUM_THREADS": "1"}
    programs = []
    others = {*variables} - {*struck}

    def wait_for(is_there, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_there():
            assert time.monotonic() < deadline, said.read_text()[-3000:]
            time.sleep(0.005)

    said = folder / "said"
    with said.open("w") as out:
        try:
            for rank, own in variables.items():
                words = ["script.py", stage, rank, len(variables), device, len(others), on_rank_0]
                programs.append(
                    forks().start([*map(str, words)], folder, env | own, out.fileno(), out.fileno())
                )
            wait_for(lambda: len(list(folder.glob("began *"))) == len(variables), 50)
            time.sleep(random.Random(seed).uniform(0, 0.1))  # some steps
            for rank in struck:
                programs[rank].send_signal(with_signal)
            begin, errors = time.monotonic(), {}

            def all_raised() -> bool:
                for rank in others - {*errors}:
                    if (folder / f"raised {rank}").exists():
                        text = (folder / f"raised {rank}").read_text()
                        errors[rank] = text, time.monotonic() - begin
                return len(errors) == len(others)

            wait_for(all_raised, 4 * TIMEOUT_S + 20)
            return errors
        finally:
            for program in programs:
                program.send_signal(signal.SIGKILL)
                program.wait()
