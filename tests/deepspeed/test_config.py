"""zero_ext.config: what DeepSpeed's settings mean, and which are refused."""

import base64
import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import CPUOffloadPolicy

from zero_ext.deepspeed.config import Config
from zero_ext.deepspeed.keys import KEYS, table
from zero_ext.deepspeed.optimizers import Named
from zero_ext.deepspeed.schedules import WarmupLR
from zero_ext.engine.options import ParametersOffloadPolicy, StatesOffloadPolicy
from zero_ext.optim.scaler import LossScaler

DEEPSPEEDS_TESTS = "docs/deepspeed_tests.md"

# As configurations are found in the world: much of it changes no result.
USUAL = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 4},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "prescale_gradients": False,
    "data_types": {"grad_accum_dtype": "fp32"},
    "aio": {"block_size": 1048576},
}


def of(**settings) -> dict:
    return {"train_micro_batch_size_per_gpu": 2, **settings}


def test_a_usual_configuration_is_understood(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({**USUAL, "train_batch_size": 64}))
    config = Config.read(file, world_size=2)
    assert config == Config(
        train_batch_size=64,
        micro_batch_size=4,
        accumulation_steps=8,
        stage=3,
        dtype=torch.bfloat16,
        buffer_dtype=None,
        fp32_buffers=None,
        autocast=None,
        scaler=None,
        casts_inputs=False,
        nonfinite="skip",
        max_grad_norm=1.0,
        clips_by_default=False,
        measures_norm=True,
        offload_policy=StatesOffloadPolicy(pin_memory=True),
        reduce_dtype=None,
        sums_gradients=False,
        tuning={"bucket_mb": 25.0, "prefetch_mb": 1e8 / 2**20, "retained_bytes": 2 * 10**9},
        shards=None,
        optimizer=Named(
            torch.optim.AdamW, {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
        ),
        scheduler=Named(WarmupLR, {"warmup_num_steps": 100}),
        managed_accumulation=True,
        rejects_unused=False,
        drop_last=False,
        steps_per_print=100,
        monitors={},
        wall_clock_breakdown=False,
        memory_breakdown=False,
        dump_state=False,
    )
    assert config == Config.read({**USUAL, "train_batch_size": 64}, world_size=2)


def test_what_is_left_out_has_deepspeeds_defaults():
    config = Config.read({"train_batch_size": 6}, world_size=3)
    assert (config.micro_batch_size, config.accumulation_steps, config.stage) == (2, 1, 0)
    assert config.dtype is None and config.buffer_dtype is None and config.optimizer is None
    assert config.max_grad_norm == 1.0 and config.clips_by_default  # as in DeepSpeed 0.19
    assert not config.measures_norm and not config.sums_gradients and config.tuning == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train_batch_size": 24}, (24, 12, 1)),
        ({"train_batch_size": 24.0}, (24, 12, 1)),
        ({"train_micro_batch_size_per_gpu": 3}, (6, 3, 1)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}, (24, 3, 4)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (24, 4, 3)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, (30, 3, 5)),
    ],
    ids=str,
)
def test_batch_sizes_complete_each_other(given, expected):
    config = Config.read(given, world_size=2)
    assert (config.train_batch_size, config.micro_batch_size, config.accumulation_steps) == expected


@pytest.mark.parametrize(
    ("fp16", "scaler"),
    [
        (
            {},
            {
                "mode": "dynamic",
                "init_scale": 65536.0,
                "growth_interval": 1000,
                "hysteresis": 2,
                "min_scale": 1,
            },
        ),
        (
            {
                "initial_scale_power": 8,
                "loss_scale_window": 3,
                "hysteresis": 1,
                "min_loss_scale": 2,
            },
            {
                "mode": "dynamic",
                "init_scale": 256.0,
                "growth_interval": 3,
                "hysteresis": 1,
                "min_scale": 2,
            },
        ),
        (
            {"loss_scale_window": 1000.0, "hysteresis": 2.0},
            {
                "mode": "dynamic",
                "init_scale": 65536.0,
                "growth_interval": 1000,
                "hysteresis": 2,
                "min_scale": 1,
            },
        ),
        ({"loss_scale": 128}, {"mode": "static", "init_scale": 128}),
        ({"loss_scale": 0.5, "min_loss_scale": 2**17}, {"mode": "static", "init_scale": 0.5}),
    ],
    ids=["default", "dynamic", "whole", "static", "below the least"],
)
def test_loss_scales(fp16, scaler):
    config = Config.read(of(fp16={"enabled": True, "auto_cast": True, **fp16}), 1)
    assert config.dtype == torch.float16 and config.scaler == scaler and config.casts_inputs
    assert repr(config.scaler) == repr(scaler)  # 1000, not 1000.0
    LossScaler(**config.scaler)


