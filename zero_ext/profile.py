"""``python -m zero_ext.profile SCRIPT args…``: where the time and the memory of a step go.

Launchers run it as a module: ``torchrun --nproc-per-node 2 -m zero_ext.profile SCRIPT args…``. The
script ends after the last profiled step. A step lasts from the end of one ``optimizer.step()`` to
the end of the next, of the first optimizer that steps. Each rank writes a Chrome trace, and rank 0
draws one page. Times are the host's: work of a device is in the traces alone.
"""

import argparse
import bisect
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from zero_ext._scripts import add_script, run_script
from zero_ext.engine.memory import bytes_by_kind
from zero_ext.engine.registry import living
from zero_ext.ranks.groups import rank_and_world

STEP = "ProfilerStep#"
BACKWARD = "autograd::engine::"
OURS = "zero_ext::"
WITHOUT_UNIT = tuple(f"{OURS}{verb} " for verb in ("agree", "copy", "wait"))
# Of torch's operators, and of the ranges of this package: docs/reference.md, "In a profile".
TIME_COLORS = {
    "compute": "#8ecae6",
    "accumulate": "#90be6d",
    "reduce": "#f9c74f",
    "update": "#cdb4db",
    "gather": "#f8961e",
    "copy": "#f3722c",
    "wait": "#d00000",
    "between operations": "#dddddd",
}
MEMORY_COLORS = {
    "parameters": "#8ecae6",
    "masters": "#219ebc",
    "gradients": "#90be6d",
    "optimizer states": "#cdb4db",
    "gathered": "#f8961e",
    "buckets": "#f9c74f",
}
COMMUNICATION = ("gather", "copy", "wait")
SAMPLE_S = 0.001
UNITS_SHOWN = 24


class Event(NamedTuple):
    """A range; times in ms since 1970. ``of``: the unit or the rank that its name ends with."""

    name: str
    kind: str
    of: str
    begin: float
    end: float


class Piece(NamedTuple):
    """A stretch in which one range is the innermost. ``unit``: whose it is; "" where of none."""

    kind: str
    unit: str
    waits_for: str
    begin: float
    ms: float


class Sample(NamedTuple):
    """The bytes that this rank held. ``at``: ms since 1970."""

    at: float
    by_kind: dict[str, int]


class Profile(NamedTuple):
    """The profile of one rank: its steps, the pieces of their time, samples of its memory."""

    steps: list[Event]
    pieces: list[Piece]
    samples: list[Sample]

    @property
    def step_ms(self) -> float:
        return sum(step.end - step.begin for step in self.steps) / len(self.steps)

    def sums(self, field: str, kinds: Sequence[str] = tuple(TIME_COLORS)) -> dict[str, float]:
        """ms per step by the pieces' ``field``."""
        result: dict[str, float] = defaultdict(float)
        for piece in self.pieces:
            if piece.kind in kinds:
                result[getattr(piece, field)] += piece.ms / len(self.steps)
        return result


def read(trace: Path) -> list[Event]:
    """The events of the thread with the steps, and of the backwards' thread that it waits for."""
    content = json.loads(trace.read_text())
    found = [e for e in content["traceEvents"] if e.get("cat") in ("cpu_op", "user_annotation")]
    threads = {e["tid"] for e in found if e["name"].startswith((STEP, BACKWARD))}
    offset = content["baseTimeNanoseconds"] / 1e6
    events = []
    for e in found:
        if e["tid"] in threads:
            verb, _, of = e["name"].removeprefix(OURS).partition(" ")
            if e["name"].startswith(OURS):
                kind = {"agree": "wait", "release": "gather"}.get(verb, verb)
            else:
                kind = "compute" if e["cat"] == "cpu_op" else "between operations"
            begin = offset + e["ts"] / 1e3
            events.append(Event(e["name"], kind, of, begin, begin + e["dur"] / 1e3))
    return events


def analyse(events: Sequence[Event], samples: Sequence[Sample]) -> Profile:
    steps = sorted((e for e in events if e.name.startswith(STEP)), key=lambda e: e.begin)
    begins = [step.begin for step in steps]
    pieces: list[Piece] = []
    stack: list[Event] = []
    now = 0.0

    def advance(to: float) -> None:
        nonlocal now
        if stack and to > now:
            pieces.append(_piece(stack, now, to))
        now = max(now, to)

    def close(before: float) -> None:
        while stack and stack[-1].end <= before:
            advance(stack[-1].end)
            stack.pop()

    for event in sorted(events, key=lambda e: (e.begin, -e.end)):
        k = bisect.bisect_right(begins, event.begin) - 1
        if k >= 0 and event.end <= steps[k].end:
            close(event.begin)
            advance(event.begin)
            stack.append(event)
    close(steps[-1].end)
    inside = (sample for sample in samples if begins[0] <= sample.at <= steps[-1].end)
    return Profile(steps, pieces, sorted(inside, key=lambda sample: sample.at))


