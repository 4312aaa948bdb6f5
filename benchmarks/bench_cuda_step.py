"""Whole training steps of a large GPT on one GPU, beside plain PyTorch and FSDP2.

    torchrun --nproc-per-node 1 benchmarks/bench_cuda_step.py [--rounds 8] [--results FOLDER]

All compute in bf16 and have fp32 masters: stages 1 and 2 beside plain PyTorch, whose fused AdamW
has copies of its own; stage 3 beside FSDP2 (per block, fp32 reduction), whose parameters are fp32.
Each pair alternates; what a side's memory peaks at is read while it is alone. The last rows are how
often the host waited for the device between a forward and the end of its step, as the profiler sees
it.
"""

import argparse
import gc
import os
from collections.abc import Callable, Iterator

import models
import report
import torch
import torch.distributed as dist
from bench_step import training_step, zero_step
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zero_ext

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
# Calls that may wait as well, for memory.
BLOCKING = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaMemcpy")
SEQUENCE = 1024
Step = Callable[[], float]


class LargeGPT(models.GPT):
    """1.5 B parameters: 48 layers, hidden 1,600, 8,192 tokens, sequences of 1,024."""

    def __init__(self, layers: int, hidden: int):
        super().__init__(layers, hidden, heads=hidden // 64)
        self.position = nn.Embedding(SEQUENCE, hidden)


def batch_of(size: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (size, SEQUENCE + 1)
    return torch.randint(models.GPT_VOCABULARY, shape, generator=generator, device="cuda")


def plain_step(model: nn.Module, batch: Tensor) -> Step:
    optimizer = models.MasterAdamW(model.parameters())
    return training_step(model, optimizer, batch, accumulation=1)


def fsdp_step(model: nn.Module, batch: Tensor) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.float()  # its masters
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return training_step(model, optimizer, batch, accumulation=1)


class Side:
    """One way to train, built and warm."""

    def __init__(self, make: Callable[[nn.Module, Tensor], Step], args: argparse.Namespace):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = LargeGPT(args.layers, args.hidden).bfloat16()
        self.step = make(model, batch_of(args.batch))
        for _ in range(3):
            self.step()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self.peak_bytes = torch.cuda.max_memory_allocated() - before


def race(name: str, ours, theirs, targets: tuple[float, float], args) -> list[report.Row]:
    time_target, memory_target = targets
    sides = {"ours": Side(ours, args), "theirs": Side(theirs, args)}
    calls = {which: side.step for which, side in sides.items()}
    seconds = report.alternate(calls, args.rounds, before=torch.cuda.synchronize)
    bytes_ours, bytes_theirs = (side.peak_bytes for side in sides.values())
    return [
        report.at_most(f"{name}: step", seconds["ours"], seconds["theirs"], time_target),
        report.Row(
            f"{name}: peak memory",
            f"{bytes_ours / 2**30:.2f} GiB",
            f"{bytes_theirs / 2**30:.2f} GiB",
            bytes_ours / bytes_theirs,
            "at most",
            memory_target,
        ),
    ]


def waits(stage: int, args) -> list[report.Row]:
    """Of three steps whose loss nobody reads."""
    with torch.device("cuda"):
        model = LargeGPT(4, args.hidden).bfloat16()
    zero_ext.shard(model, stage=stage)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)
    batch = batch_of(args.batch)

    def steps(count: int) -> None:
        for _ in range(count):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(3)
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    with torch.profiler.profile() as profile:
        with torch.profiler.record_function("steps"):
            steps(3)
        with torch.profiler.record_function("waits"):  # that the profiler must see
            batch.sum().item()
            event.record()
            event.synchronize()
            torch.cuda.synchronize()
    events = profile.events()

    def within(name: str, calls: tuple[str, ...]) -> list[str]:
        span = next(event.time_range for event in events if event.name == name)
        return [
            event.name
            for event in events
            if event.name.startswith(calls) and span.start <= event.time_range.start < span.end
        ]

    unseen = [call for call in WAITS if not within("waits", (call,))]
    if not within("steps", LAUNCHES) or unseen:
        raise SystemExit(f"The profiler does not see launches here, or not {unseen}.")
    waited = len(within("steps", WAITS))
    # cudaMallocAsync and cudaMemcpyAsync do not wait.
    blocked = len([c for c in within("steps", BLOCKING) if not c.endswith("Async")])
    return [
        report.Row(f"stage {stage}: waits in 3 steps", str(waited), "0", waited, "at most", 0),
        report.Row(
            f"stage {stage}: allocations in 3 steps", str(blocked), "0", blocked, "at most", None
        ),
    ]


def races(args) -> Iterator[report.Row]:
    def ours(stage: int):
        return lambda model, batch: zero_step(model, batch, 1, stage)

    for stage in (1, 2):
        yield from race(f"GPT, stage {stage} / plain", ours(stage), plain_step, (1.02, 1.0), args)
    yield from race("GPT, stage 3 / FSDP2", ours(3), fsdp_step, (0.95, 1.0), args)
    for stage in (2, 3):
        yield from waits(stage, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=1600)
    parser.add_argument("--batch", type=int, default=8)
    report.add_arguments(parser)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl")

    rows = races(args)
    if dist.get_rank() == 0:
        report.write("step_cuda", rows, args.results)
    else:
        list(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
