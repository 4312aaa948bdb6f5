"""Muon beside torch.optim.Muon: alternating, medians, one thread per rank.

    torchrun --nproc-per-node 2 benchmarks/bench_muon.py [--rounds 5] [--results FOLDER]

First the optimizer's step alone, on the 48 matrices of the benchmark's GPT. The peer is
torch.optim.Muon on fp32 matrices that every rank has whole. Then whole training steps with bf16
parameters and fp32 masters, where AdamW updates the rest. Their peers are DDP with torch.optim.Muon
on fp32 masters, and FSDP2, which has fp32 parameters, computes in bf16, and runs torch.optim.Muon
on DTensors.

Wall time is that of rank 0. Processor time is the sum of all ranks', which other programs on the
machine change less.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import models
import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_ext
from zero_ext.optim import muon_groups

STEP_TARGET = 0.60
TRAINING_TARGET = 0.70
LR = 1e-3


class Timed(NamedTuple):
    """``call`` is measured, ``before`` it is not."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None


class Times(NamedTuple):
    wall: list[float]
    processor: list[float]


def alternate(calls: dict[str, Timed], rounds: int) -> dict[str, Times]:
    """As ``report.alternate``, with processor time."""
    times = {name: Times([], []) for name in calls}
    for round_number in range(rounds + 1):
        for name, each in calls.items():
            each.before()
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            each.call()
            dist.barrier()
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            of_all = torch.tensor(processor)
            dist.all_reduce(of_all)
            if round_number:  # the first one warms up
                times[name].wall.append(wall)
                times[name].processor.append(of_all.item())
    return times


class MasterMuon:
    """torch's Muon and AdamW on fp32 copies of bf16 parameters: what DDP users write by hand."""

    def __init__(self, model: nn.Module):
        groups = muon_groups(model)
        self.parameters = [p for _, p in (*groups.muon, *groups.adamw)]
        self.masters = [p.detach().float() for p in self.parameters]
        matrices = len(groups.muon)
        self.optimizers = [
            torch.optim.Muon(self.masters[:matrices], lr=LR),
            torch.optim.AdamW(self.masters[matrices:], lr=LR, fused=True),
        ]

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def training(model: nn.Module, batch, optimizers) -> Callable[[], float]:
    def step() -> float:
        loss = model(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return loss.item()

    return step


def ddp_step(model: nn.Module, batch) -> Callable[[], float]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return training(wrapped, batch, [MasterMuon(model)])


def fsdp_step(model: nn.Module, batch) -> Callable[[], float]:
    model.float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    groups = muon_groups(model)
    muon = torch.optim.Muon([p for _, p in groups.muon], lr=LR)
    return training(model, batch, [muon, torch.optim.AdamW([p for _, p in groups.adamw], lr=LR)])


def zero_step(model: nn.Module, batch, stage: int) -> Callable[[], float]:
    zero_ext.shard(model, stage=stage)
    groups = muon_groups(model)
    adamw = zero_ext.optim.AdamW(groups.adamw, lr=LR)
    return training(model, batch, [zero_ext.optim.Muon(groups.muon, lr=LR), adamw])


def step_alone(model: nn.Module, batch, stage: int) -> Timed:
    """Of the sharded Muon, with the gradients of a backward."""
    zero_ext.shard(model, stage=stage)
    optimizer = zero_ext.optim.Muon(muon_groups(model).muon, lr=LR)

    def before() -> None:
        model.zero_grad()
        model(batch).backward()

    return Timed(optimizer.step, before)


def replicated_step(model: nn.Module) -> Timed:
    masters = [nn.Parameter(p.detach().float()) for _, p in muon_groups(model).muon]
    for master in masters:
        master.grad = torch.randn_like(master)
    return Timed(torch.optim.Muon(masters, lr=LR).step)


def compared(what: str, ours: Times, theirs: Times, target: float | None) -> Iterator[report.Row]:
    yield report.at_most(f"{what}, wall time", ours.wall, theirs.wall, target)
    yield report.at_most(f"{what}, processor time", ours.processor, theirs.processor, None)


def rows(args: argparse.Namespace) -> Iterator[report.Row]:
    torch.manual_seed(0)
    model = models.GPT().bfloat16()
    batch = models.gpt_batch(torch.Generator().manual_seed(dist.get_rank()))
    stages = {f"stage {stage}": stage for stage in args.stages}
    calls = {"torch": replicated_step(model)}
    calls |= {n: step_alone(copy.deepcopy(model), batch, stage) for n, stage in stages.items()}
    times = alternate(calls, args.rounds)
    for name in stages:
        what = f"Muon.step(), {name} / torch.optim.Muon.step()"
        yield from compared(what, times[name], times["torch"], STEP_TARGET)
    calls = {
        "DDP": Timed(ddp_step(copy.deepcopy(model), batch)),
        "FSDP2": Timed(fsdp_step(copy.deepcopy(model), batch)),
    }
    calls |= {n: Timed(zero_step(copy.deepcopy(model), batch, s)) for n, s in stages.items()}
    times = alternate(calls, args.rounds)
    for name in stages:
        for peer, target in (("DDP", TRAINING_TARGET), ("FSDP2", None)):
            what = f"step of the GPT, {name} / {peer} + torch.optim.Muon"
            yield from compared(what, times[name], times[peer], target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    report.add_arguments(parser)
    args = parser.parse_args()
    report.write_on_rank_0("muon", rows(args), args.results)


if __name__ == "__main__":
    main()
