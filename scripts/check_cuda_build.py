"""Is a build with CUDA kernels what it should be? Needs no GPU.

    PYTHONPATH=<build> python scripts/check_cuda_build.py 8.0 9.0

Checks that zero_ext imports, that its ops have CUDA kernels, and that the extension holds code for
every architecture named. Run by `make cuda-build`.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from zero_ext import _C, _build_info

OPS = [
    "accumulate_",
    "accumulate_list_",
    "accumulate_ranks_",
    "adamw_",
    "sgd_",
    "cast_",
    "flatten_",
    "find_nonfinite_",
    "adopt_writes_",
]


def cuobjdump() -> str:
    """The toolkit's, or the one that comes with triton."""
    bundled = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin/cuobjdump"
    found = shutil.which("cuobjdump") or shutil.which(bundled)
    if found is None:
        raise SystemExit(f"cuobjdump is neither on PATH nor at {bundled}. Install triton.")
    return found


def built_architectures(library: str) -> set[str]:
    command = [cuobjdump(), "--list-elf", library]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\.sm_(\d+)", listed))


def main() -> None:
    wanted = {arch.replace(".", "") for arch in sys.argv[1:]}
    print(f"{_C.__file__}\nfor torch {_build_info.TORCH_VERSION}")
    if not _build_info.CUDA:
        raise SystemExit("The build has no CUDA kernels.")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    missing = [op for op in OPS if not has_kernel(f"zero_ext::{op}", "CUDA")]
    if missing:
        raise SystemExit(f"Ops without CUDA kernels: {', '.join(missing)}.")
    built = built_architectures(_C.__file__)
    if built != wanted:
        raise SystemExit(f"Built for sm {sorted(built)}, wanted sm {sorted(wanted)}.")
    print(f"{len(OPS)} ops with kernels for sm {', '.join(sorted(built, key=int))}")


if __name__ == "__main__":
    main()
