"""Speed of the CPU kernels beside plain torch and the memory's bandwidth, on one thread.

    taskset -c 0 python benchmarks/bench_kernels.py [--results FOLDER] [--quick]

GB/s counts the bytes that a kernel must move: gradients read + sums read + sums written, and so
on. "rmw" is the fp32 read-modify-write bandwidth: torch's `x.add_(1)`, which reads and writes 4
bytes per element, measured next to each kernel that is compared with it. "copy" is `y.copy_(x)`, a
memcpy of 4 bytes read and 4 written per element. The candidates of a group run in turn, round
after round; a ratio is the median over the rounds of the quotient of two neighbours, so that a
slow second of the machine hits both sides. Times are the thread's CPU time, waiting for memory
included and other processes' turns on the core excluded.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import report
import torch

import zero_ext
from zero_ext import ops

MIB = 2**20


@dataclass
class Row:
    name: str
    ms: float
    gb_per_s: float
    ratio: float | None = None
    ratio_to: str = ""
    target: str = ""
    met: bool | None = None


class Group:
    """Candidates that are measured in turn."""

    def __init__(self, rounds: int):
        self.rounds = rounds
        self.calls: dict[str, Callable[[], object]] = {}
        self.num_bytes: dict[str, int] = {}
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, call: Callable[[], object], num_bytes: int) -> None:
        self.calls[name], self.num_bytes[name] = call, num_bytes

    def measure(self) -> None:
        for call in self.calls.values():
            call()
        self.seconds = {name: [] for name in self.calls}
        for _ in range(self.rounds):
            for name, call in self.calls.items():
                start = time.thread_time()
                call()
                self.seconds[name].append(time.thread_time() - start)

    def ms(self, name: str) -> float:
        return statistics.median(self.seconds[name]) * 1e3

    def row(self, name: str) -> Row:
        return Row(name, self.ms(name), self.num_bytes[name] / self.ms(name) / 1e6)

    def compare(self, name: str, other: str, kind: str, target: float) -> Row:
        """The ratio that `kind` names.

        "bandwidth": GB/s over the other's; "speedup": the other's time over ours; "time": ours over
        the other's.
        """
        pairs = list(zip(self.seconds[name], self.seconds[other], strict=True))
        if kind == "bandwidth":
            factor = self.num_bytes[name] / self.num_bytes[other]
            ratio = statistics.median(factor * theirs / ours for ours, theirs in pairs)
        elif kind == "speedup":
            ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        else:
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        met = ratio <= target if kind == "time" else ratio >= target
        row = self.row(name)
        row.ratio, row.ratio_to, row.met = ratio, f"{kind} / {other}", met
        row.target = f"{'≤' if kind == 'time' else '≥'} {target:g}"
        return row


def gpt2_shapes() -> list[tuple[int, ...]]:
    """996 tensors in GPT-2's proportions (12 per layer, 83 layers), about 64 M elements."""
    width = 256
    layer = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return layer * 83


def small_shapes() -> list[tuple[int, ...]]:
    """1,083 small tensors: 361 times a 64 x 64 weight, a bias and a scale."""
    return [(64, 64), (64,), (64,)] * 361


