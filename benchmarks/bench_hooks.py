"""What the hooks cost: forward and backward of 1,083 small parameters beside plain torch.

    python benchmarks/bench_hooks.py [--rounds 40] [--results FOLDER]

Target: at most 5 µs per parameter over plain PyTorch, whose gradients are set to None in between.
"""

import argparse
import copy
import statistics
import time

import models
import report
import torch

import zero_ext

TARGET_US = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    report.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = models.SmallLayers().bfloat16()
    candidates = {"plain": plain}
    for stage in (1, 2):
        candidates[f"stage {stage}"] = zero_ext.shard(copy.deepcopy(plain), stage=stage)
    batch = models.small_batch(torch.Generator().manual_seed(0))
    seconds = {name: [] for name in candidates}
    for round_number in range(args.rounds + 3):
        for name, model in candidates.items():
            model.zero_grad()
            start = time.perf_counter()
            model(batch).backward()
            if round_number >= 3:
                seconds[name].append(time.perf_counter() - start)
    parameters = len(list(plain.parameters()))
    rows = []
    for name in ("stage 1", "stage 2"):
        extra = [a - b for a, b in zip(seconds[name], seconds["plain"], strict=True)]
        rows.append(
            report.Row(
                f"µs per parameter, {name} over plain, forward + backward",
                report.milliseconds(seconds[name]),
                report.milliseconds(seconds["plain"]),
                statistics.median(extra) * 1e6 / parameters,
                "at most",
                TARGET_US,
            )
        )
    report.write("hooks", rows, args.results)


if __name__ == "__main__":
    main()