@pytest.mark.parametrize(
    "section",
    [
        {
            "fp16": {
                "enabled": False,
                "loss_scale_window": "auto",
                "fp16_master_weights_and_grads": 1,
            }
        },
        {"bf16": {"check_grad_overflow": "auto", "immediate_grad_update": "auto"}},
    ],
    ids=["fp16", "bf16"],
)
def test_a_section_that_is_not_enabled_may_say_what_it_likes(section):
    config = Config.read(of(**section), 1)
    assert config.dtype is None and config.scaler is None and config.nonfinite == "skip"


def test_steps_with_infinities_are_made_if_bf16_says_so():
    bf16 = {"enabled": True, "check_grad_overflow": False}
    assert Config.read(of(bf16=bf16), 1).nonfinite == "step"
    assert Config.read(of(bf16={**bf16, "enabled": False}), 1).nonfinite == "skip"


def test_older_names():
    assert Config.read(of(bfloat16={"enabled": True}), 1).dtype == torch.bfloat16
    config = Config.read(of(zero_optimization={"stage": 2, "cpu_offload": True}), 1)
    assert config.offload_policy == CPUOffloadPolicy(pin_memory=True)


@pytest.mark.parametrize("older", [False, True])
def test_offload_of_states_and_of_parameters(older):
    def policy(stage, states=None, parameters=None):
        zero = {"stage": stage, "offload_param": parameters}
        if older and states is not None:
            zero |= {"cpu_offload": states["device"] == "cpu"}
        else:
            zero |= {"offload_optimizer": states}
        return Config.read(of(zero_optimization=zero), 1).offload_policy

    cpu, none = {"device": "cpu"}, {"device": "none"}
    pageable = {"device": "cpu", "pin_memory": False}
    assert policy(3, cpu, cpu) == CPUOffloadPolicy(pin_memory=True)
    assert policy(3, cpu, pageable) == CPUOffloadPolicy(pin_memory=False)
    assert policy(3, cpu, none) == StatesOffloadPolicy(pin_memory=True)
    assert policy(3, none, pageable) == ParametersOffloadPolicy(pin_memory=False)
    assert policy(3, None, cpu) == ParametersOffloadPolicy(pin_memory=True)
    assert policy(2, cpu, cpu) == CPUOffloadPolicy(pin_memory=True)
    assert policy(2, none, cpu) is policy(3, none, none) is policy(3) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "neither 'train_batch_size' nor"),
        ({"train_batch_size": 7}, "'train_batch_size' is 7, which is not 3 .* 1 .* 2"),
        ({"train_batch_size": 0}, "'train_batch_size' is 0, not a count"),
        (USUAL, "'train_batch_size' is 'auto', which an integration"),
        (of(optimizer={"type": "AdamW", "params": {"lr": "auto"}}), "optimizer.params.lr.* 'auto'"),
        (
            of(optimizer={"type": "AdamW", "params": {"betas": ["auto", 0.9]}}),
            r"params.betas.*\['auto'",
        ),
        (
            of(optimizer={"type": "AdamW", "params": {"lr": "1e-3"}}),
            "params.lr' is '1e-3': a number",
        ),
        (
            of(optimizer={"type": "AdamW", "params": {"betas": (0.9, "0.99")}}),
            "optimizer.params.betas.*: a number in quotes",
        ),
        (
            of(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "9"}}),
            "'scheduler.params.warmup_num_steps' is '9'",
        ),
        (of(optimizer={"params": {"lr": 1e-3}}), "'optimizer' has no 'type'"),
        (of(scheduler={"params": {"warmup_num_steps": 3}}), "'scheduler' has no 'type'"),
        (of(optimizer={"typ": "AdamW"}), "'optimizer.typ' is 'AdamW': there is no such"),
        (of(bf16={"enable": True}), "'bf16.enable' is True: there is no such"),
        (of(fp16={"enable": True}), "'fp16.enable' is True: there is no such"),
        (of(bfloat16={"enable": True}), "'bf16.enable' is True: there is no such"),
        (of(fp16={"enabled": False, "loss_scale_windw": 7}), "'fp16.loss_scale_windw' is 7"),
        (of(fp16={"enabled": True}, bf16={"enabled": True}), "both fp16 and bf16"),
        (of(zero_optimization={"stage": 4}), "zero_optimization.stage.* is 4"),
        (of(zero_optimization=True), "'zero_optimization' is True, not an object"),
        (
            of(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}),
            "'zero_optimization.offload_param.device' is 'nvme': choose 'cpu' or 'none'",
        ),
        (
            of(zero_optimization={"stage": 2, "offload_optimizer": {"device": "nvme"}}),
            "'zero_optimization.offload_optimizer.device' is 'nvme'",
        ),
        (
            of(
                zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}
            ),
            "'zero_optimization.offload_optimizer.ratio' is 0.3",
        ),
        (
            of(zero_optimization={"zero_quantized_weights": True}),
            "zero_quantized_weights.* is True",
        ),
        (
            of(zero_optimization={"stage": 3, "mics_shard_size": 4}),
            "mics_shard_size' is 4, which does not divide the 2 ranks",
        ),
        (of(zero_optimization={"stage": 3, "mics_shard_size": 0}), "mics_shard_size' is 0"),
        (of(zero_optimization={"stage": 3, "mics_shard_size": True}), "mics_shard_size' is True"),
        (
            of(zero_optimization={"stage": 2, "mics_shard_size": 2}),
            "mics_shard_size' is 2 with stage 2: it needs stage 3",
        ),
        (of(zero_optimization={"stgae": 2}), "'zero_optimization.stgae' is 2: there is no such"),
        (of(gradient_clipping=-1), "'gradient_clipping' is -1, not a number"),
        (of(flops_profiler={"enabled": True}), "'flops_profiler'"),
        (of(tensorboard={"enabled": 1}), "'tensorboard.enabled' is 1, not true or false"),
        (of(fp16={"enabled": "false"}), "'fp16.enabled' is 'false', not true or false"),
        (of(bf16={"enabled": 1}), "'bf16.enabled' is 1, not true or false"),
        (of(optimizer={"type": 1}), "'optimizer.type' is 1, not a name"),
        (of(steps_per_print="10"), "'steps_per_print' is '10', not a number"),
        (of(data_types={"grad_accum_dtype": "bf16"}), "'data_types.grad_accum_dtype' is 'bf16'"),
        (of(communication_data_type="fp8"), "'communication_data_type' is 'fp8'"),
        (of(fp16={"enabled": True, "loss_scale": "big"}), "'fp16.loss_scale' is 'big'"),
        (of(fp16={"enabled": True, "loss_scale": 2.0**101}), "'fp16.loss_scale' is .* to 1.*e.30"),
        (of(fp16={"enabled": True, "initial_scale_power": 101}), "power' is 101, .* from 0 to 100"),
        (
            of(fp16={"enabled": True, "min_loss_scale": 0}),
            "'fp16.min_loss_scale' is 0, not above 0",
        ),
        (
            of(fp16={"enabled": True, "min_loss_scale": 1024, "initial_scale_power": 8}),
            "'fp16.min_loss_scale' is 1024, .* at most the first scale, 256",
        ),
        (of(fp16={"enabled": True, "loss_scale_window": 1.5}), "window' is 1.5, not a count"),
        (of(fp16={"enabled": True, "hysteresis": 0}), "'fp16.hysteresis' is 0, not a count"),
        (of(bf16={"enabled": True, "bf16_optimizer_states": True}), "bf16.bf16_optimizer_states"),
        ("/no/such/file.json", "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_here_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        Config.read(config, world_size=2)


def test_a_setting_that_is_there_twice_is_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"train_batch_size": 2, "train_batch_size": 4}')
    with pytest.raises(ValueError, match="'train_batch_size' twice"):
        Config.read(file, 1)


