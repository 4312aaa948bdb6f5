"""Does the compiled extension fit the torch that is present? Called before anything else here."""

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BUILD_COMMAND = "pip install --no-build-isolation ."
# A wheel of `make wheel` holds an extension for each of several torches in folders of this folder,
# with names such as torch-2.13-cpu and torch-2.13-cuda13. Any other build has none.
HELD = Path(__file__).with_name("_extensions")


def check() -> None:
    """Compare the torch that zero_ext._C was built for with the one present.

    torch's C++ interface changes with each minor version, and a mismatch otherwise shows as a
    missing symbol or a crash. Kernels for CUDA also need the CUDA major version they were built
    for; a build without them runs beside any variant of torch.

    Of a wheel that holds several extensions, the one for this torch is taken. That for the CUDA
    major version is preferred to the one without CUDA kernels.

    Raises:
        ImportError: naming both versions and the remedy, or that the extension is not built.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"zero_ext needs torch, which cannot be imported ({error}). Install torch >= 2.11, "
            f"then build zero_ext in the same environment: {BUILD_COMMAND}"
        ) from error
    present, present_cuda = str(torch.__version__), torch.version.cuda
    _use_held_extension(present, present_cuda)
    built = _build_info()
    remedy = f"Build it again beside this torch: {BUILD_COMMAND}"
    if _minor(built.TORCH_VERSION) != _minor(present):
        raise ImportError(
            f"zero_ext was built for torch {built.TORCH_VERSION}, but torch {present} is present. "
            + remedy
        )
    if built.CUDA and _major(built.TORCH_CUDA) != _major(present_cuda):
        raise ImportError(
            f"zero_ext was built for torch {built.TORCH_VERSION} with CUDA {built.TORCH_CUDA}, but "
            f"torch {present} with {f'CUDA {present_cuda}' if present_cuda else 'no CUDA'} is "
            f"present. {remedy}"
        )


def _use_held_extension(present: str, present_cuda: str | None) -> None:
    """Adds its folder to the package's path, so that _C and _build_info are imported from there."""
    folders = [tuple(folder.name.split("-")[1:]) for folder in HELD.glob("torch-*")]
    held = sorted(folders, key=lambda each: ([int(part) for part in each[0].split(".")], each[1]))
    if not held:
        return
    torch_minor = ".".join(_minor(present))
    cuda_major = _major(present_cuda)
    for kind in ([f"cuda{cuda_major}"] if cuda_major else []) + ["cpu"]:
        if (torch_minor, kind) in held:
            path = sys.modules[__package__].__path__
            folder = str(HELD / f"torch-{torch_minor}-{kind}")
            if folder not in path:
                path.append(folder)
            return
    names = ", ".join(f"{version} ({kind})" for version, kind in held)
    found = f"torch {present}"
    if torch_minor in dict(held):
        found += f" with {f'CUDA {present_cuda}' if present_cuda else 'no CUDA'}"
    raise ImportError(
        f"zero_ext was installed from a wheel for torch {names}, but {found} is present. Build it "
        f"beside this torch, in zero_ext's source folder: {BUILD_COMMAND}"
    )


def _build_info() -> ModuleType:
    if None in map(importlib.util.find_spec, ("zero_ext._build_info", "zero_ext._C")):
        raise ImportError(_why_not_built(Path(__file__).parent))
    return importlib.import_module("zero_ext._build_info")


def _why_not_built(package: Path) -> str:
    """``package``: the folder that was imported."""
    source = package.parent
    if not (source / "setup.py").is_file():
        return f"zero_ext's extension is missing in '{package}'. Install it again: {BUILD_COMMAND}"
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != source.resolve()]
    other = importlib.machinery.PathFinder.find_spec("zero_ext", others)
    if other is not None and other.origin is not None:
        return (
            f"zero_ext was imported from the source folder '{source}', where it is not built, and "
            f"not from '{Path(other.origin).parent}', where it is installed: start Python in "
            "another folder."
        )
    return (
        f"zero_ext was imported from the source folder '{source}', where it is not built: install "
        f"it there with torch present by {BUILD_COMMAND[:-1]}-e ."
    )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _major(version: str | None) -> str | None:
    return version and version.split(".")[0]
