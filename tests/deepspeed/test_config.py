"""zero_ext.config: what DeepSpeed's settings mean, and which are refused."""

import json

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from zero_ext.deepspeed.config import Config
from zero_ext.optim.scaler import LossScaler

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
        scaler=None,
        casts_inputs=False,
        nonfinite="skip",
        max_grad_norm=1.0,
        measures_norm=True,
        offload_policy=CPUOffloadPolicy(pin_memory=True),
        reduce_dtype=None,
        shards=None,
        optimizer=("AdamW", {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}),
        scheduler=("WarmupLR", {"warmup_num_steps": 100}),
        drop_last=False,
        steps_per_print=100,
    )
    assert config == Config.read({**USUAL, "train_batch_size": 64}, world_size=2)


def test_what_is_left_out_has_deepspeeds_defaults():
    config = Config.read({"train_batch_size": 6}, world_size=3)
    assert (config.micro_batch_size, config.accumulation_steps, config.stage) == (2, 1, 0)
    assert config.dtype is None and config.max_grad_norm is None and config.optimizer is None
    assert not config.measures_norm


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
    assert config.offload_policy == CPUOffloadPolicy(pin_memory=False)


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
        (of(optimizer={"params": {"lr": 1e-3}}), "'optimizer' is .*, without a 'type'"),
        (of(scheduler={"params": {"warmup_num_steps": 3}}), "'scheduler' is .*, without a 'type'"),
        (of(optimizer={"typ": "AdamW"}), "'optimizer.typ' is 'AdamW': there is no such"),
        (of(bf16={"enable": True}), "'bf16.enable' is True: there is no such"),
        (of(fp16={"enable": True}), "'fp16.enable' is True: there is no such"),
        (of(bfloat16={"enable": True}), "'bf16.enable' is True: there is no such"),
        (of(fp16={"enabled": False, "loss_scale_windw": 7}), "'fp16.loss_scale_windw' is 7"),
        (of(fp16={"enabled": True}, bf16={"enabled": True}), "both fp16 and bf16"),
        (of(zero_optimization={"stage": 4}), "zero_optimization.stage.* is 4"),
        (of(zero_optimization=True), "'zero_optimization' is True, not an object"),
        (
            of(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}}),
            "'zero_optimization.offload_param' is not available",
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
            "mics_shard_size' is 2 with stage 2: it needs 3",
        ),
        (of(zero_optimization={"stgae": 2}), "'zero_optimization.stgae' is 2: there is no such"),
        (of(gradient_cliping=1.0), "'gradient_cliping' is 1.0: there is no such setting"),
        (of(gradient_clipping=-1), "'gradient_clipping' is -1, not a number"),
        (of(activation_checkpointing={"cpu_checkpointing": True}), "'activation_checkpointing'"),
        (of(tensorboard={"enabled": True}), "'tensorboard'"),
        (of(fp16={"enabled": "false"}), "'fp16.enabled' is 'false', not true or false"),
        (of(bf16={"enabled": 1}), "'bf16.enabled' is 1, not true or false"),
        (of(optimizer={"type": 1}), "'optimizer.type' is 1, not a name"),
        (of(steps_per_print="10"), "'steps_per_print' is '10', not a number"),
        (of(data_types={"grad_accum_dtype": "bf16"}), "'data_types'"),
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
