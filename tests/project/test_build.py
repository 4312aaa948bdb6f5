"""The build's refusals, the check at import, the info command. Nothing here compiles zero_ext."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zero_ext import _compat, info

ROOT = Path(__file__).parents[2]


def run_setup(
    tmp_path, *command: str, stub: str | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """`python setup.py --name`, with ``stub`` as the source of the module torch."""
    if stub is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(stub)
    return subprocess.run(
        [sys.executable, "setup.py", *(command or ["--name"])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def refusal(result: subprocess.CompletedProcess) -> str:
    """The only line that a refused build leaves on stderr."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("zero_ext:"))
    assert result.stderr.splitlines()[-1] == line
    return line


def test_build_without_torch_is_refused_in_one_line(tmp_path):
    line = refusal(run_setup(tmp_path, stub="raise ImportError('no torch here')"))
    assert "torch cannot be imported (no torch here)" in line
    assert "--no-build-isolation" in line


def test_build_with_an_old_torch_is_refused_in_one_line(tmp_path):
    line = refusal(run_setup(tmp_path, stub="__version__ = '2.10.1+cpu'"))
    assert "torch 2.10.1+cpu is older than 2.11" in line
    assert "--no-build-isolation" in line


def test_build_with_an_old_setuptools_is_refused_in_one_line(tmp_path):
    (tmp_path / "setuptools.py").write_text("__version__ = '65.5.0'")
    line = refusal(run_setup(tmp_path))
    assert "setuptools 65.5.0 is older than 77" in line
    assert 'pip install "setuptools>=77"' in line


def test_build_without_a_compiler_is_refused_in_one_line(tmp_path):
    folders = [f"--build-lib={tmp_path}/lib", f"--build-temp={tmp_path}/temp"]
    compiler = f"{tmp_path}/g++ -m64"
    line = refusal(run_setup(tmp_path, "build_ext", *folders, CXX=compiler))
    assert f"there is no C++ compiler ('{compiler}' does not run)" in line
    assert "Install g++ 12 or newer, or set CXX" in line


def test_cuda_is_built_as_wished_and_as_can_be(tmp_path, monkeypatch):
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    toolkit = tmp_path / "cuda"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin" / "nvcc").touch()

    def chosen(wish: str, torch_cuda: str | None, home: Path | None, *sources: str) -> bool:
        monkeypatch.setenv("ZERO_EXT_CUDA", wish)
        torch = SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda=torch_cuda))
        obstacle = setup["cuda_obstacle"](torch, home and str(home), [*sources])
        return setup["choose_cuda"](obstacle)

    possible = ("13.0", toolkit, "adamw.cu")
    assert [chosen(wish, *possible) for wish in ("auto", "0", "1")] == [True, False, True]
    for impossible, fact, remedy in (
        ((None, toolkit, "adamw.cu"), "torch 2.13.0 is a build without CUDA", "a CUDA build"),
        (("13.0", None, "adamw.cu"), "there is no CUDA toolkit", "Set CUDA_HOME"),
        (("13.0", tmp_path, "adamw.cu"), "there is no CUDA toolkit", "Set CUDA_HOME"),
    ):
        assert not chosen("auto", *impossible) and not chosen("0", *impossible)
        with pytest.raises(SystemExit) as stopped:
            chosen("1", *impossible)
        message = str(stopped.value)
        assert message.startswith(f"zero_ext: ZERO_EXT_CUDA=1, but {fact}") and remedy in message
        assert message.endswith(", or set ZERO_EXT_CUDA=0") and "\n" not in message
    with pytest.raises(SystemExit, match=r"^zero_ext: ZERO_EXT_CUDA is 'yes'"):
        chosen("yes", *possible)


