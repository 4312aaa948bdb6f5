"""Checkpoints that DeepSpeed has written: each value, and the steps after them."""

import shutil
from pathlib import Path

import deepspeed_models as models
import pytest
import torch
from harness import assert_bits
from torch import nn

import zero_ext
import zero_ext.deepspeed as deepspeed
from zero_ext import checkpoint
from zero_ext.checkpoint import __main__ as command
from zero_ext.deepspeed import saved_files

FOLDER = Path(__file__).parent / "checkpoints"
KINDS = pytest.mark.parametrize("kind", list(models.KINDS))


def resumed(mesh, world, stage, precision, **config):
    """The engine before it loads, with as many micro-batches as two ranks have."""
    model = models.Odd()
    config = models.config_of(stage, precision) | config
    config["gradient_accumulation_steps"] = models.MICROS * models.RANKS // world
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=models.groups_of(model), config=config, mesh=mesh
    )
    with torch.no_grad():
        for parameter in model.parameters():
            zero_ext.set_full_param(parameter, torch.full(parameter.shape, 7.0))
    return engine


def assert_loaded(engine, expected) -> None:
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        assert_bits(zero_ext.full_tensor(p), expected["values"][name], name)
        for state in sorted({"exp_avg", "exp_avg_sq"} & expected.keys()):  # as on other ranks
            value = zero_ext.full_state(engine.optimizer, p, state)
            assert_bits(value, expected[state][name], f"{name}.{state}")


@KINDS
def test_a_run_of_deepspeed_goes_on(anywhere, rank, world, kind):
    world = 1 if anywhere is None else world
    if models.RANKS % world != 0:
        pytest.skip("two ranks' micro-batches cannot be shared out")
    expected = torch.load(FOLDER / kind / "expected.pt")
    precision = models.KINDS[kind][1]
    dtype = models.DTYPES[precision]
    pairs = [(m, r) for m in range(models.MICROS) for r in range(models.RANKS)]
    own = [(m, r) for m, r in pairs if world == 1 or r == rank]
    for stage in (0, 2, 3):
        engine = resumed(anywhere, world, stage, precision)
        path, client_state = engine.load_checkpoint(FOLDER / kind)
        assert path.endswith("global_step3") and client_state == {"epoch": 3, "note": [1, "x"]}
        assert_loaded(engine, expected)
        frozen = zero_ext.full_tensor(engine.frozen.weight)
        assert_bits(frozen.to(dtype), models.Odd().frozen.weight.detach().to(dtype))
        assert engine.seen.tolist() == [models.STEPS * models.MICROS * 4.0] * 3
        assert (engine.global_steps, engine.skipped_steps) == (models.STEPS, 0)
        assert (
            engine.get_lr() == pytest.approx([0.004] * 2) and engine.cur_scale == expected["scale"]
        )
        losses = models.train(engine, range(3, 6), dtype, own)
        for k, loss in enumerate(losses):
            micro, source = own[k % len(own)]
            theirs = expected["losses"][source][k // len(own) * models.MICROS + micro]
            assert loss == pytest.approx(theirs, rel=5e-3)
        for name, p in engine.module.named_parameters():
            if p.requires_grad:
                # Half precision gradients are summed in another order; each step is about 0.008.
                later, here = expected["later"][name], zero_ext.full_tensor(p)
                torch.testing.assert_close(here, later, rtol=0, atol=2e-4)
        assert engine.cur_scale == expected["later_scale"]
        assert engine.get_lr() == pytest.approx([0.01] * 2)


@KINDS
def test_without_an_engine_and_without_a_model(kind, tmp_path, capsys):
    expected = torch.load(FOLDER / kind / "expected.pt")["values"]
    plain = models.Odd()
    extra = checkpoint.from_deepspeed(FOLDER / kind, plain)
    assert extra["counts"] == (models.STEPS, 48, 0)
    assert extra["lr_scheduler"] == {"last_batch_iteration": 2}
    for name, value in expected.items():
        assert_bits(plain.get_parameter(name), value)
    assert plain.tied.weight is plain.last.weight
    # A module of other names, alone: only what is there is loaded.
    part = nn.ModuleDict({"first": nn.Linear(7, 13)})
    with pytest.raises(ValueError, match=r"has, but the model lacks, 'frozen\.weight'"):
        checkpoint.from_deepspeed(FOLDER / kind, part, tag="global_step3")
    with pytest.warns(UserWarning, match="passed over"):
        checkpoint.from_deepspeed(FOLDER / kind, part, tag="global_step3", strict=False)
    assert_bits(part["first"].bias, expected["first.bias"])
    for out in (tmp_path / "model.bin", tmp_path / "model.safetensors"):
        assert command.main(["to-fp32", str(FOLDER / kind), str(out)]) == 0
        if out.suffix == ".bin":
            state = torch.load(out)
            assert state["tied.weight"].data_ptr() == state["last.weight"].data_ptr()
        else:
            state = pytest.importorskip("safetensors.torch").load_file(out)
        assert state.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            assert_bits(state[name], value)
    assert "wrote 10 values" in capsys.readouterr().out


class Evil:
    """What a malicious file would hold."""

    def __reduce__(self):
        return (print, ("ran code",))


def test_files_that_are_missing_damaged_or_hold_code(tmp_path, capsys, monkeypatch):
    again = (saved_files._Named, "zero_ext.deepspeed.saved_files._Named")
    monkeypatch.setattr(saved_files, "_CLASSES", [*saved_files._CLASSES, again])
    plain = models.Odd()
    before = {name: value.clone() for name, value in plain.state_dict().items()}

    def rejected(text, change, kind="stage2_bf16"):
        target = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(FOLDER / kind, target)
        change(target / "global_step3")
        with pytest.raises((ValueError, RuntimeError), match=text) as caught:
            checkpoint.from_deepspeed(target, plain)
        assert "zero_ext" in str(caught.value)

    def add(**entries):
        def change(folder):
            for file in folder.glob("*model_states.pt"):
                torch.save(torch.load(file) | entries, file)

        return change

    def of_states(change_states):
        def change(folder):
            for file in folder.glob("*optim_states.pt"):
                saved = saved_files._read(file)
                change_states(saved["optimizer_state_dict"])
                file.unlink()  # it is mapped into memory
                torch.save(saved, file)

        return change

    rejected("holds objects.*print.*add_safe_globals", add(client=Evil()))
    rejected(
        "2 files of the model and 1 of the optimizer, of 2 ranks",
        lambda folder: (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
        "stage3_fp16",
    )
    rejected(
        "tensor, pipeline or expert parallelism",
        lambda folder: (folder / "mp_rank_01_model_states.pt").touch(),
    )
    rejected(
        r"none of DeepSpeed's stages 1 to 3 \(TypeError",
        of_states(lambda states: states.pop("base_optimizer_state")["state"].clear()),
    )
    rejected(
        "lacks elements of 'model.last.weight'",
        of_states(lambda s: vars(s["param_slice_mappings"][0]["last.weight"]).update(numel=5)),
    )
    rejected("", lambda folder: (folder / "mp_rank_00_model_states.pt").write_bytes(b"PK"))
    for name, value in plain.state_dict().items():
        assert_bits(value, before[name])
    assert "ran code" not in capsys.readouterr().out
    assert command.main(["to-fp32", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "there is no checkpoint at" in capsys.readouterr().err
