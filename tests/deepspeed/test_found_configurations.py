"""69 configurations of the kinds that training projects publish, with "auto" filled in.

Written for this test, from the keys that such files have. At least 58 are taken as they are; each
of the others is rejected in one error that names every reason.
"""

import pytest

from zero_ext.deepspeed.config import Config

MICRO = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
HF = {**MICRO, "train_batch_size": 16, "gradient_clipping": 1.0, "steps_per_print": 2000}
AUTO_HF = {**HF, "wall_clock_breakdown": False, "zero_allow_untested_optimizer": True}
FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
OFF = {"enabled": False}
BF16 = {"bf16": {"enabled": True}, "fp16": OFF}
HALF = {"fp16": FP16, "bf16": OFF}
ADAMW = {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8}}
ADAM = {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": 3e-7, "adam_w_mode": False}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-5}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 500, "warmup_max_lr": 2e-5, "warmup_num_steps": 50},
}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 500, "cos_min_ratio": 0.1}}
ONE_CYCLE = {
    "type": "OneCycle",
    "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-4, "cycle_first_step_size": 100},
}
RANGE_TEST = {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-6}}
ZERO_0 = {"stage": 0, "allgather_partitions": True, "round_robin_gradients": True}
ZERO_1 = {"stage": 1, "reduce_bucket_size": 5e8, "overlap_comm": True}
ZERO_2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
ZERO_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": 16777216,
    "stage3_prefetch_bucket_size": 15099494,
    "stage3_param_persistence_threshold": 40960,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
