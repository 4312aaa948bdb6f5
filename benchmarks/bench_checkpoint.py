"""What digests cost: saving and loading 250 MB of fp32 beside the same without them.

    python benchmarks/bench_checkpoint.py [--rounds 8] [--results FOLDER]

Target: at most 1.10 of the time without digests, of the wall and of the processor.
"""

import argparse
import collections
import contextlib
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import report
import torch
from torch import nn

import zero_ext
from zero_ext import checkpoint
from zero_ext.checkpoint import digests

TARGET = 1.10
LAYERS, WIDTH = 20, 1750  # 40 tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    report.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    zero_ext.shard(model, stage=2)
    with tempfile.TemporaryDirectory() as folder:
        report.write("checkpoint", rows(Path(folder), model, args.rounds), args.results)


def rows(folder: Path, model: nn.Module, rounds: int) -> Iterator[report.Row]:
    """Pairs of both ways in turn, each pair in the other order."""
    ways = {"with": contextlib.nullcontext, "without": without_digests}
    seconds = collections.defaultdict(list)
    for number in range(rounds + report.WARM_UP):
        for way in sorted(ways, reverse=number % 2 == 1):
            path = folder / way
            with ways[way]():
                for call in (checkpoint.save, checkpoint.load):
                    begin, spent = time.perf_counter(), time.process_time()
                    call(path, model)
                    spent, wall = time.process_time() - spent, time.perf_counter() - begin
                    if number >= report.WARM_UP:
                        seconds[call.__name__, "wall time", way].append(wall)
                        seconds[call.__name__, "processor time", way].append(spent)
    for call in ("save", "load"):
        for clock in ("wall time", "processor time"):
            ours, theirs = (seconds[call, clock, way] for way in ways)
            what = f"{call} of 245 MB with digests, of without, {clock}"
            yield report.at_most(what, ours, theirs, TARGET)
            least = [report.milliseconds([min(each)]) for each in (ours, theirs)]
            ratio = min(ours) / min(theirs)
            yield report.Row(f"{what}, least", *least, ratio, "at most", None)


def without_digests() -> contextlib.AbstractContextManager:
    """The same code, whose digests are all 0."""
    return mock.patch.object(digests, "_C", types.SimpleNamespace(digest=lambda data: 0))


if __name__ == "__main__":
    main()