def test_what_an_index_shows_is_complete_and_leads_somewhere(tmp_path):
    shown = run_setup(tmp_path, "--version", "--classifiers", "--long-description")
    assert shown.returncode == 0, shown.stderr
    version, *lines = shown.stdout.splitlines()
    project = (ROOT / "pyproject.toml").read_text()
    package = (ROOT / "zero_ext/__init__.py").read_text()
    assert f'version = "{version}"' in project and f'__version__ = "{version}"' in package
    heading = lines.index("# zero_ext")
    classifiers, text = lines[:heading], "\n".join(lines[heading:])
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', project)[1]
    assert f"Programming Language :: Python :: 3.{oldest}" in classifiers
    links = re.findall(r"\]\(([^)]*)\)", text)
    source = re.search(r'^Source = "(.*)"$', project, re.M)[1]
    assert len(links) > 20
    for link in links:
        path = link.removeprefix(f"{source}/").partition("#")[0]
        leads = "://" in path or (ROOT / path).exists()  # "": to a heading of the page itself
        assert link.startswith(("https://", "#")) and leads, link
    assert f"({source}/docs/readme.svg)" in text


def test_a_room_is_one_source_and_a_kernel_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    rooms = runpy.run_path("setup.py", run_name="setup")["rooms"]
    sources = [
        "csrc/comm/comm.cpp",
        "csrc/comm/local/mailbox.cpp",
        "csrc/kernels/cpu/adamw.cpp",
        "csrc/kernels/cuda/adamw.cu",
    ]
    compiled = rooms(sources, str(tmp_path))
    comm, local = tmp_path / "comm/room.cpp", tmp_path / "comm/local/room.cpp"
    assert compiled == sorted([*sources[2:], str(comm), str(local)])
    assert comm.read_text().splitlines() == [
        f'#include "{name.relative_to("csrc")}"' for name in sorted(Path("csrc/comm").glob("*.cpp"))
    ]
    written = comm.stat().st_mtime_ns
    local.write_text("")
    assert rooms(sources, str(tmp_path)) == compiled
    assert comm.stat().st_mtime_ns == written, "what is the same is not compiled again"
    assert "comm/local/mailbox.cpp" in local.read_text()


@pytest.mark.parametrize("own", ["", "-static-libstdc++"])
def test_torch_s_libstdcxx_serves_us_whatever_the_compiler_would_link(own, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec g++ {own} "$@"\n')
    compiler.chmod(0o755)
    shared_runtime = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["shared_runtime"]
    source = tmp_path / "number.cpp"
    source.write_text(
        "#include <sstream>\n"
        "std::string text(long n) { std::ostringstream out; out << n; return out.str(); }\n"
    )
    library = tmp_path / "number.so"
    subprocess.run(
        [compiler, "-fPIC", "-shared", source, "-o", library, *shared_runtime()],
        check=True,
    )
    found = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    assert "[libstdc++.so.6]" in found.stdout


def built_for(monkeypatch, version: str, torch_cuda: str | None = None, cuda: bool = False) -> None:
    built = SimpleNamespace(TORCH_VERSION=version, TORCH_CUDA=torch_cuda, CUDA=cuda)
    monkeypatch.setattr(_compat, "_build_info", lambda: built)


def test_import_beside_another_minor_version_names_both(monkeypatch):
    built_for(monkeypatch, "2.99.0+cpu")
    with pytest.raises(ImportError) as caught:
        _compat.check()
    message = str(caught.value)
    assert "built for torch 2.99.0+cpu" in message
    assert f"torch {torch.__version__} is present" in message
    assert "--no-build-isolation" in message


def test_import_beside_another_patch_version_is_accepted(monkeypatch):
    major, minor = torch.__version__.split(".")[:2]
    built_for(monkeypatch, f"{major}.{minor}.99+cpu")
    _compat.check()


def test_cuda_kernels_need_their_own_cuda_version(monkeypatch):
    version = str(torch.__version__)
    built_for(monkeypatch, version, torch_cuda="99.1", cuda=True)
    with pytest.raises(ImportError, match=r"with CUDA 99\.1, but torch .* is present"):
        _compat.check()


def test_cpu_build_runs_beside_any_variant_of_the_same_torch(monkeypatch):
    built_for(monkeypatch, str(torch.__version__), torch_cuda="99.1", cuda=False)
    _compat.check()


def test_missing_extension_is_named(monkeypatch, tmp_path):
    """In a checkout, in a checkout that hides an installed package, and in an installed one."""
    monkeypatch.setattr(_compat.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"source folder '.*', where it is not built"):
        _compat.check()

    checkout, installed, broken = (tmp_path / name for name in ("checkout", "installed", "broken"))
    for folder in (checkout, installed, broken):
        (folder / "zero_ext").mkdir(parents=True)
        (folder / "zero_ext" / "__init__.py").touch()
    for name in ("__init__.py", "_compat.py", "info.py"):
        for folder in (checkout, broken):
            shutil.copy(ROOT / "zero_ext" / name, folder / "zero_ext")
    (checkout / "setup.py").touch()
    found = f"zero_ext was imported from the source folder '{checkout}', where it is not built"
    commands = {
        (checkout, ""): f"{found}: install it there with torch present by pip install "
        "--no-build-isolation -e .",
        (checkout, str(installed)): f"{found}, and not from '{installed}/zero_ext', where it is "
        "installed: start Python in another folder.",
        (broken, ""): f"zero_ext's extension is missing in '{broken}/zero_ext'. Install it again: "
        "pip install --no-build-isolation .",
    }
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "torch.py").write_text(
        "__version__ = '2.13.0'\nclass version:\n    cuda = None\n"
    )
    for (folder, path), message in commands.items():
        run = subprocess.run(
            [sys.executable, "-S", "-m", "zero_ext.info"],  # without what is installed here
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "stub"), path])},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode != 0 and message in run.stderr, run.stderr


