"""Peak memory of training a GPT, per rank, beside DDP and FSDP2: 2 ranks on the CPU.

    python benchmarks/bench_memory.py [--ranks 2] [--hidden 384] [--results FOLDER]

Both sides keep the same numbers. Beside DDP: bf16 parameters, fp32 masters and moments. Beside
FSDP2: fp32 parameters and moments, computed with in bf16, gradients reduced in fp32. Each candidate
trains for three steps in processes of its own. What is told is the largest resident set of a rank,
above that of the same process when it had trained a model of one block, which is that of torch and
its libraries. The C library returns each tensor's memory at once. Pages that were given up, which
the kernel takes back when it runs short (MADV_FREE), do not count. A thread looks every few
milliseconds: 1 % less than what the kernel itself saw at most, where no pages were given up.
"""

import argparse
import datetime
import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import models
import report
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_step import ddp_step, fsdp_step, training_step
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext

STEPS = 3
Step = Callable[[], float]


def zero_step(model: nn.Module, batch: Tensor, stage: int) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    zero_ext.shard(model, stage, mp_policy=policy, units=models.Block if stage == 3 else None)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-4)
    return training_step(model, optimizer, batch, 1)


# By name: makes a step of an fp32 model.
CANDIDATES: dict[str, Callable[[nn.Module, Tensor], Step]] = {
    "DDP": lambda model, batch: ddp_step(model.bfloat16(), batch, 1),
    "FSDP2": lambda model, batch: fsdp_step(model, batch, 1),
    "stage 1": lambda model, batch: zero_step(model.bfloat16(), batch, 1),
    "stage 2": lambda model, batch: zero_step(model.bfloat16(), batch, 2),
    "stage 3": lambda model, batch: zero_step(model, batch, 3),
}
# Beside whom, and at most what part of it. Stage 3 has a bf16 shard beside the fp32 one.
PEERS = {"stage 1": ("DDP", 1.0), "stage 2": ("DDP", 1.0), "stage 3": ("FSDP2", None)}


def resident() -> int:
    """Bytes of this process that the kernel cannot take back."""
    sizes = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size, _ = line.split()
        sizes[name] = int(size) * 1024
    return sizes["Rss:"] - sizes["LazyFree:"]


class Peak(threading.Thread):
    """The largest ``resident()`` seen inside the ``with``."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            self.bytes = max(self.bytes, resident())

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *exception) -> None:
        self._ended.set()
        self.join()


def peak_of(make_step: Callable[[nn.Module, Tensor], Step], model: nn.Module, batch) -> int:
    step = make_step(model, batch)
    del model
    gc.collect()
    with Peak() as peak:
        for _ in range(STEPS):
            step()
    return peak.bytes


def train(rank: int, ranks: int, name: str, hidden: int, folder: str) -> None:
    """One rank of one candidate; leaves its peak in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    torch.manual_seed(0)
    batch = models.gpt_batch(torch.Generator().manual_seed(rank))
    peak_of(CANDIDATES[name], models.GPT(layers=1, hidden=48), batch)
    gc.collect()
    before = resident()
    peak = peak_of(CANDIDATES[name], models.GPT(hidden=hidden), batch)
    Path(folder, f"{rank}").write_text(str(peak - before))
    dist.barrier()
    dist.destroy_process_group()


def rows(ranks: int, hidden: int) -> Iterator[report.Row]:
    peaks = {}
    for name in CANDIDATES:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train, (ranks, name, hidden, folder), nprocs=ranks)
            peaks[name] = max(int(Path(folder, f"{r}").read_text()) for r in range(ranks))
    for name, (peer, target) in PEERS.items():
        ours, theirs = peaks[name], peaks[peer]
        label = f"GPT, hidden {hidden}, {ranks} ranks, {name} / {peer}"
        mib = (f"{value / 2**20:.0f} MiB" for value in (ours, theirs))
        yield report.Row(label, *mib, ours / theirs, "at most", target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=384)
    report.add_arguments(parser)
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the processes that are started from here
    report.write("memory", rows(args.ranks, args.hidden), args.results)


if __name__ == "__main__":
    main()
