"""Fenced blocks of the documentation, and the names that their readers have."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional

import zero_ext

ROOT = Path(__file__).parents[2]
# README.md, CONTRIBUTING.md, CHANGELOG.md, then those of folders.
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "csrc/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
ONE_SCRIPT = (Path("docs/tutorial.md"),)
FENCE = re.compile(r"^( *)```(.*)$")
HEADING = re.compile(r"^#+ (.+)$")


class Block(NamedTuple):
    page: Path
    line: int  # of its first line of code
    heading: str
    language: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def python(self) -> str:
        """A diff's code after the change. Lines stay where they are."""
        if self.language != "diff":
            return self.code
        lines = self.code.splitlines()
        return "\n".join("" if line.startswith("-") else line[1:] for line in lines)


def blocks(page: Path) -> Iterator[Block]:
    heading, inside, first, code = "", None, 0, []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), start=1):
        fence = FENCE.match(line)
        if inside is None and fence:
            inside, first, code = fence, number + 1, []
        elif inside is not None and fence and not fence[2]:
            yield Block(page, first, heading, inside[2].strip(), "\n".join(code) + "\n")
            inside = None
        elif inside is not None:
            code.append(line.removeprefix(inside[1]))
        elif title := HEADING.match(line):
            heading = title[1]
    assert inside is None, f"{page}:{first}: the block has no end"


def sections(page: Path, *languages: str) -> list[list[Block]]:
    """Blocks of these languages that make one script: those under one heading, each diff alone,
    and a whole page that is one script."""
    found: dict[str | int, list[Block]] = {}
    for block in blocks(page):
        if block.language in languages:
            key = block.line if block.language == "diff" else block.heading
            found.setdefault("" if page in ONE_SCRIPT else key, []).append(block)
    return list(found.values())


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Model(nn.Module):
    """The model that the pages call so: classes of rows of 13 numbers."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.ModuleList(Layer(13) for _ in range(3))
        self.head = nn.Linear(13, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def generate(self, x: Tensor) -> list[int]:
        return self(x).argmax(-1).tolist()


def make_batches(rank: int, count: int = 4, dtype=torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Of 5 samples, different on each rank."""
    draw = torch.Generator().manual_seed(1 + rank)
    return [
        (torch.randn(5, 13, generator=draw).to(dtype), torch.arange(5) % 7) for _ in range(count)
    ]


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10)


def names(section: list[Block], rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What the script has in which a reader puts the code of a section.

    The model is plain if the code shards it, and else sharded with stage 3. There is an optimizer
    if the code makes none.
    """
    code = "\n".join(block.python for block in section)
    model = Model()
    batches = make_batches(rank)
    given: dict[str, Any] = {
        "F": functional, "Layer": Layer, "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "Model": Model, "dist": dist, "nn": nn, "os": os, "torch": torch, "zero_ext": zero_ext,
        "arguments_of_shard": {}, "batches": batches, "data_ranks": world,
        "device": torch.device("cpu"), "expert_ranks": world, "experts": 2 * world,
        "Shard": Shard, "distribute_tensor": distribute_tensor,
        "folder": folder / "folder", "gpus_per_node": world, "make_scheduler": make_scheduler,
        "model": model, "module": model, "nodes": 1, "parallelize_module": parallelize_module,
        "path": folder / "path", "plan": {"head": ColwiseParallel(output_layouts=Replicate())},
        "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "prompt": batches[0][0],
        "tensor_ranks": 1,
        "init_device_mesh": lambda kind, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs),
    }  # fmt: skip

    def evaluate(model: nn.Module) -> float:
        x, y = make_batches(world)[0]
        return functional.cross_entropy(model(x), y).item()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in batches:
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    given |= {"evaluate": evaluate, "send_to_server": lambda name, value: None, "train": train}
    if not re.search(r"\bshard\(|\binitialize\(|zero_ext\.integrations", code):
        zero_ext.shard(model, stage=3)
        loss = functional.cross_entropy(model(batches[0][0]), batches[0][1])
        p = next(model.parameters())
        given |= {"loss": loss, "p": p, "value": torch.ones(p.shape)}
        if "zero_ext.optim." not in code:
            optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-2)
            given |= {"optimizer": optimizer, "scheduler": make_scheduler(optimizer)}
    return given