CPU = {"device": "cpu", "pin_memory": True}
BARE_3 = {key.removeprefix("stage3_"): value for key, value in ZERO_3.items()}
CHECKPOINTING = {"partition_activations": True, "cpu_checkpointing": True, "profile": False}
BREAKDOWN = {"wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True}
CSV = {"csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "run"}}

TAKEN = [
    # Trainers of Hugging Face's kind: a stage, a precision, the trainer's sizes.
    *(
        {**AUTO_HF, **mode, "zero_optimization": z}
        for mode in (BF16, HALF)
        for z in (ZERO_0, ZERO_1)
    ),
    *(
        {**AUTO_HF, **mode, "zero_optimization": z}
        for mode in (BF16, HALF)
        for z in (ZERO_2, ZERO_3)
    ),
    *({**AUTO_HF, "zero_optimization": zero} for zero in (ZERO_1, ZERO_2, ZERO_3)),
    # The optimizer's states in host memory, parameters too.
    *(
        {**AUTO_HF, **mode, "zero_optimization": {**zero, "offload_optimizer": CPU}}
        for mode in (BF16, HALF)
        for zero in (ZERO_1, ZERO_2, ZERO_3)
    ),
    *(
        {
            **HF,
            **mode,
            "zero_optimization": {**ZERO_3, "offload_optimizer": CPU, "offload_param": CPU},
        }
        for mode in (BF16, HALF)
    ),
    {**HF, **HALF, "zero_optimization": {**ZERO_2, "cpu_offload": True}},
    {**HF, **BF16, "zero_optimization": {**ZERO_3, "offload_param": {"device": "none"}}},
    # Optimizers and schedules in the file.
    *(
        {**HF, **BF16, "optimizer": ADAMW, "scheduler": s}
        for s in (WARMUP, DECAY, COSINE, ONE_CYCLE)
    ),
    *({**HF, **HALF, "optimizer": ADAM, "scheduler": s} for s in (WARMUP, DECAY, RANGE_TEST)),
    *({**HF, **BF16, "optimizer": ADAMW, "zero_optimization": z} for z in (ZERO_1, ZERO_2, ZERO_3)),
    {**MICRO, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    {**MICRO, "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}}},
    {**MICRO, "optimizer": {"type": "Lamb", "params": {"lr": 2e-3}}},
    {**MICRO, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}},
    {**MICRO, "optimizer": {"type": "FusedAdam", "params": {"lr": 1e-4}}, **HALF},
    {**MICRO, "optimizer": {"type": "DeepSpeedCPUAdam", "params": {"lr": 1e-4}}},
    {**MICRO, "optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}},
    {**MICRO, "optimizer": ADAMW, "scheduler": {"type": "StepLR", "params": {"step_size": 30}}},
    # Nothing but sizes and a precision.
    {"train_batch_size": 16},
    {"train_batch_size": 16, **HALF},
    {"train_micro_batch_size_per_gpu": 1, **BF16},
    {"train_batch_size": 32, "gradient_accumulation_steps": 1, "steps_per_print": 1, **HALF},
    {**MICRO, "fp16": {"enabled": True, "loss_scale": 1024}},
    {**MICRO, "fp16": {"enabled": True, "auto_cast": True}, "zero_optimization": ZERO_1},
    {**MICRO, "bfloat16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    {**MICRO, "bf16": {"enabled": True, "immediate_grad_update": True}},
    {**MICRO, "bf16": {"enabled": True, "check_grad_overflow": False}},
    # What changes speed, memory or what is printed.
    {**MICRO, **BREAKDOWN, **CSV, **HALF},
    {**MICRO, "tensorboard": {"enabled": False, "output_path": "logs"}, **BREAKDOWN},
    {**HF, **BF16, "activation_checkpointing": CHECKPOINTING, "zero_optimization": ZERO_3},
    {**HF, **HALF, "prescale_gradients": True, "gradient_predivide_factor": 2.0},
    {**HF, **BF16, "communication_data_type": "fp32", "zero_optimization": ZERO_2},
    {**HF, **BF16, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": ZERO_1},
    {**HF, **BF16, "checkpoint": {"tag_validation": "Warn", "load_universal": True}},
    {**HF, **BF16, "aio": {"block_size": 262144, "queue_depth": 32}, "zero_optimization": ZERO_3},
    {**HF, **BF16, "flops_profiler": {"enabled": False, "profile_step": 1}},
    {**HF, **BF16, "comms_logger": {"enabled": False, "verbose": False}, "elasticity": OFF},
    {**HF, **BF16, "zero_optimization": BARE_3},
    {**HF, **BF16, "zero_optimization": {**ZERO_3, "zero_hpz_partition_size": 1}},
    {**HF, **BF16, "zero_optimization": {**ZERO_3, "mics_shard_size": 2}},
    {**HF, **BF16, "gradient_allreduce_op": "sum", "zero_optimization": ZERO_1},
    {**HF, **BF16, "sparse_gradients": False, "managed_gradient_accumulation": True},
]
NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
REFUSED = [
    (
        {
            **HF,
            **BF16,
            "zero_optimization": {**ZERO_3, "offload_optimizer": NVME, "offload_param": NVME},
        },
        ["offload_optimizer.device' is 'nvme'", "offload_param.device' is 'nvme'"],
    ),
    (
        {
            **HF,
            **BF16,
            "zero_optimization": {
                **ZERO_3,
                "zero_hpz_partition_size": 8,
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
            },
        },
        ["zero_hpz_partition_size' is 8", "zero_quantized_weights'", "zero_quantized_gradients'"],
    ),
    (
        {
            **MICRO,
            "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000}},
        },
        ["optimizer.type' is 'OneBitAdam'"],
    ),
    (
        {**MICRO, "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}},
        ["curriculum"],
    ),
    ({**MICRO, "amp": {"enabled": True, "opt_level": "O1"}}, ["'amp' is"]),
    ({**MICRO, "autotuning": {"enabled": True, "fast": True}}, ["'autotuning' is"]),
]


def test_how_many_there_are():
    assert len(TAKEN) + len(REFUSED) == 69 and len(TAKEN) >= 60


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("config", TAKEN, ids=range(len(TAKEN)))
def test_it_is_taken_as_it_is(config):
    read = Config.read(config, world_size=2)
    assert read.stage == config.get("zero_optimization", {}).get("stage", 0)
    assert read.train_batch_size == read.micro_batch_size * read.accumulation_steps * 2


@pytest.mark.parametrize(("config", "reasons"), REFUSED, ids=range(len(REFUSED)))
def test_every_reason_is_told_at_once(config, reasons):
    with pytest.raises(ValueError, match="zero_ext: ") as raised:
        Config.read(config, world_size=2)
    assert all(reason in str(raised.value) for reason in reasons)
    assert str(raised.value).count("config '") == len(reasons)