def test_all_errors_are_told_at_once_in_the_order_of_the_file():
    config = {
        "gradient_clipping": "1.0",
        "optimizer": {"type": "AdamX", "params": {"lr": "1e-3"}},
        "zero_optimization": {
            "stgae": 2,
            "stage": 7,
            "offload_optimizer": {"device": "nvme", "pin_memori": True},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 9}},
        "wandb": {"enabled": True},
        "fp16": {"enabled": True, "min_loss_scale": 0},
        "train_batch_size": 0,
    }
    with pytest.raises(ValueError, match="has 11 errors") as raised:
        Config.read(config, world_size=2)
    lines = str(raised.value).splitlines()[1:]
    expected = [
        "'gradient_clipping' is '1.0', not a number",
        "'optimizer.type' is 'AdamX': choose",
        "'optimizer.params.lr' is '1e-3': a number in quotes",
        "'zero_optimization.stgae' is 2: .* Did you mean 'zero_optimization.stage'",
        "'zero_optimization.stage' is 7, not 0 to 3",
        "'zero_optimization.offload_optimizer.device' is 'nvme': choose 'cpu' or 'none'",
        "Did you mean 'zero_optimization.offload_optimizer.pin_memory'",
        "'scheduler.params.warmup_steps' is 9: WarmupLR .* Did you mean 'warmup_num_steps'",
        "'wandb' is .*: this library has no such feature. Switch it off",
        "'fp16.min_loss_scale' is 0",
        "'train_batch_size' is 0, not a count",
    ]
    for line, text in zip(lines, expected, strict=True):
        assert re.search(text, line), (text, line)


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("gradient_cliping", 1.0, "'gradient_clipping'"),
        ("zero_optimisation", {"stage": 3}, "'zero_optimization'"),
        ("stage3_prefetch_bucket_size", 1e6, "'zero_optimization.stage3_prefetch_bucket_size'"),
        ("my_own_note", "x", None),
    ],
)
def test_an_unknown_key_at_the_top_is_told_and_ignored(key, value, near):
    meant = f"Did you mean {near}?" if near else "Correct its name, or leave it out."
    with pytest.warns(UserWarning, match=f"'{key}' is ignored: .*{re.escape(meant)}"):
        config = Config.read(of(**{key: value}), 1)
    assert config == Config.read(of(), 1)
    with pytest.raises(ValueError, match=f"'{key}' is .*{re.escape(meant)}"):
        Config.read(of(**{key: value}), 1, strict=True)
    # Beside an error it is in the same message, because it may be the cause.
    with pytest.raises(
        ValueError, match=f"2 errors:\n  - config '{key}' is ignored: .*\n  - .*steps"
    ):
        Config.read(of(**{key: value, "steps_per_print": "often"}), 1)


