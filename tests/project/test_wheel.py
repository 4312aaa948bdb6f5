"""The wheel that holds extensions for several torches: how it is made, and what an import takes.

`make wheel-check` installs a real one. Nothing here compiles.
"""

import csv
import hashlib
import io
import runpy
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

import zero_ext
from zero_ext import _compat

ROOT = Path(__file__).parents[2]
merge = runpy.run_path(str(ROOT / "scripts" / "merge_wheels.py"))

EXTENSION = "_C.cpython-311-x86_64-linux-gnu.so"
INFO = "zero_ext-0.1.0.dist-info"


@pytest.fixture
def held(monkeypatch, tmp_path):
    """Makes the folders named, and returns what `import zero_ext` adds beside a torch."""
    path = list(zero_ext.__path__)
    monkeypatch.setattr(zero_ext, "__path__", path)
    monkeypatch.setattr(_compat, "HELD", tmp_path)

    def added(names: str, torch_version: str, torch_cuda: str | None) -> list[str]:
        before = len(path)
        for name in names.split():
            (tmp_path / name).mkdir(exist_ok=True)
        _compat._use_held_extension(torch_version, torch_cuda)
        return [Path(folder).name for folder in path[before:]]

    return added


THREE = "torch-2.13-cpu torch-2.11-cpu torch-2.9-cpu torch-2.11-cuda13"


@pytest.mark.parametrize(
    "torch_version, torch_cuda, taken",
    [
        ("2.13.0+cpu", None, "torch-2.13-cpu"),
        ("2.13.1", "13.0", "torch-2.13-cpu"),  # runs beside any build of that torch
        ("2.11.0+cu130", "13.0", "torch-2.11-cuda13"),
        ("2.11.2+cu132", "13.2", "torch-2.11-cuda13"),
        ("2.11.0+cu126", "12.6", "torch-2.11-cpu"),
        ("2.11.0", None, "torch-2.11-cpu"),
        ("2.9.1", None, "torch-2.9-cpu"),
    ],
)
def test_an_import_takes_the_extension_for_its_torch(held, torch_version, torch_cuda, taken):
    assert held(THREE, torch_version, torch_cuda) == [taken]
    assert held(THREE, torch_version, torch_cuda) == []  # it is there


@pytest.mark.parametrize("torch_version, torch_cuda", [("2.12.0", None), ("2.1.3+cu121", "12.1")])
def test_a_torch_that_the_wheel_does_not_hold_is_named(held, torch_version, torch_cuda):
    with pytest.raises(ImportError) as caught:
        held(THREE, torch_version, torch_cuda)
    assert str(caught.value) == (
        "zero_ext was installed from a wheel for torch 2.9 (cpu), 2.11 (cpu), 2.11 (cuda13), "
        f"2.13 (cpu), but torch {torch_version} is present. Build it beside this torch, in "
        "zero_ext's source folder: pip install --no-build-isolation ."
    )


def test_a_torch_of_a_cuda_that_the_wheel_does_not_hold_is_named(held):
    with pytest.raises(ImportError, match=r"2\.11 \(cuda13\), but torch 2\.11\.0 with CUDA 12\.6 "):
        held("torch-2.11-cuda13", "2.11.0", "12.6")
    with pytest.raises(ImportError, match=r"but torch 2\.11\.0 with no CUDA is present"):
        held("torch-2.11-cuda13", "2.11.0", None)


def test_a_build_for_one_torch_is_found_as_ever(held):
    assert held("", "2.13.0", None) == []


def make_wheel(
    folder: Path,
    torch_version: str,
    cuda: str | None = None,
    kernels: bool = False,
    changed: str = "",
) -> Path:
    """As setup.py's. ``kernels``: whether those for CUDA were compiled. ``changed``: one file."""
    files = {
        f"zero_ext/{EXTENSION}": f"code for {torch_version}, {kernels}",
        "zero_ext/_build_info.py": f'"""Text."""\n\nTORCH_VERSION = "{torch_version}"\n'
        f"TORCH_CUDA = {cuda!r}\nCUDA = {kernels}\n",
        "zero_ext/__init__.py": "shared",
        f"{INFO}/METADATA": "Name: zero_ext",
        f"{INFO}/WHEEL": f"Generator: of {torch_version}",
        f"{INFO}/RECORD": f"of {torch_version}",
    }
    if changed:
        files[changed] = "another text"
    folder = folder / f"{torch_version}-{kernels}"
    folder.mkdir(exist_ok=True)
    wheel = folder / "zero_ext-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def test_wheels_become_one(tmp_path, monkeypatch, capsys):
    wheels = [
        make_wheel(tmp_path, "2.11.0+cu130", "13.0"),
        make_wheel(tmp_path, "2.11.0+cu130", "13.0", kernels=True),
        make_wheel(tmp_path, "2.14.1+cpu"),
    ]
    monkeypatch.setattr(sys, "argv", ["merge_wheels.py", str(tmp_path / "out"), *map(str, wheels)])
    merge["main"]()
    assert capsys.readouterr().out.endswith("torch-2.11-cpu, torch-2.11-cuda13, torch-2.14-cpu\n")
    with zipfile.ZipFile(tmp_path / "out" / wheels[0].name) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
        archive.extractall(tmp_path / "installed")

    record = list(csv.reader(io.StringIO(files[f"{INFO}/RECORD"].decode())))
    assert [row[0] for row in record] == list(files)
    for name, digest, size in record[:-1]:
        there = urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode()
        assert (f"{digest}=", int(size)) == (f"sha256={there}", len(files[name]))
    assert record[-1] == [f"{INFO}/RECORD", "", ""]

    kept = {"zero_ext/__init__.py", *(f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD"))}
    assert {name for name in files if "_extensions/" not in name} == kept
    monkeypatch.setattr(_compat, "HELD", tmp_path / "installed/zero_ext/_extensions")
    for torch_version, cuda, code in (
        ("2.11.0+cpu", None, "code for 2.11.0+cu130, False"),
        ("2.11.0+cu130", "13.0", "code for 2.11.0+cu130, True"),
        ("2.14.0+cu130", "13.0", "code for 2.14.1+cpu, False"),
    ):
        monkeypatch.setattr(zero_ext, "__path__", [])
        _compat._use_held_extension(torch_version, cuda)
        (folder,) = zero_ext.__path__
        assert Path(folder, EXTENSION).read_text() == code
        assert Path(folder, "_build_info.py").exists()


def test_wheels_that_do_not_belong_together_are_rejected(tmp_path):
    one = make_wheel(tmp_path, "2.13.0+cpu")
    same_torch = make_wheel(tmp_path, "2.13.1+cpu")
    with pytest.raises(SystemExit, match=r"Two wheels hold '.*/torch-2\.13-cpu/_"):
        merge["merged"]([one, same_torch])
    for changed in ("zero_ext/ops.py", "zero_ext/__init__.py", f"{INFO}/METADATA"):
        other = make_wheel(tmp_path, "2.14.0", changed=changed)
        with pytest.raises(SystemExit, match=rf"differs from '.*' in \['{changed}'\]"):
            merge["merged"]([one, other])
    other_python = make_wheel(tmp_path, "2.16.0").rename(tmp_path / "zero_ext-0.1.0-cp312.whl")
    with pytest.raises(SystemExit, match=r"differs from '.*cp311.*' in its name"):
        merge["merged"]([one, other_python])
    merged = tmp_path / "merged.whl"
    merge["write"](merged, merge["merged"]([one]))
    with pytest.raises(SystemExit, match=r"holds \[\], and not one extension"):
        merge["merged"]([one, merged])
