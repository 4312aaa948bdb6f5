"""Starts a script on several ranks, as torchrun does, without a process that imports torch."""

import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from forks import Forks, Program

HOST = "127.0.0.1"
# Of a torchrun around this test.
OUTER = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "LOCAL_", "GROUP_", "ROLE_")


def run_on_ranks(
    ranks: int, *arguments: str, cwd: Path, timeout_s: float = 100
) -> subprocess.CompletedProcess:
    """``python *arguments`` on each rank, with one thread. A rank that fails ends the others.

    Each output stream is that of all ranks together. The return code is that of the first rank that
    failed. One rank runs without the variables of a rank. The ranks are forks of one process that
    has imported torch and zero_ext: variables that an import reads are not theirs.

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
        programs: list[Program] = []
        try:
            for env in each:
                programs.append(forks().start(arguments, cwd, env, out.fileno(), err.fileno()))
            code = _wait(programs, timeout_s, command)
        finally:
            for program in programs:
                program.send_signal(signal.SIGKILL)
                program.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def _wait(programs: Sequence[Program], timeout_s: float, command: list[str]) -> int:
    running = list(programs)
    deadline = time.monotonic() + timeout_s
    code = 0
    while running:
        left = max(0.0, deadline - time.monotonic())
        ended, _, _ = select.select(running, [], [], left)
        if not ended:
            raise subprocess.TimeoutExpired(command, timeout_s)
        for program in ended:
            running.remove(program)
            code = code or program.wait()
        if code != 0:
            for program in running:
                program.send_signal(signal.SIGTERM)
    return code


_first = threading.Lock()


def forks() -> Forks:
    """This process' own. It starts with the first program."""
    with _first:
        return _forks()


@functools.cache
def _forks() -> Forks:
    return Forks()
