"""mypy and pyright on the examples, and on the blocks of README.md, How-to and Migration.

python tests/support/check_types.py    # make lint
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from code_blocks import ROOT, sections

PAGES = [Path("README.md"), *(Path(f"docs/{name}.md") for name in ("howto", "migration"))]
ASSIGNED = re.compile(r"^ *(?:for )?([\w, ]+?)(?: = |: .* = | in )(.*)")
IMPORTED = re.compile(r"^ *import (.*)()")
IMPORT = re.compile(r"^ *from [\w.]+ (?=import )")
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

Trainer: Any
args: Any
arguments_of_shard: dict[str, Any]
batches: list[tuple[Tensor, Tensor]]
data: Any
device: torch.device
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
scheduler: torch.optim.lr_scheduler.LRScheduler
send_to_server: Callable[[str, Tensor], None]
train: Callable[[nn.Module, torch.optim.Optimizer], None]
value: Tensor
"""
NAMES = re.findall(r"(?:^class |^|\bas |import )(?:Tensor, )?(\w+)(?=\(|: |$)", READER, re.M)


def needed(code: str) -> list[str]:
    """The names of the reader that ``code`` uses before it makes them itself."""
    found = []
    for name in NAMES:
        word = re.compile(rf"\b{name}\b")
        lines = [IMPORT.sub("", line) for line in code.splitlines()]
        line = next((line for line in lines if word.search(line)), "")
        made = ASSIGNED.match(line) or IMPORTED.match(line)
        if line and not (made and word.search(made[1]) and not word.search(made[2])):
            found.append(name)
    return found


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
