"""An engine of verl trains as one process does: ``make test-packages``. Skipped where verl is not
installed."""

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Random

import zero_ext
from zero_ext.engine.registry import find

verl = pytest.importorskip("verl")
hydra = pytest.importorskip("hydra")
transformers = pytest.importorskip("transformers")

from verl.plugin.platform import set_platform  # noqa: E402

# verl has no platform for the CPU.
set_platform(
    mock.Mock(
        device_name="cpu",
        vendor_name="cpu",
        device_module=torch.cpu,
        current_device=lambda: "cpu",
        is_available=lambda: False,
    )
)

from verl.models.transformers import monkey_patch  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers import config as configs  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402

from zero_ext.integrations.verl import ShardedEngine  # noqa: E402

pytestmark = [pytest.mark.dist, pytest.mark.host, pytest.mark.world(min=2)]
STAGES = pytest.mark.parametrize("stage", [2, 3])
LENGTHS = (9, 5, 7, 6)  # of a rank's sequences
STEPS, LR, CLIP = 3, 1e-2, 0.5


@pytest.fixture(autouse=True)
def without_trl(monkeypatch):
    """verl 0.9.1 imports a class which TRL 1.16 does not have, wherever it finds TRL."""
    monkeypatch.setattr(monkey_patch, "is_trl_available", lambda: False)


@pytest.fixture
def llama(shared_path, rank):
    """The folder of a small model, as ``from_pretrained`` reads it."""
    folder = shared_path / "llama"
    if rank == 0:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=41, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    return folder


def make_engine(folder, monkeypatch, stage: int, dtype: str = "fp32", **settings):
    monkeypatch.setenv("ZERO_EXT_STAGE", str(stage))
    fsdp = configs.FSDPEngineConfig(
        model_dtype=dtype,
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32"},
        use_torch_compile=False,
        **settings,
    )
    # As in a run: the actor's strategy becomes that of its engine.
    actor = configs.FSDPActorConfig(
        strategy="zero_ext", fsdp_config=fsdp, rollout_n=1, ppo_micro_batch_size_per_gpu=2
    )
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=actor.engine.strategy,
        model_config=configs.HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            use_remove_padding=False,
        ),
        engine_config=actor.engine,
        optimizer_config=configs.FSDPOptimizerConfig(
            lr=LR, clip_grad=CLIP, total_training_steps=10, lr_warmup_steps=2
        ),
        checkpoint_config=CheckpointConfig(
            save_contents=["model", "optimizer", "extra", "hf_model"]
        ),
    )
    engine.initialize()
    return engine


def sequences(step: int, rank: int) -> list[torch.Tensor]:
    draw = Random(10 * step + rank)
    return [draw.integers(1, 41, (length,)) for length in LENGTHS]


def batch_of(step: int, rank: int):
    tokens = sequences(step, rank)
    jagged = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {
        "input_ids": jagged(tokens),
        "position_ids": jagged([torch.arange(len(t)) for t in tokens]),
        "loss_mask": jagged([(torch.arange(len(t)) > 1).long() for t in tokens]),
    }
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 1.0}
    return tensordict_utils.get_tensordict(tensors, settings | {"use_remove_padding": False})


def train(engine, steps) -> list[float]:
    """As verl's workers do. Returns the norms of the gradients."""
    norms = []
    for step in steps:
        with engine.train_mode():
            out = engine.train_batch(
                batch_of(step, dist.get_rank()), functools.partial(sft_loss, None)
            )
            norms.append(out["metrics"]["grad_norm"])
            engine.lr_scheduler_step()
    return norms


