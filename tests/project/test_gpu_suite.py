"""scripts/gpu_suite.sh runs all its steps, also where there is no GPU: a program in Python's place
says what it was asked for."""

import ast
import json
import os
import re
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest

import zero_ext

ROOT = Path(__file__).parents[2]
STEPS = [
    "build",
    "info",
    "exercise",
    "test",
    "test_one_rank",
    "test_devices",
    "test_gathers",
    "test_recovery",
    "test_owners",
    "test_nccl",
    "test_in_place_2",
    "test_in_place_4",
    "test_in_place_8",
    "test_killed_rank",
    "benchmark",
    "benchmark_step",
]

INTERPRETER = """#!/bin/bash
case "$*" in
  *sysconfig*) echo "$PWD/bin" ;;
  *get_device_name*) echo some_gpu 9.0 ;;
  "- "*) exec python3 "$@" ;;
  *BROKEN*) echo "this one is broken"; exit 3 ;;
  *KILLED*) kill -KILL "$SUITE" ;;
  *) echo "asked for: $*"; echo "backends: ${ZERO_EXT_TEST_BACKENDS:-}"
     echo "direct: ${ZERO_EXT_TEST_DIRECT:-}"; echo "preload: ${LD_PRELOAD:-}" ;;
esac
"""

SANITIZER = """#!/bin/bash
echo "sanitizer: $*" >> "$OUT/sanitizer"
echo "caching: ${PYTORCH_NO_CUDA_MEMORY_CACHING:-yes}"
case "$*" in
  *torch.ones*) echo "ANSWER" ;;
esac
"""


def make_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run_suite(
    folder: Path,
    *steps: str,
    broken: str = "nothing",
    killed: str = "nothing",
    seconds: int | None = None,
    sanitizer: str | None = None,
) -> subprocess.CompletedProcess:
    """``broken``: part of the command that fails; ``killed``: of that during which the suite is
    killed; ``seconds``: what the suite has; ``sanitizer``: what compute-sanitizer says first."""
    script = (ROOT / "scripts" / "gpu_suite.sh").read_text()
    if seconds is not None:
        assert script.count("\nALL_SECONDS=515\n") == 1
        script = script.replace("ALL_SECONDS=515", f"ALL_SECONDS={seconds}")
    make_program(folder / "scripts" / "gpu_suite.sh", script)
    (folder / "out").mkdir()
    interpreter = folder / "interpreter"
    make_program(interpreter, INTERPRETER.replace("BROKEN", broken).replace("KILLED", killed))
    if sanitizer is not None:
        make_program(folder / "bin" / "compute-sanitizer", SANITIZER.replace("ANSWER", sanitizer))
    # No nvcc on this path, and no other compute-sanitizer.
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PYTHON": str(interpreter)}
    return subprocess.run(
        ["bash", "-c", 'SUITE=$$ exec bash scripts/gpu_suite.sh "$@"', "suite", *steps],
        cwd=folder,
        env={
            **environment,
            "OUT": str(folder / "out"),
            "COMMIT": "abc123",
            "HOME": os.environ.get("HOME", "/"),
            "ZERO_EXT_NCCL": os.environ.get("ZERO_EXT_NCCL", ""),
        },
        capture_output=True,
        text=True,
        timeout=50,
    )


def outcomes(folder: Path) -> dict[str, str]:
    (report,) = (folder / "out").glob("some_gpu_*_abc123*.md")
    return dict(re.findall(r"^\| (\w+) \| ([^|]+) \|", report.read_text(), re.MULTILINE))


def log(folder: Path, name: str) -> str:
    with tarfile.open(folder / "out" / "logs.tar.gz") as logs:
        return logs.extractfile(f"./{name}.log").read().decode()


