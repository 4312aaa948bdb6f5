"""What a machine without a GPU can say about the CUDA kernels: they compile, and compute right."""

import shutil
import subprocess
import sys
from pathlib import Path

import compiling
import pytest

EMULATION = Path(compiling.__file__).parent / "cuda_emulation"
CUDA_SOURCES = sorted(compiling.KERNELS.glob("cuda/*.cu"))


# What `make cuda-build` and `make wheel` compile for.
ARCHITECTURES = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 90, 100)]


# The CPU kernels that it compares with are those of the extension.
COMPARE = """
import ctypes, sys, torch, zero_ext

kernels = zero_ext._C.kernels_on(torch.device("cpu"))
ctypes.CDLL(sys.argv[1]).compare(ctypes.c_void_p(kernels))
"""


def compile_line(source: Path) -> list[str]:
    """The command in a file's first lines."""
    return source.read_text().split("// Compile alone: ")[1].splitlines()[0].split()


@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.stem)
def test_every_cuda_file_says_how_it_is_compiled(source):
    flags = "-std=c++20 -O3 -fmad=false -arch=sm_90 -I.".split()
    assert compile_line(source) == ["nvcc", *flags, "-c", f"kernels/cuda/{source.name}"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
def test_every_cuda_file_compiles_alone_without_torch_or_spills():
    """As its first lines say, with torch out of sight; a kernel that spills has lost its speed.

    CI compiles each file once, for the wheel and with the same strict flags (setup.py).
    """
    headers = compiling.kernel_headers()
    strict = "-Xptxas=-warn-spills,-warn-lmem-usage,-Werror -Xcompiler=-Wall,-Werror"
    strict += " -Werror=all-warnings"
    objects = []
    for source in CUDA_SOURCES:
        path = compiling.BUILD / "cuda" / f"{source.stem}.o"
        line = [flag for flag in compile_line(source) if flag != "-arch=sm_90"]
        command = [*line, *ARCHITECTURES, *strict.split()]
        objects.append(compiling.Product(path, command, [source, *headers], compiling.CSRC))
    compiling.make(objects)


@pytest.mark.timeout(600)
def test_cuda_kernels_emulated_on_the_host_give_the_bits_of_the_cpu_kernels():
    """Thread by thread, over lengths, alignments, dtypes, lists and special values."""
    # What -O2 saves of the run, its compilation costs twice.
    flags = [*compiling.KERNEL_FLAGS, "-O1", "-fno-strict-aliasing"]
    flags += [f"-I{EMULATION}", f"-I{compiling.CSRC}", "-x", "c++"]
    headers = [*compiling.kernel_headers(), *EMULATION.glob("*.h")]
    sources = [*CUDA_SOURCES, EMULATION / "compare.cpp"]
    objects = [compiling.compiled("emulation", source, flags, headers) for source in sources]
    library = compiling.linked(compiling.BUILD / "emulation" / "compare.so", objects, ["-shared"])
    compiling.make(objects)
    compiling.make([library])
    command = [sys.executable, "-c", COMPARE, library.path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "comparisons, all equal" in result.stdout
