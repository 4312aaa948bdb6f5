"""Starts a script on several ranks, as torchrun does, without a process more that imports torch."""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

HOST = "127.0.0.1"
# Of a torchrun around this test.
OUTER = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "LOCAL_", "GROUP_", "ROLE_")


def run_on_ranks(
    ranks: int, *arguments: str, cwd: Path, timeout_s: float = 100
) -> subprocess.CompletedProcess:
    """``python *arguments`` on each rank, with one thread. A rank that fails ends the others.

    Each output stream is that of all ranks together. The return code is that of the first rank that
    failed. One rank runs without the variables of a rank.

    Raises:
        subprocess.TimeoutExpired: the ranks have not ended within ``timeout_s``. They are killed.
    """
    command = [sys.executable, *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(OUTER)}
    variables["OMP_NUM_THREADS"] = "1"
    each = [variables]
    if ranks > 1:
        # The ranks' store is here, as it is in torchrun: its port cannot be another program's.
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        variables |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port)}
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        variables |= {"TORCHELASTIC_RUN_ID": "tests"}
        each = [{**variables, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        processes = [
            subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=err) for env in each
        ]
        try:
            code = _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def _wait(processes: Sequence[subprocess.Popen], timeout_s: float) -> int:
    running = {os.pidfd_open(process.pid): process for process in processes}
    deadline = time.monotonic() + timeout_s
    code = 0
    try:
        while running:
            left = max(0.0, deadline - time.monotonic())
            ended, _, _ = select.select(list(running), [], [], left)
            if not ended:
                raise subprocess.TimeoutExpired(processes[0].args, timeout_s)
            for descriptor in ended:
                process = running.pop(descriptor)
                os.close(descriptor)
                code = code or process.wait()
            if code != 0:
                for process in running.values():
                    process.terminate()
    finally:
        for descriptor in running:
            os.close(descriptor)
    return code
