"""Where the time of a step goes, from the Chrome traces of all ranks, and one page about it."""

import bisect
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEP = "step"
PHASES = ("forward", "backward", "optimizer", "zero_grad", "loss")  # parts of a step
COLORS = {
    "compute": "#8ecae6",
    "accumulate": "#90be6d",
    "reduce": "#f9c74f",
    "update": "#cdb4db",
    "gather": "#f8961e",
    "copy": "#f3722c",
    "wait": "#d00000",
    "between operations": "#dddddd",
}
COMMUNICATION = ("gather", "copy", "wait")
UNITS_SHOWN = 24


class Event(NamedTuple):
    """A range on the thread of the step; times in µs."""

    name: str
    begin: float
    end: float


class Piece(NamedTuple):
    """A stretch in which one range is the innermost. ``unit``: whose it is; "" where of none."""

    kind: str
    unit: str
    waits_for: str
    begin: float
    end: float

    @property
    def ms(self) -> float:
        return (self.end - self.begin) / 1e3


class Profile(NamedTuple):
    """Of one rank: its steps, what they consist of, and how much of them no range covers."""

    steps: list[Event]
    pieces: list[Piece]
    unexplained_ms: float

    @property
    def step_ms(self) -> float:
        return sum(step.end - step.begin for step in self.steps) / 1e3

    def sums(self, field: str, kinds: Sequence[str] | None = None) -> dict[str, float]:
        """ms by the pieces' ``field``."""
        result: dict[str, float] = defaultdict(float)
        for piece in self.pieces:
            if kinds is None or piece.kind in kinds:
                result[getattr(piece, field)] += piece.ms
        return result


