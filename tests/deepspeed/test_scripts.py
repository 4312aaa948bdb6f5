"""Scripts that were written for DeepSpeed, with the import changed and nothing else."""

import json
import sys
from pathlib import Path

import pytest
import torch
from harness import gather_objects

from zero_ext.engine.registry import find

SCRIPTS = Path(__file__).parent / "scripts"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.05}},
    "zero_optimization": {"stage": 2},
}


def run(name, monkeypatch, *arguments):
    """What the script leaves in RESULT."""
    text = (SCRIPTS / name).read_text()
    changed = text.replace("import deepspeed\n", "import zero_ext.deepspeed as deepspeed\n")
    changed = changed.replace("from deepspeed.", "from zero_ext.deepspeed.")
    changed = changed.replace("from transformers ", "from zero_ext.integrations.transformers ")
    assert changed != text
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    namespace = {"__name__": "__main__"}
    exec(compile(changed, name, "exec"), namespace)
    return namespace["RESULT"]


def alone_under_torchrun(anywhere, world) -> bool:
    return anywhere is None and world > 1


def test_a_fine_tuning_loop(anywhere, world, path, monkeypatch):
    if alone_under_torchrun(anywhere, world):
        pytest.skip("the script uses the whole process group")
    folder = path.parent
    folder.mkdir(exist_ok=True)
    file = folder / "ds_config.json"
    if not file.exists():
        file.write_text(json.dumps(CONFIG))
    arguments = ["--deepspeed", "--deepspeed_config", file, "--output", folder / "run"]
    losses, steps, rate = run("finetune.py", monkeypatch, *arguments)
    assert losses[-1] < 0.6 * losses[0]
    assert steps == 4 * 48 // (4 * 2 * world) and rate == pytest.approx(0.05)
    assert (folder / "run" / "latest").read_text() == "epoch3"


def test_a_model_that_is_built_in_pieces(anywhere, world, monkeypatch):
    if alone_under_torchrun(anywhere, world):
        pytest.skip("the script uses the whole process group")
    torch.manual_seed(0)
    losses, head, norm = run("zero_init.py", monkeypatch)
    assert torch.equal(head, torch.full((1, 7), 0.125))
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    if anywhere is not None:
        assert len(set(gather_objects(norm, anywhere.get_group()))) == 1


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": True},
}


def test_a_trainer_with_a_file(anywhere, rank, world, path, monkeypatch):
    pytest.importorskip("transformers")
    if alone_under_torchrun(anywhere, world):
        pytest.skip("the script uses the whole process group")
    folder = path.parent
    folder.mkdir(exist_ok=True)
    file = folder / f"ds{rank}.json"
    file.write_text(json.dumps(AUTO))
    trainer = run("trainer.py", monkeypatch, file, folder / "output")
    weight = trainer.model.lm_head.weight
    assert weight.dtype == torch.bfloat16 and find(weight)[0].engine.stage == 3
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    rates = [entry["learning_rate"] for entry in log]
    expected = [0.0, 0.0, 0.005, 0.01, *(0.01 * k / 6 for k in (5, 4, 3, 2))]
    assert rates == pytest.approx(expected) or rates == pytest.approx([*expected[1:], 0.01 / 6])
    assert log[-1]["loss"] < log[0]["loss"] - 0.1
    if rank == 0:
        names = {each.name for each in (folder / "output").iterdir()}
        assert "model.safetensors" in names
        state = pytest.importorskip("safetensors.torch").load_file(
            folder / "output" / "model.safetensors"
        )
        assert state["lm_head.weight"].dtype == torch.bfloat16
    for changes, error in (
        ({"gradient_clipping": 0.3}, "'gradient_clipping' is 0.3, and max_grad_norm is 1.0"),
        ({"bf16": {}, "fp16": {"enabled": True}}, "'fp16.enabled' is True, and fp16 is False"),
        ({"zero_optimization": {"stage": 7}}, r"zero_optimization\.stage"),
    ):
        file.write_text(json.dumps(AUTO | changes))
        with pytest.raises(ValueError, match=error):
            run("trainer.py", monkeypatch, file, folder / "output")
