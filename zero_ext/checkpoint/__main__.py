"""``python -m zero_ext.checkpoint COMMAND``, in one process, without a model.

``verify PATH`` checks a checkpoint without loading it. ``to-fp32 DIR OUT`` writes its model's whole
``state_dict()`` to a file, in fp32. DIR is a checkpoint of zero_ext or of DeepSpeed, or a folder
with a file ``latest`` that names one.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_ext.checkpoint import failures, files, folders
from zero_ext.checkpoint.loading import read_whole


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if every byte is as it was written, or the file was written; else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_ext.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="check that every byte is as it was written")
    verify.add_argument("path", type=Path, help="the folder of a checkpoint")
    to_fp32 = commands.add_parser("to-fp32", help="write the whole model to one file")
    to_fp32.add_argument("path", type=Path, metavar="DIR", help="the folder of a checkpoint")
    to_fp32.add_argument("out", type=Path, metavar="OUT", help="the file, also .safetensors")
    given = parser.parse_args(arguments)
    path = given.path.resolve()
    try:
        with failures.named(None, f"{given.command} of checkpoint '{path}'"):
            if given.command == "verify":
                return _verified(path)
            write(state := fp32_state(path), given.out)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {len(state)} values to '{given.out}'")
    return 0


def _verified(path: Path) -> int:
    damaged = files.damaged_entries(path)
    for name in damaged:
        print(f"damaged: {name}")
    if not damaged:
        print(f"checkpoint '{path}' is as it was written")
    return 1 if damaged else 0


def fp32_state(path: Path, tag: str | None = None) -> dict[str, Any]:
    """A model's whole ``state_dict()`` in fp32. ``tag``: a folder in ``path``, see the command."""
    state, _ = read_whole(folders.tagged(path, tag))
    return {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in state.items()
    }


def write(state: dict[str, Any], out: Path) -> None:
    if out.suffix == ".safetensors":
        from safetensors.torch import save_file

        # Tied parameters are written under each name: the format knows no shared memory.
        save_file({name: value.clone() for name, value in state.items()}, out, {"format": "pt"})
    else:
        torch.save(state, out)


if __name__ == "__main__":
    sys.exit(main())
