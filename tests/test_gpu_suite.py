"""scripts/gpu_suite.sh runs all its steps, also where there is no GPU: a program in Python's place
says what it was asked for."""

import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEPS = [
    "build",
    "info",
    "test",
    "test_one_rank",
    "benchmark",
    "benchmark_step",
    "test_nccl",
    "test_two_ranks",
    "exercise",
]

INTERPRETER = """#!/bin/bash
case "$*" in
  *get_device_name*) echo some_gpu ;;
  *get_device_capability*) echo 9.0 ;;
  "- "*) exec python3 "$@" ;;
  *BROKEN*) echo "this one is broken"; exit 3 ;;
  *) echo "asked for: $*" ;;
esac
"""


def run_suite(folder: Path, *steps: str, broken: str = "nothing") -> subprocess.CompletedProcess:
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "gpu_suite.sh", folder / "scripts")
    (folder / "out").mkdir()
    interpreter = folder / "interpreter"
    interpreter.write_text(INTERPRETER.replace("BROKEN", broken))
    interpreter.chmod(0o755)
    # No compute-sanitizer and no nvcc on this path.
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(interpreter), "OUT": str(folder / "out")}
    return subprocess.run(
        ["bash", str(folder / "scripts" / "gpu_suite.sh"), *steps],
        env={**environment, "COMMIT": "abc123", "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=50,
    )


def outcomes(folder: Path) -> dict[str, str]:
    (report,) = (folder / "out").glob("some_gpu_*_abc123*.md")
    return dict(re.findall(r"^\| (\w+) \| ([^|]+) \|", report.read_text(), re.MULTILINE))


def test_every_step_is_run_and_reported(tmp_path):
    run = run_suite(tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    found = outcomes(tmp_path)
    assert {name: found[name] for name in STEPS} == dict.fromkeys(STEPS, "ok")
    assert found["memcheck"].startswith("not run")
    (report,) = (tmp_path / "out").glob("*.json")
    assert json.loads(report.read_text()) == {}
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as logs:
        said = {name: logs.extractfile(f"./{name}.log").read().decode() for name in STEPS}
    for name in STEPS:
        assert said[name].startswith("asked for: "), name
    for path in re.findall(r"(?:tests|scripts|benchmarks)/\w+\.py", " ".join(said.values())):
        assert (ROOT / path).exists(), path
    assert "--nproc-per-node 2 -m pytest" in said["test_two_ranks"]


@pytest.mark.parametrize("broken", ["tests/test_cuda_kernels.py", "bench_cuda_step"])
def test_a_step_that_fails_does_not_stop_the_others(tmp_path, broken):
    run = run_suite(tmp_path, broken=broken)
    assert run.returncode == 1
    failed = {"tests/test_cuda_kernels.py": "test", "bench_cuda_step": "benchmark_step"}[broken]
    found = outcomes(tmp_path)
    assert {name for name in STEPS if found[name] != "ok"} == {failed}
    assert found[failed] == "failed (3)"
    assert "this one is broken" in run.stdout


def test_steps_that_are_named_run_alone(tmp_path):
    run = run_suite(tmp_path, "build", "exercise")
    assert run.returncode == 0, run.stdout + run.stderr
    assert outcomes(tmp_path) == {"step": "outcome", "build": "ok", "exercise": "ok"}
    (report,) = (tmp_path / "out").glob("*.md")
    assert report.stem.endswith("_abc123_build_exercise")
