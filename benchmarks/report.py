"""Results: a table on the terminal, markdown and JSON files with machine, date and commit."""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

WARM_UP = 2  # rounds


@dataclass
class Row:
    """One measured ratio. ``kind`` "at most" or "at least" says which side of ``target`` is met;
    without a target it is only told."""

    name: str
    ours: str
    theirs: str
    ratio: float
    kind: str
    target: float | None

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        return self.ratio <= self.target if self.kind == "at most" else self.ratio >= self.target


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the quotients of neighbours, so that a slow second hits both sides."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def alternate(
    calls: dict[str, Callable[[], object]], rounds: int, before: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds of each call, in turn, round after round; ``before`` each, not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(rounds + WARM_UP):
        for name, call in calls.items():
            before()
            start = time.perf_counter()
            call()
            if round_number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def at_most(name: str, ours: list[float], theirs: list[float], target: float | None) -> Row:
    """The row of two that were measured in turn: our time at most ``target`` of theirs."""
    ratio = median_ratio(ours, theirs)
    return Row(name, milliseconds(ours), milliseconds(theirs), ratio, "at most", target)


def milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, help="folder for NAME.md and NAME.json")


def write(name: str, rows: Iterable[Row], folder: Path | None) -> None:
    """Each row as soon as it is there: a run that is stopped keeps those that it measured."""
    data = {"machine": machine(), "rows": []}
    lines = ["| what | ours | peer | ratio | target | met |", "|---|---|---|---|---|---|"]
    print(*lines, sep="\n", flush=True)
    for row in rows:
        lines.append(_line(row))
        print(lines[-1], flush=True)
        data["rows"].append({**asdict(row), "met": row.met})
        if folder is not None:
            save(name, lines, data, folder)


def write_on_rank_0(name: str, rows: Iterable[Row], folder: Path | None) -> None:
    """As ``write``; the other ranks take part in making the rows. On the host, with one thread."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        write(name, rows, folder)
    else:
        for _ in rows:
            pass
    dist.destroy_process_group()


def save(name: str, table: list[str], data: dict, folder: Path) -> None:
    """As NAME.md, under a line about ``data["machine"]``, and NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    head = ", ".join(f"{key} {value}" for key, value in data["machine"].items())
    text = "\n".join([f"# {name}", "", head, "", *table])
    (folder / f"{name}.md").write_text(f"{text}\n")
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


def machine() -> dict[str, str]:
    """What the figures are of."""
    return {
        "processor": _processor(),
        **_gpu(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }


def _line(row: Row) -> str:
    target, met = f"{row.kind} {row.target}", "yes" if row.met else "NO"
    if row.target is None:
        target = met = ""
    return f"| {row.name} | {row.ours} | {row.theirs} | {row.ratio:.3f} | {target} | {met} |"


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _gpu() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {}
    return {"GPU": torch.cuda.get_device_name(), "CUDA": torch.version.cuda}


def _commit() -> str:
    """COMMIT says it where the folder travels without its history."""
    if commit := os.environ.get("COMMIT"):
        return commit
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