def alone(folder, steps) -> tuple[torch.nn.Module, list[float]]:
    """One process with the sequences of all ranks."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    norms = []
    for step in steps:
        optimizer.param_groups[0]["lr"] = LR * min(1.0, step / 2)
        every = [t for rank in range(dist.get_world_size()) for t in sequences(step, rank)]
        count = sum(len(t) - 2 for t in every)
        for t in every:
            scores = model(t[None]).logits[0, 1:-1].log_softmax(-1)
            (-scores.gather(1, t[2:, None]).sum() / count).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def whole(engine) -> dict[str, torch.Tensor]:
    tensors, adapter = engine.get_per_tensor_param()
    assert adapter is None
    return {name: value.clone() for name, value in tensors}


@STAGES
@pytest.mark.parametrize("fsdp_size", [-1, 1])  # 1: each rank has a replica
def test_a_step_is_that_of_one_process(llama, monkeypatch, stage, fsdp_size):
    engine = make_engine(llama, monkeypatch, stage, fsdp_size=fsdp_size)
    norms = train(engine, range(STEPS))
    assert find(next(engine.module.parameters())) is not None
    assert find(next(engine.module.parameters()))[0].options.stage == stage
    plain, expected = alone(llama, range(STEPS))
    assert norms == pytest.approx(expected, rel=1e-4)
    values = whole(engine)
    assert values.keys() == dict(plain.named_parameters()).keys()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(values[name], value.data, rtol=1e-4, atol=1e-5, msg=name)


@STAGES
def test_a_checkpoint_continues_with_another_stage(llama, monkeypatch, shared_path, stage):
    engine = make_engine(llama, monkeypatch, stage)
    train(engine, range(2))
    engine.save_checkpoint(str(shared_path / "saved"), global_step=2)
    saved = whole(engine)
    train(engine, range(2, 4))
    again = make_engine(llama, monkeypatch, 5 - stage)
    again.load_checkpoint(str(shared_path / "saved"))
    assert again.lr_scheduler.last_epoch == 2
    train(again, range(2, 4))
    expected = whole(engine)
    for name, value in whole(again).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    stock = transformers.LlamaForCausalLM.from_pretrained(
        shared_path / "saved" / "huggingface", dtype=torch.float32
    )
    for name, value in stock.named_parameters():
        assert torch.equal(value, saved[name]), name


@STAGES
def test_changes_keep_a_copy_equal(llama, monkeypatch, rank, stage):
    engine = make_engine(llama, monkeypatch, stage, dtype="bf16")
    copy, sent = {}, None
    for step in range(3):
        train(engine, [step])
        token = zero_ext.change_token(engine.module)
        changes = zero_ext.iter_changed_params(engine.module, since=sent, rank0_only=True)
        changes, sent = [*changes], token
        assert bool(changes) == (rank == 0)
        for name, _, values, _ in changes:
            copy.setdefault(name, torch.zeros_like(values))
        zero_ext.apply_changes(copy, changes)
        expected = whole(engine)
        if rank == 0:
            assert copy.keys() == expected.keys()
            assert all(torch.equal(copy[name], expected[name]) for name in copy)


def test_an_evaluation_trains_nothing(llama, monkeypatch, rank):
    engine = make_engine(llama, monkeypatch, 3)
    before = whole(engine)
    with engine.eval_mode():
        out = engine.infer_batch(batch_of(0, rank))
    plain = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for t, scores in zip(
        sequences(0, rank), out["model_output"]["log_probs"].unbind(), strict=True
    ):
        logits = plain(t[None]).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(scores[:-1], logits.gather(1, t[1:, None])[:, 0].detach())
    assert all(torch.equal(value, before[name]) for name, value in whole(engine).items())


def test_buffers_are_handed_over(llama, monkeypatch):
    engine = make_engine(llama, monkeypatch, 3)
    engine.module.model.register_buffer("kept", torch.arange(3.0))
    engine.module.model.register_buffer("left_out", torch.zeros(2), persistent=False)
    values = whole(engine)
    assert torch.equal(values["model.kept"], torch.arange(3.0))
    assert values.keys() == engine.module.state_dict().keys()


def test_a_strategy_on_the_command_line_is_enough():
    """What ``python -m verl.trainer.main_ppo`` makes of its arguments."""
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with hydra.initialize_config_dir(folder, version_base=None):
        given = ["strategy=zero_ext", "ppo_micro_batch_size_per_gpu=2", "rollout_n=1"]
        composed = hydra.compose(
            "ppo_trainer", [f"actor_rollout_ref.actor.{setting}" for setting in given]
        )
    actor = omega_conf_to_dataclass(composed.actor_rollout_ref.actor)
    assert EngineRegistry.get_engine_cls("language_model", actor.engine.strategy) is ShardedEngine
    assert composed.actor_rollout_ref.ref.strategy == "zero_ext"


@pytest.mark.parametrize(
    "settings", [{"param_offload": True}, {"optimizer_offload": True}, {"offload_policy": True}]
)
def test_settings_that_the_engine_lacks_are_an_error(llama, monkeypatch, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        make_engine(llama, monkeypatch, 2, **settings)