def test_build_recorded_the_torch_that_is_present():
    built = _compat._build_info()
    assert torch.__version__ == built.TORCH_VERSION
    assert torch.version.cuda == built.TORCH_CUDA


def test_info_prints_versions_and_survives_a_missing_fact(monkeypatch, capsys):
    monkeypatch.setitem(info.FACTS, "processors", lambda: 1 // 0)
    info.main()
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    facts = {name.strip(): value.strip() for name, value in lines.items()}
    assert facts["torch"] == torch.__version__
    assert facts["built for torch"] == torch.__version__
    assert facts["CUDA kernels"] in ("yes", "no")
    assert "gloo" in facts["torch's backends"]
    assert facts["processors"].startswith("unknown (ZeroDivisionError")


def test_large_parts_of_torch_are_imported_when_they_are_used():
    """Each of these takes torch as long as its own import. A training needs what fully_shard does:
    a checkpoint's modules, for one, come with the first checkpoint."""
    program = """
import sys, torch
import torch.distributed as dist

def modules_of(act):
    before = {*sys.modules}
    act()
    print(*sorted({*sys.modules} - before))

def train(model, kind):
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 7)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict(), optimizer.state_dict()

def train_with_torch():
    from torch.distributed.fsdp import fully_shard
    train(fully_shard(torch.nn.Linear(7, 5)), torch.optim.AdamW)

def train_here():
    for stage in range(4):
        train(zero_ext.shard(torch.nn.Linear(7, 5), stage), zero_ext.optim.AdamW)
    train(torch.nn.Linear(7, 5), zero_ext.optim.AdamW)
    train(torch.nn.Linear(7, 5), lambda p, lr: zero_ext.optim.wrap(torch.optim.Adagrad, p, lr=lr))

modules_of(lambda: globals().update(zero_ext=__import__("zero_ext")))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
modules_of(train_with_torch)
modules_of(train_here)
assert {*zero_ext.__all__} <= {*dir(zero_ext)}
for name in zero_ext.__all__:
    assert getattr(zero_ext, name) is getattr(zero_ext, name), name
from zero_ext import *
assert shard is zero_ext.shard and optim.AdamW is zero_ext.optim.AdamW
try:
    zero_ext.shards
except AttributeError as error:
    print(error)
dist.destroy_process_group()
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    *imports, missing = run.stdout.splitlines()
    names, torch_s, ours = (line.split() for line in imports)
    assert all(name.startswith("zero_ext") for name in names), names
    assert not any(name.startswith(("zero_ext.engine", "zero_ext.tensor")) for name in names)
    assert "torch.distributed.tensor" in torch_s
    assert "zero_ext.engine" in ours and "zero_ext.checkpoint" not in ours
    assert all(name.startswith("zero_ext") for name in ours), ours
    assert missing == "module 'zero_ext' has no attribute 'shards'"
