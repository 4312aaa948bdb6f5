"""What a machine without a GPU can say about the CUDA kernels: they compile, and compute right."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
KERNELS = CSRC / "kernels"
EMULATION = ROOT / "tests" / "support" / "cuda_emulation"
CUDA_SOURCES = sorted(KERNELS.glob("cuda/*.cu"))
COMPILER = os.environ.get("CXX", "g++")
JOBS = int(os.environ.get("MAX_JOBS", "2"))


def run_all(commands: list[list[str]]) -> None:
    def run(command):
        return subprocess.run(command, cwd=CSRC, capture_output=True, text=True)

    with ThreadPoolExecutor(JOBS) as pool:
        for command, result in zip(commands, pool.map(run, commands), strict=True):
            said = result.stdout + result.stderr
            assert result.returncode == 0, f"{' '.join(command)}\n{said}"
            assert "warning" not in said, f"{' '.join(command)}\n{said}"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
def test_every_cuda_file_compiles_alone_without_torch_or_spills(tmp_path):
    """As its first lines say, with torch out of sight; a kernel that spills has lost its speed."""
    commands = []
    for source in CUDA_SOURCES:
        line = source.read_text().split("// Compile alone: ")[1].splitlines()[0]
        strict = "-Xptxas=-warn-spills,-warn-lmem-usage -Xcompiler=-Wall,-Werror".split()
        commands.append([*line.split(), *strict, "-o", str(tmp_path / f"{source.stem}.o")])
    run_all(commands)


def test_cuda_kernels_emulated_on_the_host_give_the_bits_of_the_cpu_kernels(tmp_path):
    """Thread by thread, over lengths, alignments, dtypes, lists and special values."""
    flags = "-std=c++20 -O2 -ffp-contract=off -fno-math-errno -fno-strict-aliasing".split()
    flags += [f"-I{EMULATION}", f"-I{CSRC}"]
    sources = [*CUDA_SOURCES, *sorted(KERNELS.glob("cpu/*.cpp")), EMULATION / "compare.cpp"]
    objects = [str(tmp_path / f"{source.parent.name}_{source.stem}.o") for source in sources]
    compilers = ["ccache", COMPILER] if shutil.which("ccache") else [COMPILER]
    run_all(
        [
            [*compilers, *flags, "-x", "c++", "-c", str(source), "-o", target]
            for source, target in zip(sources, objects, strict=True)
        ]
    )
    run_all([[COMPILER, *objects, "-o", str(tmp_path / "compare")]])
    result = subprocess.run([tmp_path / "compare"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout
    assert "comparisons, all equal" in result.stdout
