"""benchmarks/profile_page.py: where the time of a step goes, from traces made by hand."""

import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("profile_page")


# (name, begin, end) in ms: a step of 100 of which 4 are in no range.
STEP = [
    ("step", 0, 100),
    ("forward", 1, 40),
    ("zero_ext::gather a", 2, 12),
    ("zero_ext::wait for rank 1", 3, 11),
    ("zero_ext::copy from peer 1", 4, 9),
    ("aten::linear", 12, 32),
    ("aten::addmm", 13, 31),
    ("backward", 40, 80),
    ("zero_ext::accumulate b", 45, 50),
    ("aten::copy_", 46, 47),
    ("zero_ext::reduce b", 50, 62),
    ("zero_ext::wait for rank 1", 51, 57),
    ("optimizer", 80, 97),
    ("zero_ext::agree in step()", 80, 84),
    ("zero_ext::wait for rank 1", 81, 84),
    ("zero_ext::update a", 84, 94),
]


def trace(path: Path, ranges, shift: float = 0.0) -> Path:
    events = [
        {"ph": "X", "cat": "cpu_op", "tid": 1, "name": name}
        | {"ts": 1e3 * (begin + shift), "dur": 1e3 * (end - begin)}
        for name, begin, end in ranges
    ]
    other = {"ph": "X", "cat": "cpu_op", "tid": 2, "name": "aten::mm", "ts": 0, "dur": 9e9}
    path.write_text(json.dumps({"traceEvents": [*events, other, {"ph": "M", "name": "process"}]}))
    return path


def test_each_moment_belongs_to_its_innermost_range(page, tmp_path):
    profile = page.analyse(page.read(trace(tmp_path / "0.json", STEP)))
    kinds = {kind: round(ms) for kind, ms in profile.sums("kind").items()}
    assert kinds == {
        "gather": 2,
        "wait": (1 + 2) + 6 + (1 + 3),
        "copy": 5,
        "compute": 20 + 1,
        "accumulate": 4,
        "reduce": 6,
        "update": 10,
        "between operations": (1 + 8) + (5 + 18) + 3,
    }
    assert profile.unexplained_ms == pytest.approx(4)
    assert profile.step_ms == pytest.approx(100)
    units = {unit: round(ms) for unit, ms in profile.sums("unit").items() if unit}
    assert units == {"a": 10 + 10, "b": 5 + 12}
    assert round(profile.sums("waits_for", ("wait",))["for rank 1"]) == 12


def test_the_first_steps_are_left_out_and_the_page_is_drawn(page, tmp_path):
    second = [(name, begin + 200, end + 200) for name, begin, end in STEP[:2]]
    idle = [("step", 0, 50), ("forward", 0, 50), ("zero_ext::wait for rank 0", 10, 20)]
    of_rank_0 = page.analyse(page.read(trace(tmp_path / "0.json", [*second, *STEP]), skipped=1))
    assert of_rank_0.step_ms == pytest.approx(100)
    assert set(of_rank_0.sums("kind")) == {"between operations"}
    busy = page.analyse(page.read(trace(tmp_path / "0.json", STEP, shift=7.0)))
    other = page.analyse(page.read(trace(tmp_path / "1.json", idle)))
    assert page.waits([busy, other]) == [[0, pytest.approx(12)], [pytest.approx(10), 0]]
    line = page.summary([busy, other])
    assert line.startswith("75.0 ms per step, 97.3% of it in named ranges; exposed")
    assert "communication 20.0%; waited for most: rank 1 (12.0 ms" in line
    page.draw([busy, other], "by hand", tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
