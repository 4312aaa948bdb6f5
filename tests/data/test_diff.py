"""TrainingLog, and the command that compares logs and checkpoints."""

import json

import pytest
import torch
from torch import nn

import zero_ext
from zero_ext import TrainingLog
from zero_ext.diff import main


def model_and_optimizer():
    torch.manual_seed(0)
    model = zero_ext.shard(nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 3)), 2, mesh="alone")
    return model, zero_ext.optim.AdamW(model.parameters(), lr=0.01)


def train(path, steps: int, *, first: int = 0, changed: int | None = None, per_parameter=True):
    """A log of a training, in which one element is changed by a bit before step ``changed``."""
    (model, optimizer), log = model_and_optimizer(), TrainingLog(path)
    for step in range(steps):
        if step == changed:
            value = zero_ext.full_tensor(model[1].weight).cpu()
            value.view(-1)[4:5].view(torch.int32).bitwise_xor_(
                1 << 12
            )  # an update rounds lower ones away
            zero_ext.set_full_param(model[1].weight, value)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 7)).square().mean()
        loss.backward()
        optimizer.step()
        if step >= first:
            parameters = zero_ext.parameter_fingerprints(model, optimizer)
            log.write(
                step,
                loss=loss.detach(),
                fingerprint=zero_ext.fingerprint(model, optimizer),
                parameters=parameters if per_parameter else None,
            )
    return model, optimizer


def test_the_first_step_and_the_parameters_are_named(tmp_path, capsys):
    train(tmp_path / "a", 20)
    train(tmp_path / "b", 20)
    train(tmp_path / "c", 20, changed=17)
    train(tmp_path / "d", 20, changed=17, per_parameter=False)
    with (tmp_path / "b").open("a") as file:
        file.write('{"step": 20, "lo')  # the process died
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main([str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 17 is the first that differs: fingerprint ")
    assert "differs: 1.weight" in lines
    *lines, last = (tmp_path / "a").read_text().splitlines(keepends=True)
    last = json.dumps(json.loads(last) | {"loss": 1.0})  # whole, without an end
    (tmp_path / "e").write_text("".join([*lines, last]))
    assert main([str(tmp_path / "a"), str(tmp_path / "e")]) == 1
    assert "step 19" in capsys.readouterr().out
    assert main([str(tmp_path / "a"), str(tmp_path / "d")]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 17 is the first that differs")


def test_a_run_that_goes_on_drops_the_lines_of_steps_that_are_made_again(tmp_path):
    train(tmp_path / "whole", 6)
    train(tmp_path / "parts", 4)
    with (tmp_path / "parts").open("a") as file:
        file.write('{"step": 4, "lo')  # the process died
    train(tmp_path / "parts", 6, first=2)
    assert (tmp_path / "parts").read_text() == (tmp_path / "whole").read_text()
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4, 5]


def test_steps_rise_and_rank_0_writes(tmp_path):
    log = TrainingLog(tmp_path / "log")
    log.write(3, loss=torch.tensor(0.5), norm=2.0, tokens=7)
    line = json.loads((tmp_path / "log").read_text())
    assert line == {"step": 3, "loss": 0.5, "norm": 2.0, "ranks": 1, "tokens": 7}
    with pytest.raises(ValueError, match="step 3 after step 3"):
        log.write(3)
    TrainingLog(tmp_path / "other", rank=1).write(0)
    assert not (tmp_path / "other").exists()


def test_values_that_differ_between_checkpoints_are_named(tmp_path, capsys):
    for name, changed in (("a", None), ("b", None), ("c", 2)):
        zero_ext.checkpoint.save(
            tmp_path / name, *train(tmp_path / "log", 3, changed=changed, first=3)
        )
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main([str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "differs: model.1.weight" in lines
    assert all(line.startswith("differs: ") for line in lines[1:])
    zero_ext.checkpoint.save(tmp_path / "d", train(tmp_path / "log", 3, first=3)[0])
    assert main([str(tmp_path / "a"), str(tmp_path / "d")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(
        line.startswith(f"only in '{tmp_path / 'a'}': optimizer.") for line in lines
    )


def test_bad_input_is_exit_code_2(tmp_path, capsys):
    good, empty, folder = tmp_path / "good", tmp_path / "empty", tmp_path / "folder"
    train(good, 2)
    empty.write_text("")
    folder.mkdir()
    (tmp_path / "text").write_text("loss 3\n")
    (tmp_path / "bare").write_text('{"step": 0}\n')
    for other, text in (
        (empty, "no step in common"),
        (folder, "not one of each"),
        (tmp_path / "text", "line 1 of"),
        (tmp_path / "bare", "nothing to compare"),
        (tmp_path / "missing", "missing"),
    ):
        assert main([str(good), str(other)]) == 2
        assert text in capsys.readouterr().err
    assert main([str(folder), str(folder)]) == 2
