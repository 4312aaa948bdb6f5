"""Draws docs/readme.svg: bytes of an 8 B model on 8 GPUs by stage, and steps beside peers.

MATPLOTLIBRC=docs/pictures.mplstyle python docs/readme_picture.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

import zero_ext
from zero_ext import plan

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks/results/epyc_zen4_2026-11-24"
PEER, OURS = "C5", "C0"
GPU_GIB = 80e9 / 2**30
PEERS = {  # of a row in the results, with its file
    ("step", "GPT, accumulation 1, stage 2 / DDP"): ("DDP", "stage 2"),
    ("step", "GPT, accumulation 1, stage 3 / FSDP2"): ("FSDP2", "stage 3"),
    ("deepspeed", "GPT, stage 2, offload, / DeepSpeed"): ("DeepSpeed\noffload", "stage 2\noffload"),
}


class Block(nn.Module):
    """Of the sizes of Llama 3 8B. It is never run."""

    def __init__(self, width: int = 4096, keys: int = 1024, hidden: int = 14336):
        super().__init__()
        sizes = [(width, width), (width, keys), (width, keys), (width, width)]
        sizes += [(width, hidden), (width, hidden), (hidden, width)]
        self.matrices = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in sizes)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))


def make_model() -> nn.Module:
    with torch.device("meta"):
        blocks = nn.ModuleList(Block() for _ in range(32))
        ends = [nn.Embedding(128256, 4096), nn.RMSNorm(4096), nn.Linear(4096, 128256, bias=False)]
        return nn.ModuleList([ends[0], blocks, *ends[1:]]).bfloat16()


def draw_bytes(axes: plt.Axes) -> None:
    model = make_model()
    estimates = [
        zero_ext.estimate_memory(model, world_size=8, stage=stage, device="cuda")
        for stage in range(4)
    ]
    plan.draw(axes, estimates, "GiB", 2**30)
    axes.axhline(GPU_GIB, color="C1", linewidth=1, linestyle="--")
    axes.text(3.4, GPU_GIB + 2, "a GPU of 80 GB", ha="right", color="C1", fontsize=9)
    axes.set(title="8 B parameters, 8 GPUs, AdamW (estimated)")
    axes.legend(fontsize=9)


def draw_steps(axes: plt.Axes) -> None:
    rows = {
        (file, row["name"]): row
        for file in ("step", "deepspeed")
        for row in json.loads((MEASURED / f"{file}.json").read_text())["rows"]
    }
    for k, (key, names) in enumerate(PEERS.items()):
        times = [float(rows[key][side].removesuffix(" ms")) for side in ("theirs", "ours")]
        for x, name, time, color in zip(
            (3.2 * k, 3.2 * k + 1.3), names, times, (PEER, OURS), strict=True
        ):
            axes.bar(x, time, color=color, width=1.1)
            axes.text(x, time + 12, f"{time:.0f}", ha="center", fontweight="bold")
            axes.text(x, -25, name, ha="center", va="top", fontsize=9)
    axes.set(title="ms per step: 27.6 M GPT, two CPU ranks (measured)", ylim=(0, 1150))
    axes.set_xticks([])


def main() -> None:
    plt.rcParams |= {"axes.titlesize": 10, "axes.titleweight": "bold"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.7), layout="constrained")
    draw_bytes(left)
    draw_steps(right)
    figure.savefig(ROOT / "docs/readme.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