@pytest.mark.parametrize(
    ("mode", "zero", "tuning"),
    [
        ({}, {"stage": 3, "prefetch_bucket_size": 2**20}, {"prefetch_mb": 4.0}),
        (
            {"bf16": {"enabled": True}},
            {"stage": 3, "reduce_bucket_size": 2**20, "stage3_max_live_parameters": 1e3},
            {"bucket_mb": 2.0, "retained_bytes": 2000},
        ),
        ({}, {"stage": 1, "reduce_bucket_size": 5e8, "max_live_parameters": 7}, {"bucket_mb": 25}),
        (
            {},
            {"stage": 3, "stage3_prefetch_bucket_size": 0, "max_live_parameters": 0},
            {"prefetch_mb": 0, "retained_bytes": 0},
        ),
        (
            {},
            {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
            },
            {},
        ),
    ],
)
def test_sizes_in_elements_become_bytes(mode, zero, tuning):
    assert Config.read(of(zero_optimization=zero, **mode), 2).tuning == tuning


def test_a_name_with_and_without_its_prefix_is_given_once():
    zero = {"stage": 3, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}
    with pytest.raises(ValueError, match=r"'zero_optimization\.prefetch_bucket_size' is 1, and"):
        Config.read(of(zero_optimization=zero), 1)