def read(trace: Path, skipped: int = 0) -> list[Event]:
    """Of the thread that has the steps, after the first ``skipped`` steps."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    thread = next(e["tid"] for e in events if e["name"] == STEP)
    begin = sorted(e["ts"] for e in events if e["name"] == STEP)[skipped]
    named = ("user_annotation", "cpu_op")
    return [
        Event(e["name"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["tid"] == thread and e.get("cat") in named and e["ts"] >= begin
    ]


def analyse(events: Sequence[Event]) -> Profile:
    steps = sorted((e for e in events if e.name == STEP), key=lambda e: e.begin)
    begins = [step.begin for step in steps]
    pieces: list[Piece] = []
    unexplained = 0.0
    stack: list[Event] = []
    now = 0.0

    def advance(to: float) -> None:
        nonlocal now, unexplained
        if stack and stack[0].name == STEP and to > now:
            if len(stack) == 1:
                unexplained += to - now
            else:
                pieces.append(_piece(stack, now, to))
        now = max(now, to)

    for event in sorted(events, key=lambda e: (e.begin, -e.end)):
        k = bisect.bisect_right(begins, event.begin) - 1
        if k < 0 or event.end > steps[k].end:
            continue
        while stack and stack[-1].end <= event.begin:
            advance(stack[-1].end)
            stack.pop()
        advance(event.begin)
        now = event.begin
        stack.append(event)
    while stack:
        advance(stack[-1].end)
        stack.pop()
    return Profile(steps, pieces, unexplained / 1e3)


def _piece(stack: Sequence[Event], begin: float, end: float) -> Piece:
    """Of the innermost range; the unit and what is waited for are those of ranges around it."""
    kind = unit = waits_for = ""
    for event in reversed(stack):
        if event.name in PHASES:
            kind = kind or "between operations"
        elif not event.name.startswith("zero_ext::"):
            kind = kind or "compute"
        else:
            verb, _, of = event.name.removeprefix("zero_ext::").partition(" ")
            kind = kind or {"agree": "wait", "release": "gather"}.get(verb, verb)
            if verb == "wait":
                waits_for = waits_for or of
            elif verb not in ("copy", "agree"):
                unit = unit or of
    return Piece(kind, unit, waits_for, begin, end)


def waits(profiles: Sequence[Profile]) -> list[list[float]]:
    """ms per step that each rank (row) waited for each one (column)."""
    table = []
    for profile in profiles:
        sums = profile.sums("waits_for", ("wait",))
        row = [sums.get(f"for rank {rank}", 0.0) for rank in range(len(profiles))]
        table.append([ms / len(profile.steps) for ms in row])
    return table


def summary(profiles: Sequence[Profile]) -> str:
    total = sum(profile.step_ms for profile in profiles)
    exposed = sum(sum(p.sums("kind", COMMUNICATION).values()) for p in profiles) / total
    explained = 1 - sum(profile.unexplained_ms for profile in profiles) / total
    steps = sum(len(profile.steps) for profile in profiles)
    columns = [sum(column) for column in zip(*waits(profiles), strict=True)]
    slowest = max(range(len(columns)), key=columns.__getitem__)
    return (
        f"{total / steps:.1f} ms per step, {explained:.1%} of it in named ranges; exposed "
        f"communication {exposed:.1%}; waited for most: rank {slowest} ({columns[slowest]:.1f} ms "
        "per step)"
    )


def draw(profiles: Sequence[Profile], title: str, path: Path) -> None:
    figure, axes = plt.subplots(
        2, 2, figsize=(15, 10), layout="constrained", gridspec_kw={"width_ratios": (3, 2)}
    )
    figure.suptitle(f"{title}\n{summary(profiles)}", fontsize=12)
    _draw_timeline(axes[0][0], profiles)
    _draw_kinds(axes[0][1], profiles)
    _draw_units(axes[1][0], profiles)
    _draw_waits(axes[1][1], profiles)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, loc="outside lower center", ncols=len(COLORS))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_timeline(axes, profiles: Sequence[Profile]) -> None:
    axes.set_title("last step")
    for rank, profile in enumerate(profiles):
        step = profile.steps[-1]
        for kind, color in COLORS.items():
            bars = [
                ((p.begin - step.begin) / 1e3, p.ms)
                for p in profile.pieces
                if p.kind == kind and step.begin <= p.begin < step.end
            ]
            axes.broken_barh(bars, (rank - 0.4, 0.8), color=color, linewidth=0)
    axes.set(xlabel="ms", yticks=range(len(profiles)))
    axes.set_yticklabels([f"rank {rank}" for rank in range(len(profiles))])
    axes.invert_yaxis()


def _stack(axes, rows: Sequence[dict[str, float]], names: Sequence[str], largest: float) -> None:
    left = [0.0] * len(rows)
    for kind, color in COLORS.items():
        sizes = [row.get(kind, 0.0) for row in rows]
        axes.barh(range(len(rows)), sizes, left=left, color=color, height=0.8)
        for at, (begin, size) in enumerate(zip(left, sizes, strict=True)):
            if size > 0.06 * largest and len(rows) < 10:
                axes.text(begin + size / 2, at, f"{size:.1f}", ha="center", va="center", size=8)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.set(xlabel="ms per step", yticks=range(len(rows)))
    axes.set_yticklabels(names, fontsize=8 if len(rows) > 8 else None)
    axes.invert_yaxis()


def _draw_kinds(axes, profiles: Sequence[Profile]) -> None:
    axes.set_title("a step, by what it does")
    rows = [{kind: ms / len(p.steps) for kind, ms in p.sums("kind").items()} for p in profiles]
    _stack(axes, rows, [f"rank {rank}" for rank in range(len(rows))], max(map(_total, rows)))


def _total(row: dict[str, float]) -> float:
    return sum(row.values())


def _draw_units(axes, profiles: Sequence[Profile]) -> None:
    units: dict[str, dict[str, float]] = {}
    steps = sum(len(profile.steps) for profile in profiles)
    for piece in (piece for profile in profiles for piece in profile.pieces if piece.unit):
        row = units.setdefault(piece.unit, defaultdict(float))
        row["gather" if piece.kind == "compute" else piece.kind] += piece.ms / steps
    longest = sorted(units, key=lambda unit: -_total(units[unit]))[:UNITS_SHOWN]
    shown = [unit for unit in units if unit in longest]
    axes.set_title(f"units, mean of the ranks ({len(shown)} of {len(units)})")
    rows = [units[unit] for unit in shown]
    names = [unit if len(unit) < 44 else f"{unit[:20]} … {unit[-20:]}" for unit in shown]
    _stack(axes, rows, names, max(map(_total, rows), default=0.0))


def _draw_waits(axes, profiles: Sequence[Profile]) -> None:
    table = waits(profiles)
    axes.set_title("waits, ms per step")
    axes.imshow(table, cmap="Reds", vmin=0)
    top = max(map(max, table))
    for row, values in enumerate(table):
        for column, ms in enumerate(values):
            color = "white" if ms > 0.6 * top else "black"
            axes.text(column, row, f"{ms:.1f}", ha="center", va="center", color=color)
    ranks = range(len(table))
    axes.set(xlabel="for rank", ylabel="rank", xticks=ranks, yticks=ranks)
