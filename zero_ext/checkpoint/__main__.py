"""``python -m zero_ext.checkpoint verify PATH``: checks a checkpoint without loading it."""

import argparse
import sys
from pathlib import Path

from zero_ext.checkpoint import failures, files


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if every byte is as it was written, else 1."""
    parser = argparse.ArgumentParser(prog="python -m zero_ext.checkpoint", description=__doc__)
    parser.add_argument("command", choices=["verify"])
    parser.add_argument("path", type=Path, help="the folder of a checkpoint")
    path = parser.parse_args(arguments).path.resolve()
    try:
        with failures.named(None, f"verify of checkpoint '{path}'"):
            damaged = files.damaged_entries(path)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    for name in damaged:
        print(f"damaged: {name}")
    if not damaged:
        print(f"checkpoint '{path}' is as it was written")
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())
