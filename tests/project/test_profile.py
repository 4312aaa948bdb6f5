"""zero_ext.profile: where a step's time and memory go, from traces made by hand and a script."""

import gc
import json
import re
from pathlib import Path

import pytest
from torch import nn

import zero_ext
from zero_ext import profile
from zero_ext.engine.memory import bytes_by_kind
from zero_ext.engine.registry import living

pytest.importorskip("matplotlib")

# (name, begin, end) in ms: a step of 100.
STEP = [
    ("ProfilerStep#4", 0, 100),
    ("zero_ext::gather a", 2, 12),
    ("zero_ext::wait for rank 1", 3, 11),
    ("zero_ext::copy from peer 1", 4, 9),
    ("aten::linear", 12, 32),
    ("aten::addmm", 13, 31),
    ("zero_ext::accumulate b", 45, 50),
    ("aten::copy_", 46, 47),
    ("zero_ext::reduce b", 50, 62),
    ("zero_ext::wait for rank 1", 51, 57),
    ("Optimizer.step#AdamW.step", 80, 97),
    ("zero_ext::agree in step()", 80, 84),
    ("zero_ext::wait for rank 1", 81, 84),
    ("zero_ext::update a", 84, 94),
]
BASE_MS = 7000.0  # since 1970
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import zero_ext

stage, steps = int(sys.argv[1]), int(sys.argv[2])
model = zero_ext.shard(nn.Sequential(*[nn.Linear(173, 173) for _ in range(3)]), stage=stage,
                       mesh=None if dist.is_initialized() else "alone")
optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-3)
beside = torch.optim.SGD([nn.Parameter(torch.ones(1))])
for _ in range(steps):
    model(torch.ones(5, 173)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    beside.step()
"""


def trace(path: Path, ranges) -> list[profile.Event]:
    def cat(name: str) -> str:
        return "user_annotation" if name.startswith(("ProfilerStep", "Optimizer")) else "cpu_op"

    events = [
        {"ph": "X", "cat": cat(name), "tid": 1, "name": name}
        | {"ts": 1e3 * begin, "dur": 1e3 * (end - begin)}
        for name, begin, end in ranges
    ]
    other = {"ph": "X", "cat": "cpu_op", "tid": 2, "name": "aten::mm", "ts": 0, "dur": 9e9}
    content = {"traceEvents": [*events, other, {"ph": "M", "name": "process"}]}
    path.write_text(json.dumps(content | {"baseTimeNanoseconds": BASE_MS * 1e6}))
    return profile.read(path)


def sample(ms: float, **kinds: int) -> profile.Sample:
    return profile.Sample(BASE_MS + ms, dict.fromkeys(profile.MEMORY_COLORS, 0) | kinds)


def test_each_moment_belongs_to_its_innermost_range(tmp_path):
    samples = [sample(-1, gathered=9), sample(5, gathered=3, buckets=4), sample(99, buckets=6)]
    of_rank = profile.analyse(trace(tmp_path / "0.json", STEP), samples)
    kinds = {kind: round(ms) for kind, ms in of_rank.sums("kind").items()}
    assert kinds == {
        "gather": 2,
        "wait": (1 + 2) + 6 + (1 + 3),
        "copy": 5,
        "compute": 20 + 1,
        "accumulate": 4,
        "reduce": 6,
        "update": 10,
        "between operations": 2 + 13 + 18 + 3 + 3,
    }
    assert of_rank.step_ms == pytest.approx(sum(kinds.values())) == pytest.approx(100)
    units = {unit: round(ms) for unit, ms in of_rank.sums("unit").items() if unit}
    assert units == {"a": 10 + 10, "b": 5 + 12}
    assert round(of_rank.sums("waits_for", ("wait",))["for rank 1"]) == 12
    assert profile.peak_of(of_rank) == 7


def test_ranks_are_compared(tmp_path):
    idle = [("ProfilerStep#4", 0, 50), ("zero_ext::wait for rank 0", 10, 20)]
    busy = profile.analyse(trace(tmp_path / "0.json", STEP), [sample(5, masters=2**20)])
    other = profile.analyse(trace(tmp_path / "1.json", idle), [])
    assert profile.waits([busy, other]) == [[0, pytest.approx(12)], [pytest.approx(10), 0]]
    assert profile.summary([busy, other]) == (
        "75.0 ms per step, exposed communication 20.0%, waited for most: rank 1 (12.0 ms per "
        "step), peak 1.0 MiB on a rank, without activations"
    )


@pytest.mark.host
@pytest.mark.parametrize("stage", [2, 3])
def test_a_script_is_profiled(anywhere, rank, tmp_path, path, capsys, stage):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = f"--skip 2 --steps 2 --out {path} {script} {stage}".split()
    gc.collect()
    others = sum(sum(bytes_by_kind(handle).values()) for handle in living())  # of earlier tests
    profile.main([*arguments, "1000"])
    events = profile.read(path / f"rank{rank}.json")
    of_rank = profile.analyse(events, [])
    assert [step.name for step in of_rank.steps] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert {"compute", "accumulate", "update"} <= set(of_rank.sums("kind"))
    if rank == 0:
        assert (path / "page.png").read_bytes().startswith(b"\x89PNG")
        peak = float(re.search(r"peak ([\d.]+) MiB", capsys.readouterr().out)[1]) * 2**20
        model = nn.Sequential(*[nn.Linear(173, 173) for _ in range(3)])
        expected = zero_ext.estimate_memory(
            model, 1 if anywhere is None else anywhere.size(), stage
        )
        rounding = 0.05 * 2**20
        most = expected["persistent"] + expected["gathered"] + expected["buckets"]
        assert expected["persistent"] - rounding <= peak <= most + others + rounding

    with pytest.raises(SystemExit):
        profile.main([*arguments, "3"])
    assert "has made 3 steps" in capsys.readouterr().err