def _piece(stack: Sequence[Event], begin: float, end: float) -> Piece:
    """The time between two events: of the innermost range, its unit, and the awaited rank."""
    ours = [event for event in reversed(stack) if event.name.startswith(OURS)]
    of_units = (e.of for e in ours if not e.name.startswith(WITHOUT_UNIT))
    waits = (e.of for e in ours if e.name.startswith(f"{OURS}wait "))
    return Piece(stack[-1].kind, next(of_units, ""), next(waits, ""), begin, end - begin)


def waits(profiles: Sequence[Profile]) -> list[list[float]]:
    """ms per step that each rank (row) waited for each one (column)."""
    sums = [profile.sums("waits_for", ("wait",)) for profile in profiles]
    return [[row.get(f"for rank {rank}", 0.0) for rank in range(len(sums))] for row in sums]


def summary(profiles: Sequence[Profile]) -> str:
    total = sum(profile.step_ms for profile in profiles)
    exposed = sum(sum(p.sums("kind", COMMUNICATION).values()) for p in profiles) / total
    text = f"{total / len(profiles):.1f} ms per step, exposed communication {exposed:.1%}"
    if len(profiles) > 1:
        columns = [sum(column) for column in zip(*waits(profiles), strict=True)]
        slowest = max(range(len(columns)), key=columns.__getitem__)
        text += f", waited for most: rank {slowest} ({columns[slowest]:.1f} ms per step)"
    if peak := max(peak_of(profile) for profile in profiles):
        text += f", peak {peak / 2**20:,.1f} MiB on a rank, without activations"
    return text


def peak_of(profile: Profile) -> int:
    return max((sum(sample.by_kind.values()) for sample in profile.samples), default=0)


def draw(profiles: Sequence[Profile], title: str, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(15, 14), layout="constrained")
    axes = figure.subplot_mosaic(
        [["time", "kinds"], ["memory", "waits"], ["units", "units"]], width_ratios=(3, 2)
    )
    figure.suptitle(f"{title}\n{summary(profiles)}", fontsize=12)
    ranks = [f"rank {rank}" for rank in range(len(profiles))]
    _draw_time(axes["time"], profiles, ranks)
    _draw_memory(axes["memory"], profiles)
    axes["memory"].sharex(axes["time"])
    axes["kinds"].set_title("a step, by what it does")
    _draw_bars(axes["kinds"], [profile.sums("kind") for profile in profiles], ranks)
    _draw_units(axes["units"], profiles)
    axes["waits"].set(title="waits, ms per step", xlabel="for rank", ylabel="rank")
    shown = axes["waits"].imshow(waits(profiles), cmap="Reds", vmin=0)
    figure.colorbar(shown, ax=axes["waits"])
    for axis in (axes["waits"].xaxis, axes["waits"].yaxis):
        axis.get_major_locator().set_params(integer=True)
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in TIME_COLORS.values()]
    figure.legend(handles, TIME_COLORS, loc="outside lower center", ncols=len(TIME_COLORS))
    figure.savefig(path, dpi=110)


def _draw_time(axes: Any, profiles: Sequence[Profile], ranks: Sequence[str]) -> None:
    for rank, profile in enumerate(profiles):
        begin = profile.steps[-1].begin
        for kind, color in TIME_COLORS.items():
            last = (p for p in profile.pieces if p.kind == kind and p.begin >= begin)
            bars = [(p.begin - begin, p.ms) for p in last]
            axes.broken_barh(bars, (rank - 0.4, 0.8), color=color, linewidth=0)
    axes.set(title="last step", xlabel="ms")
    axes.set_yticks(range(len(ranks)), ranks)
    axes.invert_yaxis()


