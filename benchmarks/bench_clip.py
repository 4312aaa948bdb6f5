"""What clipping in the step costs: the same training with ``max_grad_norm`` and without.

    torchrun --nproc-per-node 2 benchmarks/bench_clip.py [--rounds 15] [--results FOLDER]

One model and one optimizer, whose limit is switched on and off from round to round. Target: a step
with clipping at most 1.05 of one without. The limit is small, so that every gradient is scaled.
"""

import argparse

import models
import report
import torch
import torch.distributed as dist

import zero_ext

TARGET = 1.05
MAX_NORM = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    report.add_arguments(parser)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = []
    for name, (make_model, make_batch) in models.MAKERS.items():
        torch.manual_seed(0)
        model = zero_ext.shard(make_model().bfloat16(), stage=2)
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-4)
        batch = make_batch(torch.Generator().manual_seed(dist.get_rank()))

        def step(limit, model=model, optimizer=optimizer, batch=batch):
            optimizer.max_grad_norm = limit
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        seconds = report.alternate(
            {"clipped": lambda step=step: step(MAX_NORM), "plain": lambda step=step: step(None)},
            args.rounds,
            dist.barrier,
        )
        rows.append(
            report.at_most(
                f"{name}, stage 2, max_grad_norm / none",
                seconds["clipped"],
                seconds["plain"],
                TARGET,
            )
        )
    if dist.get_rank() == 0:
        report.write("clip", rows, args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