def test_every_step_is_run_and_reported(tmp_path):
    run = run_suite(tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    found = outcomes(tmp_path)
    assert {name: found[name] for name in STEPS} == dict.fromkeys(STEPS, "ok")
    assert found["memcheck"].startswith("not run")
    assert found["test_two_of_nccl"] == "not run: ZERO_EXT_NCCL names no libnccl"
    (report,) = (tmp_path / "out").glob("*.json")
    assert json.loads(report.read_text()) == {}
    said = {name: log(tmp_path, name) for name in STEPS}
    for name in STEPS:
        assert said[name].startswith("asked for: "), name
    for path in re.findall(r"(?:tests|scripts|benchmarks)/[\w/.]+", " ".join(said.values())):
        assert (ROOT / path).exists(), path
    assert "--nproc-per-node 2 -m pytest" in said["test_devices"]
    assert "backends: cpu:gloo\ndirect: \n" in said["test_devices"]
    for ranks in (2, 4, 8):
        in_place = said[f"test_in_place_{ranks}"]
        assert f"--nproc-per-node {ranks} -m pytest" in in_place
        assert "backends: cpu:gloo,cuda:gccl\ndirect: 1\n" in in_place
        for name in re.findall(r"test_stage3\.py::(\w+)", in_place):
            assert f"def {name}(" in (ROOT / "tests/gather/test_stage3.py").read_text()


@pytest.mark.parametrize("broken", ["tests/kernels/test_cuda_kernels.py", "bench_cuda_step"])
def test_a_step_that_fails_does_not_stop_the_others(tmp_path, broken):
    run = run_suite(tmp_path, broken=broken)
    assert run.returncode == 1
    failed = {"tests/kernels/test_cuda_kernels.py": "test", "bench_cuda_step": "benchmark_step"}[
        broken
    ]
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


def test_another_nccl_is_preloaded_by_its_step_alone(tmp_path, monkeypatch):
    library = tmp_path / "libnccl.so.2"
    library.touch()
    monkeypatch.setenv("ZERO_EXT_NCCL", str(library))
    run = run_suite(tmp_path, "test_nccl", "test_two_of_nccl")
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"preload: {library}\n" in log(tmp_path, "test_two_of_nccl")
    assert "preload: \n" in log(tmp_path, "test_nccl")


def test_a_run_that_is_killed_leaves_what_it_finished(tmp_path):
    run = run_suite(tmp_path, killed="bench_cuda_step")
    assert run.returncode == -signal.SIGKILL
    finished = STEPS[: STEPS.index("benchmark_step")]
    found = outcomes(tmp_path)
    assert {name: found.get(name) for name in STEPS if name in found} == dict.fromkeys(
        finished, "ok"
    )
    for name in finished:
        assert log(tmp_path, name).startswith("asked for: "), name
    (report,) = (tmp_path / "out").glob("*.json")
    assert json.loads(report.read_text()) == {}


def test_compute_sanitizer_is_asked_once_whether_it_works(tmp_path):
    run = run_suite(tmp_path, "memcheck", "racecheck", sanitizer="all is well")
    assert run.returncode == 0, run.stdout + run.stderr
    assert outcomes(tmp_path) == {"step": "outcome", "memcheck": "ok", "racecheck": "ok"}
    asked, *at_once = (tmp_path / "out" / "sanitizer").read_text().splitlines()
    memcheck, racecheck = sorted(at_once)
    assert "torch.ones" in asked
    assert "--tool memcheck" in memcheck and "--report-api-errors no" in memcheck
    assert (
        "--tool racecheck" in racecheck and "--kernel-name kernel_substring=zero_ext" in racecheck
    )
    assert log(tmp_path, "memcheck") == "caching: 1\n"
    assert log(tmp_path, "racecheck") == "caching: yes\n"


def test_compute_sanitizer_may_refuse_the_device(tmp_path):
    run = run_suite(tmp_path, "memcheck", "racecheck", sanitizer="Device not supported")
    assert run.returncode == 0, run.stdout + run.stderr
    reason = "not run: compute-sanitizer does not support this device here"
    assert outcomes(tmp_path) == {"step": "outcome", "memcheck": reason, "racecheck": reason}
    assert len((tmp_path / "out" / "sanitizer").read_text().splitlines()) == 1


def test_compute_sanitizer_is_not_asked_where_no_time_is_left(tmp_path):
    run = run_suite(tmp_path, "memcheck", seconds=40, sanitizer="all is well")
    assert run.returncode == 1
    assert outcomes(tmp_path) == {"step": "outcome", "memcheck": "not run: no time was left"}
    assert not (tmp_path / "out" / "sanitizer").exists()


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts"])
def test_programs_ask_for_nothing_that_is_gone(folder):
    """Also those that need a GPU, or hours."""
    modules = {"zero_ext": zero_ext, "ops": zero_ext.ops, "_C": zero_ext._C}
    gone = [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted((ROOT / folder).glob("**/*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in modules and not hasattr(modules[node.value.id], node.attr)
    ]
    assert gone == []


def test_a_benchmark_that_is_stopped_keeps_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import report

    def rows():
        yield report.Row("first", "1 ms", "2 ms", 0.5, "at most", 1.0)
        yield report.Row("second", "3 ms", "2 ms", 1.5, "at most", 1.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report.write("races", rows(), tmp_path)
    kept = json.loads((tmp_path / "races.json").read_text())["rows"]
    assert [(row["name"], row["met"]) for row in kept] == [("first", True), ("second", False)]
    table = (tmp_path / "races.md").read_text()
    assert table.endswith("| second | 3 ms | 2 ms | 1.500 | at most 1.0 | NO |\n")
    assert capsys.readouterr().out in table