def randn_list(shapes, dtype):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def bench_flat(numel: int, rounds: int) -> list[Row]:
    grad, other = torch.randn(numel).bfloat16(), torch.randn(numel).bfloat16()
    total, x, y = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    nonfinite = torch.zeros(1, dtype=torch.int32)
    group = Group(rounds)
    group.add("rmw: x.add_(1)", lambda: x.add_(1), 8 * numel)
    group.add(
        "accumulate bf16",
        lambda: ops.accumulate_(grad, total, 0.5, nonfinite=nonfinite),
        10 * numel,
    )
    group.add("acc.add_(g), torch", lambda: total.add_(grad), 10 * numel)
    group.add("rmw again", lambda: x.add_(1), 8 * numel)
    group.add(
        "accumulate_ranks 2 x bf16",
        lambda: ops.accumulate_ranks_([grad, other], total, 0.5, nonfinite=nonfinite),
        12 * numel,
    )
    group.add("copy: memcpy", lambda: y.copy_(x), 8 * numel)
    group.add(
        "accumulate bf16 fresh", lambda: ops.accumulate_(grad, total, 0.5, fresh=True), 6 * numel
    )
    group.add("cast fp32 to bf16", lambda: ops.cast_(x, grad), 6 * numel)
    group.add("grad.copy_(x), torch", lambda: grad.copy_(x), 6 * numel)
    group.add("cast bf16 to fp32", lambda: ops.cast_(grad, x), 6 * numel)
    group.add("x.copy_(grad), torch", lambda: x.copy_(grad), 6 * numel)
    group.measure()
    return [
        group.row("rmw: x.add_(1)"),
        group.row("copy: memcpy"),
        group.compare("accumulate bf16", "rmw: x.add_(1)", "bandwidth", 0.95),
        group.compare("accumulate bf16", "acc.add_(g), torch", "speedup", 8),
        group.compare("accumulate_ranks 2 x bf16", "rmw again", "bandwidth", 0.85),
        group.row("accumulate bf16 fresh"),
        group.compare("cast fp32 to bf16", "grad.copy_(x), torch", "speedup", 1),
        group.compare("cast bf16 to fp32", "x.copy_(grad), torch", "speedup", 1),
    ]


def bench_lists(name: str, shapes, target: float, rounds: int) -> list[Row]:
    grads, sums = randn_list(shapes, torch.bfloat16), randn_list(shapes, torch.float32)
    num_bytes = 10 * sum(total.numel() for total in sums)
    nonfinite = torch.zeros(1, dtype=torch.int32)
    group = Group(rounds)
    ours, torchs = f"accumulate_list, {name}", "_foreach_add_"
    group.add(ours, lambda: ops.accumulate_list_(grads, sums, 0.5, nonfinite=nonfinite), num_bytes)
    group.add(torchs, lambda: torch._foreach_add_(sums, grads), num_bytes)
    group.measure()
    return [group.row(torchs), group.compare(ours, torchs, "speedup", target)]


class TorchAdamW:
    """torch's fused AdamW on fp32 tensors, then the copy to bf16."""

    def __init__(self, shapes):
        self.masters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        self.params = [master.detach().bfloat16() for master in self.masters]
        for master in self.masters:
            master.grad = torch.randn_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, fused=True)
        self.sources = [master.detach() for master in self.masters]

    def step(self):
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.sources)


class OurAdamW:
    """The same numbers in flat buffers, one allocation each.

    Buffers at distances of a power of two, such as two rows of one tensor, compete for the same
    cache sets and cost up to a third of the speed.
    """

    def __init__(self, numel: int):
        self.master, self.grad = torch.randn(numel), torch.randn(numel)
        self.param = self.master.bfloat16()
        self.moments = torch.zeros(numel), torch.zeros(numel)
        self.count = 0

    def step(self):
        self.count += 1
        ops.adamw_(
            self.master, self.param, self.grad, *self.moments,
            lr=1e-3, weight_decay=0.01, step=self.count,
        )  # fmt: skip


def bench_adamw(name: str, shapes, target: float, rounds: int) -> list[Row]:
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    torchs, ours = TorchAdamW(shapes), OurAdamW(numel)
    group = Group(rounds)
    names = f"adamw with bf16 out, {name}", f"torch fused AdamW + copy, {name}"
    group.add(names[0], ours.step, 32 * numel)
    group.add(names[1], torchs.step, 34 * numel)
    group.measure()
    return [group.row(names[1]), group.compare(*names, "time", target)]