def test_dtypes_of_parameters_and_buffers():
    bf16 = {"enabled": True}
    types = {"param_dtype": "bfloat16", "buffer_dtype": "torch.float16", "grad_accum_dtype": "fp32"}
    config = Config.read(of(bf16=bf16, data_types=types), 1)
    assert (config.dtype, config.buffer_dtype) == (torch.bfloat16, torch.float16)
    with pytest.raises(ValueError, match=r"data_types\.param_dtype' is 'fp16', which the sections"):
        Config.read(of(bf16=bf16, data_types={"param_dtype": "half"}), 1)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("summed", [None, "fp32", "torch.float32", "bf16", "fp16"])
def test_gradients_are_summed_in_fp32_or_the_file_is_refused(mode, summed):
    config = of(data_types={"grad_accum_dtype": summed}, **{mode: {"enabled": True}})
    if mode == "fp32":
        del config[mode]
    if summed in ("bf16", "fp16"):
        with pytest.raises(ValueError, match=f"'data_types.grad_accum_dtype' is '{summed}': grad"):
            Config.read(config, 1)
    else:
        assert Config.read(config, 1).dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            mode
        )


def test_base64_and_hjson(tmp_path, monkeypatch):
    expected = Config.read(of(zero_optimization={"stage": 2}), 1)
    text = json.dumps(of(zero_optimization={"stage": 2}))
    assert Config.read(base64.urlsafe_b64encode(text.encode()).decode(), 1) == expected
    file = tmp_path / "ds.hjson"
    file.write_text("{\n  # stage 2\n  train_micro_batch_size_per_gpu: 2\n}")
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ValueError, match=r"cannot be read as JSON: .* pip install hjson"):
        Config.read(file, 1)


NUMBERS = st.one_of(st.integers(-1, 10**9), st.floats(), st.sampled_from([1e6, 1e-3, 2**17]))
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from(["auto", "cpu", "fp32", "1e-3"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text("abc", max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)
NAMES = st.sampled_from([name for keys in KEYS.values() for name in keys])
SECTION = st.dictionaries(NAMES, ANY, max_size=3)
NESTED = st.dictionaries(
    NAMES, st.one_of(ANY, SECTION, st.dictionaries(NAMES, SECTION, max_size=2))
)


@settings(max_examples=300, deadline=None)
@given(config=NESTED)
def test_no_file_crashes_or_hides_what_it_says(config):
    """Whatever is accepted is either told apart from the defaults or known to change no result."""
    config = {"train_micro_batch_size_per_gpu": 2, **config}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a key that is unknown at the top
            read = Config.read(config, world_size=2)
    except (ValueError, UserWarning) as problem:
        assert str(problem).startswith("zero_ext: ")
        return
    zero = config.get("zero_optimization") or {}
    assert read.stage == zero.get("stage", 0)
    assert (read.max_grad_norm or 0) == (config.get("gradient_clipping", 1.0) or 0)
    assert (read.dtype is not None) == any(
        (config.get(mode) or {}).get("enabled", False) for mode in ("fp16", "bf16", "bfloat16")
    )
    assert bool(read.optimizer) == bool(config.get("optimizer"))


def test_the_docs_list_every_key():
    docs = Path(__file__).parents[2] / "docs" / "deepspeed_keys.md"
    assert table() in docs.read_text(), "Run python -m zero_ext.deepspeed.keys and paste the table."


def test_the_docs_name_tests_that_exist():
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`((?:tests/)?\w[\w/]*\.py)`", (root / DEEPSPEEDS_TESTS).read_text()))
    named -= {"zero_to_fp32.py"}
    assert len(named) > 20
    for name in named:
        assert (root / name).exists() or (Path(__file__).parent / name).exists(), name
