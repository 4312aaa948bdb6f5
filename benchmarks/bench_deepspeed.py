"""Offloaded AdamW and an offloaded step beside DeepSpeed's, which must be installed.

    torchrun --nproc-per-node 2 benchmarks/bench_deepspeed.py [--rounds 15] [--results FOLDER]

The update: rank 0's ``optimizer.step()`` with everything that it does, fp32 parameters, beside
``DeepSpeedCPUAdam.step()``. The step: GPT in bf16 with fp32 masters, stage 2, optimizer offloaded.
"""

import argparse
import copy
import logging
import os
from collections.abc import Callable

import models
import report
import torch
import torch.distributed as dist
from bench_kernels import small_shapes
from bench_step import training_step
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import zero_ext

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)

OFFLOAD = CPUOffloadPolicy(pin_memory=False)
FLAT_NUMEL = 2**25
SHAPES = {
    "flat": [(FLAT_NUMEL,)],
    "1,083 small tensors": small_shapes(),
}
UPDATE_TARGETS = {"flat": 0.8, "1,083 small tensors": 0.6}
STEP_TARGET = 0.75


class Parameters(nn.Module):
    """Parameters with gradients, and nothing to compute."""

    def __init__(self, shapes):
        super().__init__()
        torch.manual_seed(0)
        self.values = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def give_gradients(self) -> None:
        sum((value * 1e-3).sum() for value in self.values).backward()


def our_update(shapes) -> Callable[[], None]:
    model = zero_ext.shard(Parameters(shapes), stage=2, mesh=None, offload_policy=OFFLOAD)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-4)
    model.give_gradients()
    return optimizer.step


def their_update(shapes) -> Callable[[], None]:
    model = Parameters(shapes)
    model.give_gradients()
    return DeepSpeedCPUAdam(model.parameters(), lr=1e-4, adamw_mode=True).step


def our_step(model: nn.Module, batch) -> Callable[[], float]:
    zero_ext.shard(model, stage=2, offload_policy=OFFLOAD)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-4)
    return training_step(model, optimizer, batch, accumulation=1)


def their_step(model: nn.Module, batch) -> Callable[[], None]:
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": len(batch),
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    )

    def step() -> None:
        engine.backward(engine(batch))
        engine.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    report.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if os.environ.get("RANK", "0") == "0":  # before there is a process group: one rank alone
        for name, shapes in SHAPES.items():
            pair = {"ours": our_update(shapes), "theirs": their_update(shapes)}
            seconds = report.alternate(pair, args.rounds, before=lambda: None)
            what = f"AdamW, {name}, / DeepSpeedCPUAdam"
            rows.append(report.at_most(what, *seconds.values(), UPDATE_TARGETS[name]))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = models.GPT().bfloat16()
    batch = models.gpt_batch(torch.Generator().manual_seed(dist.get_rank()))
    pair = {
        "ours": our_step(copy.deepcopy(model), batch),
        "theirs": their_step(copy.deepcopy(model), batch),
    }
    seconds = report.alternate(pair, args.rounds, dist.barrier)
    what = "GPT, stage 2, offload, / DeepSpeed"
    rows.append(report.at_most(what, *seconds.values(), STEP_TARGET))
    if dist.get_rank() == 0:
        report.write("deepspeed", rows, args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
