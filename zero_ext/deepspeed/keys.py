"""The keys of DeepSpeed's configuration: what each may be, and what becomes of it.

Note [Settings of DeepSpeed]
A setting does here what DeepSpeed's documentation says (``_USED``). One that changes only speed,
memory or what is printed is ignored (``_IGNORED``). A feature that this library lacks may be
switched off (``_ABSENT``); switched on it is an error that names it, because it would change a
result. A field of ``Config`` names its key in ``metadata``, where it has the value as it is.

``python -m zero_ext.deepspeed.keys`` prints the table of docs/deepspeed_keys.md.
"""

import difflib
import json
import math
from typing import NamedTuple

import torch

from zero_ext.deepspeed import readers
from zero_ext.deepspeed.readers import NAMES, OBJECT, TEXT, Reader, count, flag, number
from zero_ext.optim.scaler import LARGEST_SCALE


class Key(NamedTuple):
    reader: Reader
    text: str


_YES, _NO = flag(True), flag(False)
_COUNT, _SIZE = count(None), number(None, left_out=(None, "auto"))
_DTYPE = readers.dtype(": choose fp16, bf16 or fp32.", torch.float16, torch.bfloat16, torch.float32)
_HALF = readers.dtype(": choose 'bf16' or 'fp16'.", torch.float16, torch.bfloat16)
_FP32 = readers.dtype(": gradients are summed in fp32 here. Leave it out.", torch.float32)
_POWER = number(16, math.log2(LARGEST_SCALE))
_IS_CPU = readers.choice({"cpu": True, "none": False}, False)
_SUMS = readers.choice({"mean": False, "sum": True}, False)
_RANKS = Reader(
    lambda value: type(value) is int and (value == -1 or value > 0),
    ", not a number of ranks. Give one.",
    default=-1,
)
_SECTION = (OBJECT, "a section")
_FOLDERS = {
    "output_path": (TEXT, "folder. Default: the current one"),
    "job_name": (TEXT, "folder in it"),
}

# Path of a section ("" is the root), and what each key of it sets.
_USED = {
    "": {
        "train_batch_size": (_COUNT, "samples per step, of all ranks"),
        "train_micro_batch_size_per_gpu": (_COUNT, "samples per micro-batch and rank"),
        "gradient_accumulation_steps": (_COUNT, "micro-batches per step; losses are divided by it"),
        "gradient_clipping": (number(0), "the optimizer's `max_grad_norm`. Default: 1.0. 0: none"),
        "gradient_allreduce_op": (_SUMS, '`"mean"` or `"sum"` of the ranks\' gradients'),
        "communication_data_type": (_DTYPE, "`mp_policy.reduce_dtype` of `shard`"),
        "optimizer": _SECTION,
        "scheduler": _SECTION,
        "dataloader_drop_last": (_NO, "whether the loader drops an incomplete last batch"),
        "steps_per_print": (number(0), "steps between two lines of the logger `zero_ext`"),
        "wall_clock_breakdown": (_NO, "whether the times of forward, backward and step are logged"),
        "memory_breakdown": (_NO, "whether the bytes of `stats()` are logged after each step"),
        "dump_state": (_NO, "whether the settings are logged at the start"),
        "tensorboard": _SECTION,
        "csv_monitor": _SECTION,
        "bf16": _SECTION,
        "bfloat16": (OBJECT, "the older name of `bf16`"),
        "fp16": _SECTION,
        "data_types": _SECTION,
        "torch_autocast": _SECTION,
        "managed_gradient_accumulation": (_YES, "false: each `step()` updates the parameters"),
        "zero_optimization": _SECTION,
    },
    "optimizer": {
        "type": (TEXT, "see [Optimizers](#optimizers)"),
        "params": (OBJECT, "the optimizer's arguments"),
    },
    "scheduler": {
        "type": (TEXT, "see [Schedules](#schedules)"),
        "params": (OBJECT, "the schedule's arguments"),
    },
    "tensorboard": {
        "enabled": (_NO, "whether rank 0 writes losses, rates and loss scales for TensorBoard"),
        **_FOLDERS,
    },
    "csv_monitor": {
        "enabled": (_NO, "whether rank 0 writes losses, rates and loss scales to CSV files"),
        **_FOLDERS,
    },
    "bf16": {
        "enabled": (_NO, "the model's parameters become bf16, with fp32 masters"),
        "check_grad_overflow": (_YES, "whether a step with NaN or Inf is skipped. Default: true"),
    },
    "fp16": {
        "enabled": (_NO, "the model's parameters become fp16, with fp32 masters"),
        "auto_cast": (_NO, "whether floating point inputs are cast to fp16"),
        "loss_scale": (number(0, LARGEST_SCALE), "a constant loss scale; 0 adapts it"),
        "initial_scale_power": (_POWER, "the first loss scale is 2 to this power"),
        "loss_scale_window": (count(1000), "steps without an overflow before the scale doubles"),
        "hysteresis": (count(2), "overflows before the scale halves"),
        "min_loss_scale": (number(1), "the scale does not fall below it"),
    },
    "data_types": {
        "grad_accum_dtype": (_FP32, '`"fp32"` or null: gradients are always summed in fp32'),
        "param_dtype": (_DTYPE, "the dtype that `bf16` or `fp16` sets; another is an error"),
        "buffer_dtype": (_DTYPE, "floating point buffers get it. Default: they keep theirs"),
        "keep_in_fp32_modules": (NAMES, "patterns of fp32 buffers. Default: Transformers' lists"),
    },
    "torch_autocast": {
        "enabled": (_NO, "whether the engine's forwards run inside `torch.autocast`"),
        "dtype": (_HALF, '`"bf16"`, or `"fp16"` with a dynamic loss scale as in `GradScaler`'),
        "lower_precision_safe_modules": (NAMES, "ignored: sums are in fp32, not in `dtype`"),
    },
    "zero_optimization": {
        "stage": (readers.STAGE, "`stage` of `shard`. Default: 0"),
        "compute_grad_norm": (flag(None), "whether the norm is measured where nothing is clipped"),
        "reduce_bucket_size": (_SIZE, "elements reduced at once: an upper bound of `bucket_mb`"),
        "stage3_prefetch_bucket_size": (_SIZE, "elements gathered ahead: `prefetch_mb` of `shard`"),
        "stage3_max_live_parameters": (_SIZE, "elements that stay: `retained_bytes` of `shard`"),
        "offload_optimizer": _SECTION,
        "offload_param": _SECTION,
        "ignore_unused_parameters": (_YES, "false: `step()` rejects parameters without a gradient"),
        "cpu_offload": (_NO, "the older name of `offload_optimizer` with the device `cpu`"),
        "mics_shard_size": (_RANKS, "ranks of a replica: hybrid sharding, with stage 3"),
    },
    "zero_optimization.offload_optimizer": {
        "device": (
            _IS_CPU,
            '`"cpu"`: masters, gradient sums and optimizer states are in host memory, with '
            '`offload_param` all that `offload_policy` of `shard` moves. `"none"`: no offload',
        ),
        "pin_memory": (_YES, "whether the host memory is pinned. Default: true"),
    },
    "zero_optimization.offload_param": {
        "device": (
            _IS_CPU,
            '`"cpu"`: stage 3\'s parameters are in host memory between their uses, without '
            "`offload_optimizer` the frozen ones: trained ones are gathered from their masters. "
            'Other stages ignore it, as DeepSpeed does. `"none"`: no offload',
        ),
        "pin_memory": (_YES, "as above; with both sections, memory is pinned if both say so"),
    },
}

