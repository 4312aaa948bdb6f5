"""Whole training steps beside a peer: alternating, medians, one thread per rank.

    torchrun --nproc-per-node 2 benchmarks/bench_step.py [--rounds 15] [--results FOLDER]

Stages 1 and 2 beside DDP: both sides have bf16 parameters, fp32 masters and AdamW. Stage 3 beside
FSDP2, which has bf16 parameters, reduces in fp32 and has no masters: it does less. FSDP2 shards the
GPT by block and the small layers as one group, its fastest way.
"""

import argparse
import copy
from collections.abc import Callable, Iterator

import models
import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_ext

# (model, micro-batches): at most this part of the peer's time. With four micro-batches forwards and
# backwards, which are PyTorch's, are most of a step: 0.93 of DDP's for the GPT.
DDP_TARGETS = {("GPT", 1): 0.90, ("small", 1): 0.80}
FSDP_TARGETS = {("GPT", 1): 0.65, ("GPT", 4): 0.70, ("small", 1): 0.40}


def ddp_step(model: nn.Module, batch, accumulation: int) -> Callable[[], float]:
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = models.MasterAdamW(model.parameters())

    def step() -> float:
        for micro in range(accumulation):
            last = micro == accumulation - 1
            model.require_backward_grad_sync = last
            loss = model(batch)
            (loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def fsdp_step(model: nn.Module, batch, accumulation: int) -> Callable[[], float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch, accumulation)


def zero_step(
    model: nn.Module, batch, accumulation: int, stage: int, lr: float = 1e-4, **options
) -> Callable[[], float]:
    zero_ext.shard(model, stage=stage, accumulation_steps=accumulation, **options)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=lr)
    return training_step(model, optimizer, batch, accumulation)


def training_step(model, optimizer, batch, accumulation: int) -> Callable[[], float]:
    def step() -> float:
        for _ in range(accumulation):
            loss = model(batch)
            (loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def rows(args: argparse.Namespace) -> Iterator[report.Row]:
    for name, (make_model, make_batch) in models.MAKERS.items():
        if args.only not in (None, name):
            continue
        torch.manual_seed(0)
        model = make_model().bfloat16()
        batch = make_batch(torch.Generator().manual_seed(dist.get_rank()))
        for accumulation in args.accumulation:
            steps = {}
            if {1, 2} & set(args.stages):
                steps["DDP"] = ddp_step(copy.deepcopy(model), batch, accumulation)
            if 3 in args.stages:
                steps["FSDP2"] = fsdp_step(copy.deepcopy(model), batch, accumulation)
            for stage in args.stages:
                steps[f"stage {stage}"] = zero_step(
                    copy.deepcopy(model), batch, accumulation, stage
                )
            seconds = report.alternate(steps, args.rounds, dist.barrier)
            for stage in args.stages:
                peer, targets = ("FSDP2", FSDP_TARGETS) if stage == 3 else ("DDP", DDP_TARGETS)
                yield report.at_most(
                    f"{name}, accumulation {accumulation}, stage {stage} / {peer}",
                    seconds[f"stage {stage}"],
                    seconds[peer],
                    targets.get((name, accumulation)),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=("GPT", "small"))
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    report.add_arguments(parser)
    args = parser.parse_args()
    report.write_on_rank_0("step", rows(args), args.results)


if __name__ == "__main__":
    main()
