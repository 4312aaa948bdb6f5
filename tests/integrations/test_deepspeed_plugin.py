"""accelerate's DeepSpeedPlugin: its settings hold, without DeepSpeed."""

import json

import pytest
import torch
from harness import rank_data
from torch import nn

accelerate = pytest.importorskip("accelerate")

from accelerate import DeepSpeedPlugin  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

import zero_ext  # noqa: E402
from zero_ext.engine.registry import find  # noqa: E402
from zero_ext.integrations.accelerate import Accelerator  # noqa: E402

pytestmark = pytest.mark.host  # accelerate chooses its own device


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate keeps one state per process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def net():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(13, 33), nn.Tanh(), nn.Linear(33, 7))


def of(mesh, plugin, **kwargs):
    return Accelerator(deepspeed_plugin=plugin, sharding={"mesh": mesh}, cpu=True, **kwargs)


def losses(model, backward, step):
    """Four steps of two micro-batches; ``backward`` and ``step`` are the library's."""
    seen = []
    for micro in range(8):
        x = rank_data((5, 13), micro).to(next(model.parameters()).dtype)
        loss = model(x).float().square().mean() * 40  # a norm far above the clip
        backward(loss)
        step()
        seen.append(loss.detach())
    return torch.stack(seen)


FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.3,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("source", ["dict", "environment"])
def test_a_file_means_what_it_means_for_initialize(
    anywhere, tmp_path, monkeypatch, source, precision
):
    plugin = None
    if source == "environment":  # as "accelerate launch" leaves it
        (tmp_path / "ds.json").write_text(json.dumps(FILE))
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    else:
        plugin = DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(FILE)))
    own = of(
        anywhere,
        plugin,
        gradient_accumulation_steps=2,
        **({} if plugin is None else {"mixed_precision": precision}),
    )
    model = net()
    model, optimizer = own.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
    weight = model[0].weight
    assert find(weight)[0].engine.stage == 3
    assert weight.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)

    def backward(loss):
        with own.accumulate(model):
            own.backward(loss)

    def step():
        if own.sync_gradients:
            # As with DeepSpeed: this measures, and the step clips.
            assert own.clip_grad_norm_(model.parameters(), 1e-6) > 0.3
            optimizer.step()
            optimizer.zero_grad()

    seen = losses(model, backward, step)

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": 3},
    }
    plain = net()
    sgd = torch.optim.SGD(plain.parameters(), 0.05)
    engine = zero_ext.initialize(model=plain, optimizer=sgd, config=config, mesh=anywhere)[0]
    expected = losses(engine, engine.backward, engine.step)
    assert torch.equal(seen, expected)
    untrained = losses(net().to(weight.dtype), lambda loss: None, lambda: None)
    assert not torch.isclose(seen[2:], untrained[2:], rtol=1e-3).any()


def test_the_plugins_own_arguments(anywhere):
    plugin = DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=4, gradient_clipping=0.7)
    own = of(anywhere, plugin)
    model = net()
    model, optimizer = own.prepare(model, torch.optim.AdamW(model.parameters()))
    assert find(model[0].weight)[0].engine.stage == 1
    assert own.gradient_accumulation_steps == 4
    assert optimizer.optimizer.max_grad_norm == 0.7


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, {}, "make torch's optimizer"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, {}, "make torch's scheduler"),
        ({"fp16": {"enabled": True}, "bf16": {}}, {}, "'fp16' does not go with"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
            {},
            "'torch_autocast' does not go with a Trainer",
        ),
        ({"managed_gradient_accumulation": False}, {}, "'managed_gradient_accumulation' does not"),
        ({"zero_optimization": {"stage": 7}}, {}, r"zero_optimization\.stage"),
        ({"bf16": {"enabled": True}}, {"mixed_precision": "fp16"}, "cannot be set to `fp16`"),
        ({}, {"stage": 2}, "Leave stage out"),
    ],
)
def test_what_does_not_hold_here_is_said(anywhere, changes, arguments, message):
    plugin = DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(FILE | changes)))
    with pytest.raises(ValueError, match=message):
        of(anywhere, plugin, **arguments)