# Keys that change speed, memory or what is printed, but no result: accepted with any value.
_IGNORED = {
    "": """
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather checkpoint
        log_level disable_python_gc aio prescale_gradients gradient_predivide_factor
        seq_parallel_communication_data_type vocabulary_size timers activation_checkpointing
        """,
    "optimizer": "legacy_fusion torch_adam",
    "zero_optimization": """
        allgather_partitions allgather_bucket_size overlap_comm reduce_scatter contiguous_gradients
        round_robin_gradients use_multi_rank_bucket_allreduce sub_group_size grad_hooks
        load_from_fp32_weights elastic_checkpoint legacy_stage1 log_trace_cache_warnings
        memory_efficient_linear pipeline_loading_checkpoint leaf_module
        override_module_apply enable_sanity_checks parameter_alignment
        save_muon_momentum_buffer_in_memory
        stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
        stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        cpu_offload_use_pin_memory mics_hierarchical_params_gather
        """,
    "zero_optimization.offload_optimizer": """
        nvme_path buffer_count buffer_size pipeline_read pipeline_write fast_init cpuadam_cores_perc
        """,
    "zero_optimization.offload_param": "nvme_path buffer_count buffer_size max_in_cpu",
    "bf16": "immediate_grad_update",
}

# Features that this library lacks, by the values that switch them off. A section is off where
# "enabled" is false or all of its values are.
_ABSENT: dict[str, dict[tuple, str]] = {
    "": {
        (False,): "sparse_gradients graph_harvesting use_data_before_expert_parallelism",
        (1,): "sequence_parallel_size",
        (): """
            amp flops_profiler comms_logger wandb comet autotuning elasticity
            compression_training data_efficiency curriculum_learning eigenvalue
            progressive_layer_drop hybrid_engine pipeline nebula datastates_ckpt weight_quantization
            compile tensor_parallel expert_parallel sparse_attention
            """,
    },
    "zero_optimization": {
        (0, 1): "zero_hpz_partition_size",
        (False,): """
            zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
            """,
        (None,): "zeropp_loco_param zenflow",
        (False, None): "cpu_offload_param",
    },
    "zero_optimization.offload_optimizer": {(1,): "ratio", (False,): "super_offload"},
    "fp16": {(False,): "consecutive_hysteresis fp16_master_weights_and_grads"},
    "bf16": {(False,): "bf16_master_weights_and_grads bf16_optimizer_states"},
}


def _of_section(section: str) -> dict[str, Key]:
    keys = {name: Key(*row) for name, row in _USED[section].items()}
    ignored = Key(readers.ANY, "ignored: it changes no result")
    keys |= dict.fromkeys(_IGNORED.get(section, "").split(), ignored)
    for accepted, names in _ABSENT.get(section, {}).items():
        values = " or ".join(f"`{json.dumps(value)}`" for value in accepted) or "switched off"
        absent = Key(readers.off(accepted), f"accepted only if {values}")
        keys |= dict.fromkeys(names.split(), absent)
    return keys


# Each section with all of its keys.
KEYS = {section: _of_section(section) for section in _USED}


def path_of(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def nearest(section: str, key: str) -> str | None:
    """The path of the known key that ``key`` of ``section`` is most likely meant to be: of the
    same section if one is spelt alike, otherwise of any."""
    for sections, likeness in (([section], 0.75), (KEYS, 0.9)):
        names = {name: path_of(each, name) for each in sections for name in KEYS[each]}
        found = difflib.get_close_matches(key, names, n=1, cutoff=likeness)
        if found:
            return names[found[0]]
    return None


def table() -> str:
    """Every key and what becomes of it, in Markdown."""
    rows = ["| key | here |", "|---|---|"]
    for section, keys in KEYS.items():
        rows += [f"| `{path_of(section, name)}` | {key.text} |" for name, key in keys.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
