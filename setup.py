"""Builds zero_ext._C. Everything static is in pyproject.toml.

Environment variables, beside those of torch's BuildExtension (MAX_JOBS, CUDA_HOME,
TORCH_CUDA_ARCH_LIST):
- ZERO_EXT_CUDA=auto|0|1 decides about CUDA; auto asks the toolkit and torch.version.cuda. A GPU
  need not be present.
- ZERO_EXT_WERROR=1 asks compilers for warnings and makes them errors. The Makefile sets it.
- CFLAGS=-O1, or another level, instead of -O3: half of the time to compile, and slow kernels.
- ZERO_EXT_SANITIZE=address,undefined or thread builds for these sanitizers (make sanitize, tsan).
"""

import glob
import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import setuptools

OLDEST_TORCH = (2, 11)
OLDEST_SETUPTOOLS = 77  # the first that reads all of pyproject.toml
# Where the links of README.md lead from the page of a package index.
SOURCE_URL = "https://zero-ext.example/source"
CXX_FLAGS = [
    "-g0",
    "-std=c++20",
    "-fvisibility=hidden",
    # Contraction would fuse a*b+c where the kernels do not say so, and bits are promised.
    "-ffp-contract=off",
    # A square root is one instruction then; its value is the same.
    "-fno-math-errno",
    # Python's own flags have -fwrapv, which costs accumulate_ranks 15 %.
    "-fno-wrapv",
    # at::parallel_for is serial without it. Not linked: torch's OpenMP runtime serves both.
    "-fopenmp",
]
# No contraction here either, and no symbols that could meet those of another extension.
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-Xcompiler=-fvisibility=hidden"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# A kernel that spills registers has lost its speed.
NVCC_WARNINGS = [
    "-Xptxas=-warn-spills,-warn-lmem-usage,-Werror",
    "-Werror=all-warnings",
    "-Xcompiler=-Wall,-Werror",
]
INSTALL_COMMAND = "pip install --no-build-isolation ."


def stop(fact: str, remedy: str) -> None:
    raise SystemExit(f"zero_ext: {fact}. {remedy}")


def check_setuptools() -> None:
    if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
        stop(
            f"setuptools {setuptools.__version__} is older than {OLDEST_SETUPTOOLS}",
            f'Install a newer one: pip install "setuptools>={OLDEST_SETUPTOOLS}"',
        )


