"""Which tests a change can break: those of the rooms changed, and of all rooms above them.

    python scripts/changed_tests.py [BASE]

Prints paths for pytest. BASE is a commit, by default the last one that this branch shares with
main. Files that git does not track count as changed. What a room may use stands in
tests/project/test_rooms.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "project"))

from test_rooms import CPP_ROOMS, PYTHON_LEVELS  # noqa: E402

FOLDERS = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))}
# The doors, and a little of everything.
ALWAYS = ["tests/project/test_rooms.py", "tests/properties/test_equivalence.py"]
# Texts and programs: tests/project looks at them.
AROUND = ("docs", "examples", "benchmarks", "scripts", ".ci")


def git(*arguments: str) -> list[str]:
    command = ["git", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.split()


def default_base() -> str:
    for main in ("main", "origin/main"):
        found = subprocess.run(
            ["git", "merge-base", "HEAD", main], cwd=ROOT, capture_output=True, text=True
        )
        if found.returncode == 0:
            return found.stdout.strip()
    raise SystemExit("There is no branch main to compare with. Name a commit: BASE=...")


def changed_files(base: str) -> list[str]:
    return git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")


def cpp_rooms_above(rooms: set[str]) -> set[str]:
    """With the rooms themselves."""
    affected = set(rooms)
    while more := {r for r, uses in CPP_ROOMS.items() if uses & affected} - affected:
        affected |= more
    return affected


def python_rooms_above(rooms: set[str]) -> set[str]:
    """With the rooms themselves."""
    if not rooms:
        return set()
    lowest = min(PYTHON_LEVELS[room] for room in rooms)
    return rooms | {room for room, level in PYTHON_LEVELS.items() if level > lowest}


def affected_folders(files: Iterable[str]) -> set[str]:
    """Folders of tests/. A change in C++ reaches the Python room of the same name, and one in the
    bindings all of Python."""
    cpp: set[str] = set()
    python: set[str] = set()
    folders: set[str] = set()
    for file in files:
        top, _, rest = file.partition("/")
        room = rest.partition("/")[0].partition(".")[0]
        if file.endswith(".md") or top in AROUND:
            folders.add("project")
        elif top == "csrc" and room in CPP_ROOMS:
            cpp.add(room)
        elif top == "zero_ext" and room in PYTHON_LEVELS:
            python.add(room)
        elif top == "tests" and room in FOLDERS:
            folders.add(room)
        else:  # the build, conftest.py, tests/support
            return set(FOLDERS)
    python |= {"_C"} if "python" in cpp else set()
    cpp = cpp_rooms_above(cpp)
    rooms = cpp | python_rooms_above(python | cpp & set(PYTHON_LEVELS))
    return folders | rooms & FOLDERS | ({"device", "properties"} if rooms else set())


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] else default_base()
    folders = affected_folders(changed_files(base))
    print(*ALWAYS, *sorted(f"tests/{folder}" for folder in folders))


if __name__ == "__main__":
    main()
