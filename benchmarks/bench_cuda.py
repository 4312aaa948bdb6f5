"""Speed of the CUDA kernels beside the device's own copy and torch's fused AdamW, in one run.

    python benchmarks/bench_cuda.py [--results FOLDER] [--numel-millions N]

GB/s counts the bytes that a kernel must move. "copy" is `y.copy_(x)` of float32, 4 bytes read and 4
written per element, on buffers of the same length: the bandwidth that this device reaches. The
candidates run in turn, round after round, each timed by two events on the stream, with an emptied
L2 cache and without the host's part; a ratio is the median over the rounds of the quotients.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator

import torch
from report import Row, add_arguments, median_ratio, write

from zero_ext import ops

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "30"))
# More than any L2 cache: what one candidate leaves there does not serve the next.
FLUSH_BYTES = 256 * 2**20
# About ten milliseconds, in which the host queues the call, 996 launches among them: its own time
# is not what is measured here.
HEAD_START_CYCLES = 20_000_000
# Ranks whose gradients a kernel adds. Where devices read each other's memory, they lie there.
SOURCES = (2, 4, 8)


class Race:
    """Candidates that are measured in turn."""

    def __init__(self):
        self.calls: dict[str, tuple[Callable[[], object], int]] = {}
        self.seconds: dict[str, list[float]] = {}
        # Read, not written: dirty lines would be written back during what is measured.
        self.flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")

    def add(self, name: str, num_bytes: int, call: Callable[[], object]) -> None:
        """``num_bytes``: what the call must move."""
        self.calls[name] = call, num_bytes

    def run(self) -> None:
        for call, _ in self.calls.values():
            for _ in range(3):
                call()
        events = {name: [] for name in self.calls}
        for _ in range(ROUNDS):
            for name, (call, _) in self.calls.items():
                self.flush.sum()
                torch.cuda._sleep(HEAD_START_CYCLES)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                events[name].append((begin, end))
        torch.cuda.synchronize()
        self.seconds = {
            name: [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
            for name, pairs in events.items()
        }

    def speed(self, name: str) -> str:
        seconds = statistics.median(self.seconds[name])
        return f"{seconds * 1e6:.1f} µs, {self.calls[name][1] / seconds / 1e9:.0f} GB/s"

    def bandwidth(self, ours: str, theirs: str, target: float) -> Row:
        """Our bytes per second over theirs."""
        bytes_ratio = self.calls[ours][1] / self.calls[theirs][1]
        ratio = bytes_ratio * median_ratio(self.seconds[theirs], self.seconds[ours])
        name = f"{ours}, bandwidth of {theirs}"
        return Row(name, self.speed(ours), self.speed(theirs), ratio, "at least", target)

    def time(self, ours: str, theirs: str, target: float) -> Row:
        """Our time over theirs."""
        ratio = median_ratio(self.seconds[ours], self.seconds[theirs])
        name = f"{ours}, time of {theirs}"
        return Row(name, self.speed(ours), self.speed(theirs), ratio, "at most", target)


def bench_flat(numel: int) -> list[Row]:
    x, y = torch.randn(numel, device="cuda"), torch.empty(numel, device="cuda")
    total = torch.randn(numel, device="cuda")
    grads = [torch.randn(numel, device="cuda").bfloat16() for _ in range(max(SOURCES))]
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    race = Race()
    race.add("copy", 8 * numel, lambda: y.copy_(x))
    for fresh, num_bytes in [(False, 10), (True, 6)]:
        race.add(
            f"accumulate bf16{' fresh' * fresh}",
            num_bytes * numel,
            lambda fresh=fresh: ops.accumulate_(grads[0], total, 0.5, fresh=fresh, nonfinite=flag),
        )
    for n in SOURCES:
        race.add(
            f"accumulate_ranks {n} x bf16",
            (2 * n + 8) * numel,
            lambda n=n: ops.accumulate_ranks_(grads[:n], total, 0.5, nonfinite=flag),
        )
    race.add("cast fp32 to bf16", 6 * numel, lambda: ops.cast_(x, grads[0]))
    race.add("find_nonfinite", 4 * numel, lambda: ops.find_nonfinite_([total], flag))
    race.add("x.amax()", 4 * numel, lambda: x.amax())  # reads as much
    race.run()
    ours = [name for name in race.calls if name not in ("copy", "x.amax()")]
    rows = [race.bandwidth(name, "copy", 0.9 if "ranks" in name else 0.88) for name in ours]
    return [*rows, race.time("find_nonfinite", "x.amax()", 1.0)]


def bench_lists() -> list[Row]:
    """996 gradients in GPT-2's proportions, 64 M elements.

    Where dtypes differ, torch's foreach launches a kernel for each tensor.
    """
    width = 256
    layer = [width, width, 3 * width * width, 3 * width, width * width, width]
    layer += [width, width, 4 * width * width, 4 * width, 4 * width * width, width]
    numels = layer * 83
    grads = [torch.randn(n, device="cuda").bfloat16() for n in numels]
    sums = [torch.randn(n, device="cuda") for n in numels]
    total = sum(numels)
    flat = torch.empty(total, dtype=torch.bfloat16, device="cuda")
    offsets = [0]
    for n in numels[:-1]:
        offsets.append(offsets[-1] + n)
    other = torch.empty_like(flat)
    race = Race()
    race.add("copy bf16", 4 * total, lambda: other.copy_(flat))
    race.add("accumulate_list, 996", 10 * total, lambda: ops.accumulate_list_(grads, sums, 0.5))
    race.add("_foreach_add_, 996", 10 * total, lambda: torch._foreach_add_(sums, grads))
    race.add("flatten, 996", 4 * total, lambda: ops.flatten_(grads, flat, offsets))
    race.run()
    return [
        race.time("accumulate_list, 996", "_foreach_add_, 996", 1.0),
        race.bandwidth("accumulate_list, 996", "copy bf16", 0.88),
        race.bandwidth("flatten, 996", "copy bf16", 0.88),
    ]


def bench_adamw(numel: int) -> list[Row]:
    """fp32 state with a bf16 parameter; torch's fused AdamW writes no bf16, so it gets a copy."""
    names = ["master", "grad", "exp_avg", "exp_avg_sq"]
    state = {name: torch.rand(numel, device="cuda") for name in names}
    param = state["master"].bfloat16()
    skip = torch.zeros(1, dtype=torch.int32, device="cuda")
    steps_done = torch.full((1,), 10.0, device="cuda")
    theirs = torch.nn.Parameter(state["master"].clone())
    theirs.grad = state["grad"].clone()
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, fused=True)
    x, y = state["grad"], torch.empty(numel, device="cuda")
    hyper = {"lr": 1e-3, "weight_decay": 0.01}

    def torchs_with_copy():
        optimizer.step()
        param.copy_(theirs.detach())

    race = Race()
    race.add("copy", 8 * numel, lambda: y.copy_(x))
    race.add("adamw", 28 * numel, lambda: ops.adamw_(param=None, **state, step=10, **hyper))
    race.add("torch's fused AdamW", 28 * numel, optimizer.step)
    race.add(
        "adamw with bf16 out",
        32 * numel,
        lambda: ops.adamw_(param=param, **state, step=10, **hyper),
    )
    race.add(
        "adamw with bf16 out, counted",
        32 * numel,
        lambda: ops.adamw_(param=param, **state, steps_done=steps_done, skip=skip, **hyper),
    )
    race.add("torch's fused AdamW + copy", 34 * numel, torchs_with_copy)
    blocks = -(-numel // 256)
    few_bits = {"master": state["master"], "param": param, "grad": state["grad"]}
    halves = [state[name].bfloat16() for name in names[2:]]
    codes = [torch.zeros(numel, dtype=dtype, device="cuda") for dtype in (torch.int8, torch.uint8)]
    scales = tuple(torch.zeros(blocks, device="cuda") for _ in codes)
    race.add(
        "adamw, bf16 states",
        24 * numel,
        lambda: ops.adamw_(**few_bits, exp_avg=halves[0], exp_avg_sq=halves[1], step=10, **hyper),
    )
    race.add(
        "adamw, int8 states",
        20 * numel,
        lambda: ops.adamw_(
            **few_bits, exp_avg=codes[0], exp_avg_sq=codes[1], scales=scales, step=10, **hyper
        ),
    )
    race.run()
    ours = ["adamw", "adamw with bf16 out", "adamw with bf16 out, counted"]
    smaller = ["adamw, bf16 states", "adamw, int8 states"]
    rows = [race.bandwidth(name, "copy", 0.88) for name in ours + smaller]
    rows.append(race.time("adamw", "torch's fused AdamW", 1.0))
    rows += [race.time(name, "torch's fused AdamW + copy", 1.0) for name in ours[1:]]
    return rows + [race.time(name, ours[1], 1.15) for name in smaller]


def bench_all(numel: int) -> Iterator[Row]:
    yield from bench_flat(numel)
    yield from bench_lists()
    yield from bench_adamw(numel)
    # One bucket of 25 MB in bf16, where a launch's own cost shows.
    for row in bench_flat(13 * 10**6):
        row.name += " (13 M elements)"
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel-millions", type=int, default=256)
    add_arguments(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_cuda needs a GPU.")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    write("kernels_cuda", bench_all(args.numel_millions * 10**6), args.results)


if __name__ == "__main__":
    main()
