"""The examples at their smallest: two ranks as subprocesses, a dozen steps."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from launching import run_on_ranks

from zero_ext import diff

ROOT = Path(__file__).parents[2]
TINY = "--size tiny --steps 12 --sequence 32 --batch-size 4 --text zero_text.txt".split()


def train(tmp_path, *arguments: str, ranks: int = 2) -> dict:
    """The log of a tiny run, whose loss must not depend on the machine's standard library."""
    (tmp_path / "zero_text.txt").write_text("".join(f"line {i * i}\n" for i in range(20_000)))
    script = [str(ROOT / "examples" / "train_lm.py"), *TINY, "--out", "run", *arguments]
    result = run_on_ranks(ranks, *script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "held-out loss" in result.stdout
    assert (tmp_path / "run" / "loss.png").stat().st_size > 0
    return json.loads((tmp_path / "run" / "log.json").read_text())


LEARNING = ("--accumulation-steps=2", "--lr=3e-3")
SLOW = pytest.mark.slow


def assert_learned(log: dict) -> None:
    assert len(log["loss"]) == 12
    assert log["held_out_loss"] < log["loss"][0] - 0.5
    assert log["world"] == 2
    assert log["sample"].startswith("def ")
    assert log["bytes_held"] > 0


@pytest.fixture
def train_lm(tmp_path, monkeypatch):
    """The example as a module of this process, in the folder of its runs."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("train_lm")


@SLOW
@pytest.mark.parametrize("method", ["--ddp", "--stage=1", "--stage=3"])
def test_two_ranks_learn_and_write_their_log(tmp_path, method):
    assert_learned(train(tmp_path, method, *LEARNING))


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=SLOW), "muon"])
def test_two_ranks_learn_and_a_resumed_run_has_the_losses_of_one_that_went_on(
    tmp_path, monkeypatch, train_lm, optimizer
):
    chosen = f"--optimizer={optimizer}"
    log = train(tmp_path, "--stage=2", *LEARNING, chosen, "--checkpoint-every=8")
    assert_learned(log)
    (tmp_path / "run" / "log.json").unlink()
    refused = [*TINY, "--out", "run", *LEARNING, chosen, "--resume=run/step-8", "--steps=8"]
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *refused])
    with pytest.raises(SystemExit, match="has made 8 steps"):
        train_lm.main()
    assert not (tmp_path / "run" / "log.json").exists()
    resumed = train(tmp_path, "--stage=3", *LEARNING, chosen, "--resume=run/step-8")
    assert resumed["loss"] == log["loss"]
    assert resumed["gradient_norm"] == log["gradient_norm"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--steps=0", "--steps: 0 is not positive"),
        ("--batch-size=-1", "--batch-size: -1 is not positive"),
        ("--sequence=0", "--sequence: 0 is not positive"),
        ("--text=nope", "--text nope does not exist"),
        ("--out=zero_text.txt", "--out zero_text.txt is a file"),
    ],
    ids=lambda value: value.partition("=")[0] if "=" in value else "",
)
def test_what_cannot_be_is_refused_at_once(monkeypatch, capsys, train_lm, argument, message):
    Path("zero_text.txt").write_text("taken")
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *TINY, argument])
    with pytest.raises(SystemExit):
        train_lm.parse_arguments()
    assert message in capsys.readouterr().err


def test_one_process_needs_no_torchrun(tmp_path):
    log = train(tmp_path, "--ddp", "--dtype=fp32", ranks=1)

    assert log["world"] == 1
    assert log["held_out_loss"] < log["loss"][0]


def test_a_run_that_loses_a_rank_is_that_of_one_rank(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i * i}\n" for i in range(20_000)))
    script = [str(ROOT / "examples" / "elastic.py"), "--text=text.txt"]
    script += "--size tiny --steps 5 --sequence 16 --out".split()
    for ranks, name, losing in ((3, "lost", 2), (2, "lost", None), (1, "alone", None)):
        more = [] if losing is None else [f"--lose={losing}"]
        result = run_on_ranks(ranks, *script, f"{tmp_path.name}-{name}", *more, cwd=tmp_path)
        assert (result.returncode != 0) == (losing is not None), result.stderr[-4000:]
    logs = [str(tmp_path / f"{tmp_path.name}-{name}/log.jsonl") for name in ("lost", "alone")]
    lines = [json.loads(line) for line in Path(logs[0]).read_text().splitlines()]
    assert [line["ranks"] for line in lines] == [3, 3, 2, 2, 2]
    assert diff.main(logs) == 0
    curves = json.loads((tmp_path / f"{tmp_path.name}-alone/log.json").read_text())
    assert curves["loss"] == [line["loss"] for line in lines]


@pytest.mark.timeout(300)
@SLOW
@pytest.mark.parametrize("stages", [[1, 2], [3]], ids=str)
def test_stages_follow_ddp(tmp_path, stages):
    """In fp32 the methods differ in the order of sums alone; twelve steps amplify that little."""
    losses = {}
    for method in ("--ddp", *(f"--stage={stage}" for stage in stages)):
        directory = tmp_path / method.strip("-")
        directory.mkdir()
        log = train(directory, method, "--dtype=fp32", "--accumulation-steps=2")
        losses[method] = log["loss"]
    for method, loss in losses.items():
        assert loss == pytest.approx(losses["--ddp"], abs=1e-4), method
