"""The launchers of docs/howto.md start its script on two pretended nodes of this host."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from code_blocks import ROOT, blocks

HOWTO = list(blocks(Path("docs/howto.md")))
SCRIPT = """
import os
from code_blocks import Model, make_batches
batches = make_batches(int(os.environ["RANK"]))
{code}
open(f"rank {{os.environ['RANK']}} of {{os.environ['WORLD_SIZE']}}", "w").close()
"""
SRUN = """#!/bin/bash
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait -n && wait -n
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames some[0-1]" ] && printf '127.0.0.1\\nsome1\\n'
"""


def under(heading: str) -> str:
    return next(block.code for block in HOWTO if block.heading == heading)


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """torchrun of this Python, Slurm's programs as above, and nothing of a torchrun around it."""
    outer = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "LOCAL_", "GROUP_", "ROLE_", "SLURM")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    modules = f"{ROOT}:{ROOT / 'tests/support'}:{os.environ.get('PYTHONPATH', '')}"
    return kept | {"PATH": path, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"} | more


@pytest.mark.slow
def test_a_notebook_starts_ranks(tmp_path):
    """Its cells are no file that a process could import."""
    code = under("In a notebook") + "assert len(by_rank) == 2 and by_rank[0] == by_rank[1]"
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(tmp_path), check=True
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["Two nodes", "Slurm"])
def test_two_nodes_train(launcher, tmp_path):
    (tmp_path / "train.py").write_text(
        SCRIPT.format(code=under("A script for GPUs and CPUs")), encoding="utf-8"
    )
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    code = under(launcher).replace("node0", "127.0.0.1").replace("29500", free_port())
    code = re.sub(r"--nproc-per-node 8", "--nproc-per-node 1", code)
    if launcher == "Slurm":
        started = [{"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "some[0-1]"}]
    else:
        started = [{"NODE": "0"}, {"NODE": "1"}]
    running = [
        subprocess.Popen(
            ["bash", "-c", code],
            cwd=tmp_path,
            env=environment(tmp_path, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in started
    ]
    outputs = [process.communicate(timeout=200)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), outputs
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank 0 of 2", "rank 1 of 2"]