def check_compiler(command: str) -> None:
    """``command``: of the C++ compiler, perhaps behind ccache."""
    try:
        subprocess.run([*shlex.split(command), "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        stop(
            f"there is no C++ compiler ('{command}' does not run)",
            "Install g++ 12 or newer, or set CXX to the command of another one",
        )


def sanitizers() -> list[str]:
    named = os.environ.get("ZERO_EXT_SANITIZE")
    return [f"-fsanitize={named}", "-fno-sanitize=vptr"] if named else []


def link_flags() -> list[str]:
    return [*sanitizers(), *shared_runtime()]


def shared_runtime() -> list[str]:
    """The libstdc++ that torch uses, for the linker: some toolchains would link one of their own.

    The first number in the text of an error would then end the process, because a stream of one
    copy looks for the other's locale.
    """
    files = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [file for file in dict.fromkeys(files) if "/libstdc++.so" in file]


def readme() -> str:
    """README.md with links that lead somewhere from everywhere."""
    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)", f"]({SOURCE_URL}/", text)


def import_torch():
    oldest = ".".join(map(str, OLDEST_TORCH))
    try:
        import torch
    except ImportError as error:
        stop(
            f"torch cannot be imported ({error})",
            f"Install torch >= {oldest}, then build in the same environment: {INSTALL_COMMAND}",
        )
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        stop(
            f"torch {torch.__version__} is older than {oldest}",
            f"Install a newer one, then build in the same environment: {INSTALL_COMMAND}",
        )
    return torch


def cuda_obstacle(torch, cuda_home: str | None, sources: list[str]) -> tuple[str, str] | None:
    """Why CUDA kernels cannot be built here, and the remedy; None when they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA", "Install a CUDA build of torch"
    if cuda_home is None or not Path(cuda_home, "bin", "nvcc").exists():
        return "there is no CUDA toolkit (bin/nvcc)", "Set CUDA_HOME to the toolkit's directory"
    if not sources:
        return "this version of zero_ext has no CUDA kernels yet", "Build for the CPU"
    return None


def choose_cuda(obstacle: tuple[str, str] | None) -> bool:
    wish = os.environ.get("ZERO_EXT_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        stop(f"ZERO_EXT_CUDA is {wish!r}", "Set it to auto, 0 or 1")
    if wish == "1" and obstacle is not None:
        fact, remedy = obstacle
        stop(f"ZERO_EXT_CUDA=1, but {fact}", f"{remedy}, or set ZERO_EXT_CUDA=0")
    return wish != "0" and obstacle is None


def compile_flags(included: list[str]) -> dict[str, list[str]]:
    """The flags of both compilers. ``included``: folders whose headers may cause warnings."""
    cxx, nvcc = list(CXX_FLAGS), list(NVCC_FLAGS)
    # CFLAGS come first, and the last of these flags counts.
    if not re.search(r"(^|\s)-O", os.environ.get("CFLAGS", "")):
        cxx.insert(0, "-O3")
    if os.environ.get("ZERO_EXT_WERROR") == "1":
        cxx += [*WARNINGS, *(f"-isystem{folder}" for folder in included)]
        nvcc += NVCC_WARNINGS
    if sanitizers():
        cxx += ["-O1", "-g1", "-fno-omit-frame-pointer", *sanitizers()]
    return {"cxx": cxx, "nvcc": nvcc}


def rooms(sources: list[str], folder: str) -> list[str]:
    """What is compiled for ``sources``: one file in ``folder`` for each room, which includes them.

    Torch's headers take nine tenths of a file's time, and a room needs them once. Kernels include
    none and are compiled alone.
    """
    compiled = [name for name in sources if name.startswith("csrc/kernels/")]
    for room in sorted({Path(name).parent for name in sources if name not in compiled}):
        file = Path(folder, *room.parts[1:], "room.cpp")
        lines = (f'#include "{name.relative_to("csrc")}"\n' for name in sorted(room.glob("*.cpp")))
        text = "".join(lines)
        # ninja compiles what is younger than its object.
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        compiled.append(str(file))
    return sorted(compiled)


def main() -> None:
    check_setuptools()
    torch = import_torch()
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

    sources = sorted(glob.glob("csrc/**/*.cpp", recursive=True))
    cuda_sources = sorted(glob.glob("csrc/kernels/cuda/*.cu"))
    cuda = choose_cuda(cuda_obstacle(torch, CUDA_HOME, cuda_sources))
    build_info = (
        '"""Written by setup.py: what zero_ext._C was built for."""\n\n'
        f'TORCH_VERSION = "{torch.__version__}"\n'
        f"TORCH_CUDA = {torch.version.cuda!r}  # torch.version.cuda\n"
        f"CUDA = {cuda}  # whether CUDA kernels were compiled\n"
    )

    class BuildAndRecord(BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            # An editable install builds in a temporary directory by default, so that each change of
            # one file would compile all of them.
            if getattr(self, "editable_mode", False):
                self.build_temp = "build/editable"
            # Another torch makes all objects old, which ninja cannot tell from their dependencies.
            self.build_temp = os.path.join(self.build_temp, f"torch-{torch.__version__}")

        def build_extension(self, ext):
            ext.sources = rooms(ext.sources, os.path.join(self.build_temp, "rooms"))
            super().build_extension(ext)

        def run(self):
            check_compiler(cpp_extension.get_cxx_compiler())
            super().run()
            package = Path("zero_ext") if self.inplace else Path(self.build_lib, "zero_ext")
            (package / "_build_info.py").write_text(build_info)

    included = cpp_extension.include_paths("cuda" if cuda else "cpu")
    included.append(sysconfig.get_path("include"))
    extension = (CUDAExtension if cuda else CppExtension)(
        "zero_ext._C",
        sources + (cuda_sources if cuda else []),
        include_dirs=[str(Path("csrc").resolve())],
        define_macros=[("ZERO_EXT_CUDA", "1")] if cuda else [],
        extra_compile_args=compile_flags(included),
        extra_link_args=link_flags(),
    )
    setuptools.setup(
        ext_modules=[extension],
        cmdclass={"build_ext": BuildAndRecord},
        long_description=readme(),
        long_description_content_type="text/markdown",
    )


if __name__ == "__main__":
    main()
