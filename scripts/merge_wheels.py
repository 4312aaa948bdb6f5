"""Makes one wheel of several that differ in the torch that their extension was built for.

    python scripts/merge_wheels.py FOLDER WHEEL...

Run by `make wheel`. Each extension goes to zero_ext/_extensions/torch-VERSION-KIND, together with
its _build_info.py. KIND is cpu, or cuda and CUDA's major version. zero_ext/_compat.py chooses among
them at import. All other files must be the same in all wheels.
"""

import base64
import hashlib
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

OWN = re.compile(r"zero_ext/(_C\..*\.so|_build_info\.py)")
RECORD = re.compile(r"[^/]*\.dist-info/RECORD")
# Names the version of setuptools. What matters of it is in the wheel's name.
FORMAT = re.compile(r"[^/]*\.dist-info/WHEEL")


def folder_of(build_info: bytes) -> str:
    """``build_info``: the text of a _build_info.py. Returns a name such as torch-2.13-cuda13."""
    built: dict = {}
    exec(build_info, built)
    minor = ".".join(built["TORCH_VERSION"].split(".")[:2])
    kind = f"cuda{built['TORCH_CUDA'].split('.')[0]}" if built["CUDA"] else "cpu"
    return f"torch-{minor}-{kind}"


def merged(wheels: Iterable[Path]) -> dict[str, bytes]:
    """The files of one wheel, by name, without its record."""
    files: dict[str, bytes] = {}
    shared: dict[str, bytes] = {}
    first: Path | None = None
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            there = {name: archive.read(name) for name in sorted(archive.namelist())}
        own = {name for name in there if OWN.fullmatch(name)}
        if len(own) != 2:
            raise SystemExit(f"'{wheel}' holds {sorted(own)}, and not one extension.")
        folder = f"zero_ext/_extensions/{folder_of(there['zero_ext/_build_info.py'])}"
        for name in own:
            target = f"{folder}/{Path(name).name}"
            if target in files:
                raise SystemExit(f"Two wheels hold '{target}'. Name each torch once.")
            files[target] = there[name]
        rest = {name: there[name] for name in there.keys() - own if not RECORD.fullmatch(name)}
        if first is None:
            first, shared = wheel, rest
        different = {name for name in {*rest, *shared} if rest.get(name) != shared.get(name)}
        different = {name for name in different if not FORMAT.fullmatch(name)}
        if different or wheel.name != first.name:
            raise SystemExit(
                f"'{wheel}' differs from '{first}' in {sorted(different) or 'its name'}: make all "
                "wheels again."
            )
    return dict(sorted({**shared, **files}.items()))


def record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(content)}\n"


def write(wheel: Path, files: dict[str, bytes]) -> None:
    (metadata,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    record = f"{Path(metadata).parent}/RECORD"
    lines = "".join(record_line(name, content) for name, content in files.items())
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**files, record: f"{lines}{record},,\n".encode()}.items():
            entry = zipfile.ZipInfo(name)  # of 1980: the same files make the same wheel
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)


def main() -> None:
    folder, *wheels = map(Path, sys.argv[1:])
    files = merged(wheels)
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / wheels[0].name
    write(wheel, files)
    held = sorted(
        {name.split("/")[2] for name in files if name.startswith("zero_ext/_extensions/")}
    )
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB, for {', '.join(held)}")


if __name__ == "__main__":
    main()
