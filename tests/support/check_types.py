"""mypy and pyright on the examples, and on the blocks of README.md, How-to and Migration.

python tests/support/check_types.py    # make lint
"""

import ast
import dis
import shutil
import subprocess
import sys
import types
from pathlib import Path

from code_blocks import ROOT, sections

PAGES = [Path("README.md"), *(Path(f"docs/{name}.md") for name in ("howto", "migration"))]
# What a reader's script has around a block; ``names`` of code_blocks.py makes these values.
READER = """
from collections.abc import Callable
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
import zero_ext

class Layer(nn.Module):
    linear: Any

class Model(nn.Module):
    layers: Any
    head: nn.Linear
    config: Any
    generate: Callable[[Tensor], list[int]]

Fabric: Any
Trainer: Any
args: Any
arguments_of_shard: dict[str, Any]
batches: list[tuple[Tensor, Tensor]]
data: Any
device: torch.device
engine_model: nn.Module
evaluate: Callable[[nn.Module], float]
folder: Path
gpus_per_node: int
loss: Tensor
make_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
model: Model
module: nn.Module
nodes: int
optimizer: zero_ext.optim.AdamW
p: nn.Parameter
path: Path
policy: MixedPrecisionPolicy
prompt: Tensor
received: Callable[[], list[bytes]]
scheduler: torch.optim.lr_scheduler.LRScheduler
send: Callable[[bytes], None]
send_to_server: Callable[[str, Tensor], None]
train: Callable[[nn.Module, torch.optim.Optimizer], None]
value: Tensor
"""


def defined(code: str) -> list[str]:
    """The names that a module without functions has."""
    names = []
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        else:
            names.append(node.target.id if isinstance(node, ast.AnnAssign) else node.name)
    return names


def first_uses(block: types.CodeType, found: dict[str, str]) -> dict[str, str]:
    """The first instruction on each name, in the order in which they run."""
    for each in dis.get_instructions(block):
        if each.opname in ("LOAD_NAME", "LOAD_GLOBAL", "STORE_NAME"):
            found.setdefault(each.argval, each.opname)
        if isinstance(each.argval, types.CodeType):
            first_uses(each.argval, found)
    return found


def needed(code: str) -> list[str]:
    """The names of the reader that ``code`` uses before it makes them itself."""
    uses = first_uses(compile(code, "", "exec"), {})
    return [name for name in defined(READER) if uses.get(name, "STORE_NAME") != "STORE_NAME"]


def write_modules(folder: Path) -> None:
    """A module of each section, which takes from ``reader.py`` the names that it does not make."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "reader.py").write_text(READER)
    for page in PAGES:
        for section in sections(page, "python", "diff"):
            code = "".join(f"# {block.place}\n{block.python}\n" for block in section)
            names = ", ".join(needed(code))
            text = f"from reader import {names}\n\n{code}" if names else code
            (folder / f"{page.stem}_{section[0].line}.py").write_text(text)


if __name__ == "__main__":
    write_modules(ROOT / "build/typed")  # pyproject.toml names it
    for checker in ("mypy", "basedpyright"):
        command = [sys.executable, "-m", checker, "build/typed", "examples"]
        subprocess.run(command, cwd=ROOT, check=True)
