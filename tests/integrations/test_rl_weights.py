"""``examples/rl_weights.py`` beside TRL: ``make test-packages``. Skipped where TRL is missing."""

import re
from pathlib import Path

import pytest
from launching import run_on_ranks

pytest.importorskip("trl")

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_weights.py"
STEPS = 4

pytestmark = [pytest.mark.host, pytest.mark.timeout(240)]


def run(script: Path, folder: Path, *arguments: str):
    arguments = (str(script), f"--steps={STEPS}", *arguments)
    return run_on_ranks(2, *arguments, cwd=folder, timeout_s=200)


@pytest.mark.parametrize("stage", [2, 3])
def test_another_process_has_the_trained_weights_after_each_step(tmp_path, stage):
    result = run(EXAMPLE, tmp_path, f"--stage={stage}", "--lr=1e-5")
    assert result.returncode == 0, result.stderr[-4000:]
    found = re.findall(r"step (\d+): (\d+) of (\d+) weights, (\w+)", result.stdout)
    assert [int(step) for step, *_ in found] == [*range(1, STEPS + 1)]
    written = [int(count) for _, count, *_ in found]
    total = int(found[0][2])
    assert written[0] == total
    assert all(0 < count < total / 2 for count in written[1:])  # so some came by their indices
    assert len({weights for *_, weights in found}) == STEPS


def test_an_engine_with_other_weights_ends_the_training(tmp_path):
    code = EXAMPLE.read_text()
    lacking = code.replace("apply_changes(weights, changes)", "apply_changes(weights, changes[1:])")
    assert lacking != code
    script = tmp_path / "lacking.py"
    script.write_text(lacking)
    result = run(script, tmp_path)
    assert result.returncode != 0
    assert "step 1: the engine's weights are not the trainer's" in result.stderr
