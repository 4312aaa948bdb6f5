"""``python -m zero_ext.diff A B``: where two runs differ. A and B are two logs or two checkpoints.

Of logs, which ``zero_ext.TrainingLog`` writes, it names the first step that both have and that
differs, and the parameters where both logs have their fingerprints. Of checkpoints it names the
values that differ in any bit. Exit code 0: equal; 1: different; 2: bad input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zero_ext.checkpoint import failures, folders
from zero_ext.checkpoint.contents import Contents

_COMPARED = ("fingerprint", "loss", "norm")  # in a log; ranks may differ


def differing_steps(first: Path, second: Path) -> list[str]:
    """Lines that tell how two logs differ; none if they do not."""
    ours, theirs = _steps_of(first), _steps_of(second)
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise ValueError(f"zero_ext: '{first}' and '{second}' have no step in common.")
    for step in both:
        one, other = ours[step], theirs[step]
        keys = [key for key in _COMPARED if key in one and key in other]
        if not keys:
            raise ValueError(f"zero_ext: step {step} of the two logs has nothing to compare.")
        differing = [key for key in keys if repr(one[key]) != repr(other[key])]
        if differing:
            values = ", ".join(f"{key} {one[key]} and {other[key]}" for key in differing)
            lines = [f"step {step} is the first that differs: {values}"]
            if "parameters" in one and "parameters" in other:
                named, others = one["parameters"], other["parameters"]
                names = [n for n in {**named, **others} if named.get(n) != others.get(n)]
                lines += [f"differs: {name}" for name in names]
            return lines
    return []


def _steps_of(path: Path) -> dict[int, dict[str, Any]]:
    steps = {}
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        try:
            values = json.loads(line)
            steps[int(values["step"])] = values
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith("\n"):
                break  # the process died in it
            raise ValueError(
                f"zero_ext: line {number} of '{path}' is none of a TrainingLog: {error!r}."
            ) from error
    return steps


def differing_values(first: Path, second: Path) -> list[str]:
    """Lines that name what differs in two checkpoints; none if nothing does."""
    ours, theirs = _contents_of(first), _contents_of(second)
    lines = []
    for key in sorted(ours.tensors.keys() | theirs.tensors.keys()):
        if key not in ours.tensors or key not in theirs.tensors:
            there = first if key in ours.tensors else second
            lines.append(f"only in '{there}': {key}")
        elif not _equal(_read(ours, key), _read(theirs, key)):
            lines.append(f"differs: {key}")
    return lines


def _contents_of(path: Path) -> Contents:
    with failures.named(None, f"diff of checkpoint '{path}'"):
        return Contents.of(folders.path_of(folders.tagged(path)), allow_pickle=False)


def _read(contents: Contents, key: str) -> torch.Tensor:
    """One value at a time: checkpoints may be larger than the memory."""
    entry = contents.tensors[key]
    read = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
    contents.read(read)
    return read[key]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit: NaN equals itself, and zeros of other signs differ."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_ext.diff",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=Path, metavar="A", help="a log or the folder of a checkpoint")
    parser.add_argument("second", type=Path, metavar="B", help="another one of the same kind")
    given = parser.parse_args(arguments)
    try:
        kinds = {path.is_dir() for path in (given.first, given.second)}
        if len(kinds) == 2:
            raise ValueError("zero_ext: compare two logs or two checkpoints, not one of each.")
        compare = differing_values if kinds == {True} else differing_steps
        lines = compare(given.first.resolve(), given.second.resolve())
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines) if lines else "no difference")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