class StatesAdamW:
    """One flat AdamW whose moments are stored as `form` says."""

    def __init__(self, form: str, numel: int):
        self.master, self.grad = torch.randn(numel), torch.randn(numel)
        self.param = self.master.bfloat16()
        dtypes = {"fp32": 2 * [torch.float32], "bf16": 2 * [torch.bfloat16]}
        dtypes["int8"] = [torch.int8, torch.uint8]
        self.state = dict(
            zip(
                ("exp_avg", "exp_avg_sq"),
                [torch.zeros(numel, dtype=dtype) for dtype in dtypes[form]],
                strict=True,
            )
        )
        if form == "int8":
            blocks = -(-numel // 256)
            self.state["scales"] = torch.zeros(blocks), torch.zeros(blocks)
        self.count = 0

    def step(self):
        self.count += 1
        ops.adamw_(
            self.master, self.param, self.grad, **self.state,
            lr=1e-3, weight_decay=0.01, step=self.count,
        )  # fmt: skip


def small_adamw(form: str) -> torch.optim.Optimizer:
    """The optimizer itself on 1,083 small tensors, one rank; each step uses the same gradients."""
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in small_shapes()]
    optimizer = zero_ext.optim.AdamW(parameters, lr=1e-3, state_dtype=form)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return optimizer


def bench_states(numel: int, rounds: int) -> list[Row]:
    """States in fewer bits beside fp32 ones, in turn."""
    rows = []
    small = sum(torch.Size(shape).numel() for shape in small_shapes())
    for name, count, make, size in (
        ("flat", rounds, lambda form: StatesAdamW(form, numel), numel),
        ("1,083 small tensors", 5 * rounds, small_adamw, small),
    ):
        group = Group(count)
        names = {form: f"AdamW, {form} states, {name}" for form in ("fp32", "int8", "bf16")}
        others = 16 if name == "flat" else 12  # with a compute copy, and without
        for (form, label), moments in zip(names.items(), (16, 4, 8), strict=True):
            group.add(label, make(form).step, (others + moments) * size)
        group.measure()
        rows.append(group.row(names["fp32"]))
        rows.append(group.compare(names["int8"], names["fp32"], "time", 1.15))
        rows.append(group.row(names["bf16"]))
    return rows


def bench_call_overhead(rounds: int) -> list[Row]:
    """An accumulate of 8 elements through the dispatcher, beside torch's add of the same."""
    grad, total = torch.ones(8), torch.zeros(8)
    calls = 1000

    def many(call):
        for _ in range(calls):
            call()

    op = torch.ops.zero_ext.accumulate_.default
    group = Group(rounds)
    group.add("1000 x accumulate of 8", lambda: many(lambda: op(grad, total)), calls * 96)
    group.add("1000 x add_ of 8", lambda: many(lambda: total.add_(grad)), calls * 96)
    group.measure()
    return [group.row("1000 x accumulate of 8"), group.row("1000 x add_ of 8")]


def table(rows: list[Row]) -> list[str]:
    lines = ["| what | ms | GB/s | ratio | of | target | met |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        met = {None: "", True: "yes", False: "**no**"}[row.met]
        speed = f"{row.ms:.3f} | {row.gb_per_s:.1f}"
        lines.append(f"| {row.name} | {speed} | {ratio} | {row.ratio_to} | {row.target} | {met} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a quarter of the size, 5 rounds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numel, rounds = (16 * MIB, 5) if args.quick else (64 * MIB, args.rounds)
    rows = bench_flat(numel, rounds)
    rows += bench_lists("996 GPT-2 tensors", gpt2_shapes(), 2, rounds)
    rows += bench_lists("1,083 small tensors", small_shapes(), 3, 10 * rounds)
    rows += bench_adamw("flat", [(numel,)], 0.85, rounds)
    rows += bench_adamw("1,083 small tensors", small_shapes(), 0.35, 5 * rounds)
    rows += bench_states(numel, rounds)
    rows += bench_call_overhead(rounds)
    machine = {**report.machine(), "instructions": torch.ops.zero_ext._instruction_set()}
    lines = table(rows)
    print(*lines, sep="\n")
    if args.results:
        data = {"machine": machine, "rows": [asdict(row) for row in rows]}
        report.save("kernels", lines, data, args.results)


if __name__ == "__main__":
    main()
