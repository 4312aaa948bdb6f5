"""Compiles what tests need beside the extension, once for each content of its sources.

Results stay in build/tests. Beside each lies its key, a hash of the command and of all inputs. A
result whose key has not changed is not made again. ccache, where it is on PATH, serves new clones.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
KERNELS = CSRC / "kernels"
BUILD = ROOT / "build" / "tests"
COMPILER = os.environ.get("CXX", "g++")
CCACHE = ["ccache"] if shutil.which("ccache") else []
JOBS = int(os.environ.get("MAX_JOBS", "2"))
FLAGS = "-std=c++20 -fPIC -fvisibility=hidden -Werror".split()
# As in setup.py: what the bits of kernels depend on.
KERNEL_FLAGS = [*FLAGS, "-O2", "-ffp-contract=off", "-fno-math-errno"]


class Product(NamedTuple):
    """A file, the command that makes it but for its name, and the files that the command reads."""

    path: Path
    command: list[str]
    inputs: list[Path]
    cwd: Path = ROOT

    @property
    def key_path(self) -> Path:
        return self.path.with_name(self.path.name + ".key")

    def key(self) -> str:
        digest = hashlib.sha256(repr(self.command).encode())
        for path in self.inputs:
            digest.update(path.read_bytes())
        return digest.hexdigest()


def compiled(folder: str, source: Path, flags: Sequence[str], headers: Sequence[Path]) -> Product:
    """The object of one source, in a folder of build/tests."""
    path = BUILD / folder / f"{source.parent.name}_{source.stem}.o"
    return Product(path, [*CCACHE, COMPILER, *flags, "-c", str(source)], [source, *headers])


def linked(path: Path, objects: Sequence[Product], flags: Sequence[str] = ()) -> Product:
    command = [COMPILER, *(str(each.path) for each in objects), *flags]
    return Product(path, command, [each.key_path for each in objects])


def kernel_headers() -> list[Path]:
    return sorted(KERNELS.rglob("*.h"))


def make(products: Sequence[Product]) -> None:
    """Makes what has changed. Processes that call it together wait for the first.

    Raises:
        RuntimeError: a command has failed; with what it said.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock, ThreadPoolExecutor(JOBS) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        list(pool.map(_make_one, products))


def _make_one(product: Product) -> None:
    path, key = product.path, product.key()
    if path.exists() and product.key_path.exists() and product.key_path.read_text() == key:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    command = ["nice", "-n", "5", *product.command, "-o", str(unfinished)]
    run = subprocess.run(command, cwd=product.cwd, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
    os.replace(unfinished, path)  # another process may have the old one loaded
    product.key_path.write_text(key)
