"""What copies in memory cost: the same training with ``elastic.Run.keep`` and without.

    torchrun --nproc-per-node 2 benchmarks/bench_elastic.py [--rounds 7] [--results FOLDER]

Target: a step of a global batch of 12 micro-batches at most 1.03 of one without. A step of one
micro-batch for each rank is told beside it.
"""

import argparse
import functools
import tempfile
from collections.abc import Iterator

import models
import report
import torch
import torch.distributed as dist

import zero_ext

TARGET = 1.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    report.add_arguments(parser)
    args = parser.parse_args()
    report.write_on_rank_0("elastic", rows(args.rounds), args.results)


def rows(rounds: int) -> Iterator[report.Row]:
    for stage in (2, 3):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)
            yield from rows_of_stage(stage, rounds, shared[0])


def rows_of_stage(stage: int, rounds: int, folder: str) -> Iterator[report.Row]:
    torch.manual_seed(0)
    make_model, make_batch = models.MAKERS["GPT"]
    model = zero_ext.shard(make_model().bfloat16(), stage=stage)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-4)
    batch = make_batch(torch.Generator().manual_seed(dist.get_rank()))

    def step(micro_batches: int) -> None:
        for _ in range(micro_batches):
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def kept_step(micro_batches: int) -> None:
        step(micro_batches)
        run.keep()

    with zero_ext.elastic.Run(model, optimizer, run_id="bench", folder=folder) as run:
        for count, target in ((1, None), (12 // dist.get_world_size(), TARGET)):
            ways = {"kept": functools.partial(kept_step, count)}
            ways["plain"] = functools.partial(step, count)
            seconds = report.alternate(ways, rounds, dist.barrier)
            name = f"GPT, stage {stage}, {count} micro-batches per rank, keep() / none"
            yield report.at_most(name, seconds["kept"], seconds["plain"], target)


if __name__ == "__main__":
    main()