def _draw_memory(axes: Any, profiles: Sequence[Profile]) -> None:
    """Draw the memory in the last step, of the rank that holds most."""
    rank = max(range(len(profiles)), key=lambda rank: peak_of(profiles[rank]))
    begin = profiles[rank].steps[-1].begin
    samples = [sample for sample in profiles[rank].samples if sample.at >= begin]
    rows = [[s.by_kind[kind] / 2**20 for s in samples] for kind in MEMORY_COLORS]
    axes.stackplot(
        [sample.at - begin for sample in samples], rows,
        labels=MEMORY_COLORS, colors=MEMORY_COLORS.values(), step="post",
    )  # fmt: skip
    axes.set(title=f"memory of rank {rank}, without activations", xlabel="ms", ylabel="MiB")
    axes.legend(loc="lower left", ncols=3)


def _draw_bars(axes: Any, rows: Sequence[dict[str, float]], names: Sequence[str]) -> None:
    left = [0.0] * len(rows)
    for kind, color in TIME_COLORS.items():
        sizes = [row.get(kind, 0.0) for row in rows]
        axes.barh(range(len(rows)), sizes, left=left, color=color, height=0.8)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.set(xlabel="ms per step")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _draw_units(axes: Any, profiles: Sequence[Profile]) -> None:
    units: dict[str, dict[str, float]] = {}
    for profile in profiles:
        for piece in (piece for piece in profile.pieces if piece.unit):
            row = units.setdefault(piece.unit, defaultdict(float))
            row[piece.kind] += piece.ms / len(profile.steps) / len(profiles)
    longest = sorted(units, key=lambda unit: -sum(units[unit].values()))[:UNITS_SHOWN]
    axes.set_title(f"units that take most, mean of the ranks ({len(longest)} of {len(units)})")
    names = [unit if len(unit) < 44 else f"{unit[:20]} … {unit[-20:]}" for unit in longest]
    _draw_bars(axes, [units[unit] for unit in longest], names)


class _EnoughError(BaseException):
    """Ends the script after the last profiled step."""


class _Watch:
    """Counts the steps of a script, and samples what engines hold in the profiled ones."""

    def __init__(self, skip: int, steps: int):
        self.profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=skip - 1, warmup=1, active=steps, repeat=1),
            acc_events=True,
        )
        self.samples: list[Sample] = []
        self._first, self._end = skip, skip + steps
        self._optimizer: Any = None
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    @property
    def steps(self) -> int:
        """How many the script has made."""
        return self.profiler.step_num

    def __enter__(self) -> "_Watch":
        self._hook = register_optimizer_step_post_hook(self._after_step)
        self.profiler.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()
        self._over.set()
        self.profiler.stop()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            self.profiler.step()
            if self.steps == self._end:
                raise _EnoughError
            if self.steps >= self._first:
                self._take_sample()
            if self.steps == self._first:
                self._sampler.start()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._take_sample()

    def _take_sample(self) -> None:
        at = time.time_ns() / 1e6
        held: Counter[str] = Counter(dict.fromkeys(MEMORY_COLORS, 0))
        for handle in living():
            held.update(bytes_by_kind(handle))
        self.samples.append(Sample(at, dict(held)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m zero_ext.profile",
        description="Where the time and the memory of a script's steps go.",
    )
    parser.add_argument("--skip", type=int, default=3, help="steps before; at least 1")
    parser.add_argument("--steps", type=int, default=3, help="steps that are profiled")
    parser.add_argument("--out", type=Path, default=Path("profile"), metavar="FOLDER")
    add_script(parser)
    args = parser.parse_args(arguments)
    if min(args.skip, args.steps) < 1:
        parser.error("--skip and --steps must be at least 1")
    watch = _Watch(args.skip, args.steps)
    try:
        with watch:
            run_script(args.script, args.arguments, args.is_module)
    except _EnoughError:
        pass
    if watch.steps < args.skip + args.steps:
        parser.error(
            f"'{args.script}' has made {watch.steps} steps, and --skip {args.skip} --steps "
            f"{args.steps} needs {args.skip + args.steps}. Pass smaller numbers"
        )
    rank, world = rank_and_world()
    args.out.mkdir(parents=True, exist_ok=True)
    trace = args.out / f"rank{rank}.json"
    watch.profiler.export_chrome_trace(str(trace))
    profiles: list[Any] = [analyse(read(trace), watch.samples)]
    if world > 1:
        (mine,), profiles = profiles, [None] * world
        dist.all_gather_object(profiles, mine)
    if rank == 0:
        draw(profiles, f"{args.script}, {world} ranks", args.out / "page.png")
        print(summary(profiles))
        print(f"{args.out / 'page.png'}, {trace} …")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
