"""Reduction and gather of one 64 MB unit beside gloo's own collectives.

    torchrun --nproc-per-node 2 benchmarks/bench_comm.py [--rounds 15] [--results FOLDER]

exchange: the op reduce_scatter_accumulate_, its fp32 sum included, against reduce_scatter_tensor of
the same bf16 bytes. gather: the update's gather of bf16 parameters, point to point, against
all_gather_into_tensor. Targets: at most 0.40 and 0.45 of gloo's time.
"""

import argparse

import report
import torch
import torch.distributed as dist

import zero_ext

NUMEL = 32 * 2**20  # bf16: 64 MB


def point_to_point_gather(flat: torch.Tensor, group) -> None:
    """What the engine does after a step, through torch's Python calls."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ranges = flat.chunk(world)
    works = [dist.irecv(ranges[peer], peer, group) for peer in range(world) if peer != rank]
    works += [dist.isend(ranges[rank], peer, group) for peer in range(world) if peer != rank]
    for work in works:
        work.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    report.add_arguments(parser)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world, group = dist.get_world_size(), dist.group.WORLD
    bucket = torch.randn(NUMEL).bfloat16()
    scattered = torch.empty(NUMEL // world, dtype=torch.bfloat16)
    sums = torch.zeros(NUMEL // world)
    calls = {
        "exchange": lambda: zero_ext.ops.reduce_scatter_accumulate_(
            bucket, sums, group, 1 / world, fresh=False
        ),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(scattered, bucket),
        "gather": lambda: point_to_point_gather(bucket, group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(bucket, scattered),
    }
    seconds = report.alternate(calls, args.rounds, dist.barrier)
    rows = [
        report.at_most(
            f"{ours} / gloo's {theirs}, 64 MB bf16, {world} ranks",
            seconds[ours],
            seconds[theirs],
            target,
        )
        for ours, theirs, target in (
            ("exchange", "reduce_scatter_tensor", 0.40),
            ("gather", "all_gather_into_tensor", 0.45),
        )
    ]
    if dist.get_rank() == 0:
        report.write("comm", rows, args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
