"""The keys of DeepSpeed's configuration, and what becomes of each.

Note [Settings of DeepSpeed]
A setting does here what DeepSpeed's documentation says. One that changes only speed, memory or what
is printed is ignored (``IGNORED``). A feature that this library lacks may be switched off
(``ABSENT``); switched on it is an error that names it, because it would change a result.

``python -m zero_ext.deepspeed.keys`` prints the table of docs/deepspeed_keys.md.
"""

import difflib
import json

# Path of a section ("" is the root), and what each key of it sets.
USED = {
    "": {
        "train_batch_size": "samples per step, of all ranks",
        "train_micro_batch_size_per_gpu": "samples per micro-batch and rank",
        "gradient_accumulation_steps": "micro-batches per step; each loss is divided by them",
        "gradient_clipping": "`max_grad_norm` of the optimizer. Default: 1.0. 0 clips nothing",
        "gradient_allreduce_op": '`"mean"` or `"sum"` of the ranks\' gradients',
        "communication_data_type": "`mp_policy.reduce_dtype` of `shard`",
        "optimizer": "`type` and `params`: see [Optimizers](#optimizers)",
        "scheduler": "`type` and `params`: see [Schedules](#schedules)",
        "dataloader_drop_last": "whether the loader drops an incomplete last batch",
        "steps_per_print": "steps between two lines of the logger `zero_ext`",
        "wall_clock_breakdown": "whether the times of forward, backward and step are logged",
        "memory_breakdown": "whether the bytes of `stats()` are logged after each step",
        "dump_state": "whether the settings are logged at the start",
        "tensorboard": "a section",
        "csv_monitor": "a section",
        "bf16": "a section",
        "bfloat16": "the older name of `bf16`",
        "fp16": "a section",
        "data_types": "a section",
        "torch_autocast": "a section",
        "managed_gradient_accumulation": "false: each `step()` updates the parameters",
        "zero_optimization": "a section",
    },
    "tensorboard": {
        "enabled": "whether rank 0's losses, rates and loss scales are written for TensorBoard",
        "output_path": "folder. Default: the current one",
        "job_name": "folder in it",
    },
    "csv_monitor": {
        "enabled": "whether rank 0's losses, rates and loss scales are written to CSV files",
        "output_path": "folder. Default: the current one",
        "job_name": "folder in it",
    },
    "bf16": {
        "enabled": "the model's parameters become bf16, with fp32 masters",
        "check_grad_overflow": "whether a step with NaN or Inf is skipped. Default: true",
    },
    "fp16": {
        "enabled": "the model's parameters become fp16, with fp32 masters",
        "auto_cast": "whether floating point inputs are cast to fp16",
        "loss_scale": "a constant loss scale; 0 adapts it",
        "initial_scale_power": "the first loss scale is 2 to this power",
        "loss_scale_window": "steps without an overflow before the scale doubles",
        "hysteresis": "overflows before the scale halves",
        "min_loss_scale": "the scale does not fall below it",
    },
    "data_types": {
        "grad_accum_dtype": '`"fp32"` or null: gradients are always summed in fp32',
        "param_dtype": "the dtype that `bf16` or `fp16` sets; another one is an error",
        "buffer_dtype": "floating point buffers are cast to it. Default: they keep theirs",
        "keep_in_fp32_modules": "patterns of buffers that stay fp32. Default: Transformers' lists",
    },
    "torch_autocast": {
        "enabled": "whether the engine's forwards run inside `torch.autocast`",
        "dtype": '`"bf16"`, or `"fp16"` with a dynamic loss scale as torch\'s `GradScaler` has',
        "lower_precision_safe_modules": "ignored: gradients travel in their own dtype",
    },
    "zero_optimization": {
        "stage": "`stage` of `shard`. Default: 0",
        "compute_grad_norm": "whether the norm is measured where nothing is clipped",
        "reduce_bucket_size": "elements that are reduced at once: an upper bound of `bucket_mb`",
        "stage3_prefetch_bucket_size": "elements gathered ahead: `prefetch_mb` of `shard`",
        "stage3_max_live_parameters": "elements that stay gathered: `retained_bytes` of `shard`",
        "offload_optimizer": "a section",
        "offload_param": "a section",
        "ignore_unused_parameters": "false: a parameter without gradient is an error of `step()`",
        "cpu_offload": "the older name of `offload_optimizer` with the device `cpu`",
        "mics_shard_size": "ranks of a replica: hybrid sharding, with stage 3",
    },
    "zero_optimization.offload_optimizer": {
        "device": (
            '`"cpu"`: masters, gradient sums and optimizer states are in host memory, with '
            '`offload_param` all that `offload_policy` of `shard` moves. `"none"`: no offload'
        ),
        "pin_memory": "whether the host memory is pinned. Default: true",
    },
    "zero_optimization.offload_param": {
        "device": (
            '`"cpu"`: stage 3\'s parameters are in host memory between their uses, without '
            "`offload_optimizer` the frozen ones: trained ones are gathered from their masters. "
            'Other stages ignore it, as DeepSpeed does. `"none"`: no offload'
        ),
        "pin_memory": "as above; with both sections, memory is pinned if both say so",
    },
}

# Keys that change speed, memory or what is printed, but no result: accepted with any value.
IGNORED = {
    "": """
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather checkpoint
        log_level disable_python_gc aio prescale_gradients gradient_predivide_factor
        seq_parallel_communication_data_type vocabulary_size timers activation_checkpointing
        """,
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

# Features that this library lacks, with the values that switch them off. A section is off where
# "enabled" is false or all of its values are.
ABSENT = {
    "": {
        "sparse_gradients": (False,),
        "graph_harvesting": (False,),
        "use_data_before_expert_parallelism": (False,),
        "sequence_parallel_size": (1,),
        **dict.fromkeys(
            """
            amp flops_profiler comms_logger wandb comet autotuning elasticity
            compression_training data_efficiency curriculum_learning eigenvalue
            progressive_layer_drop hybrid_engine pipeline nebula datastates_ckpt weight_quantization
            compile tensor_parallel expert_parallel sparse_attention
            """.split(),
            (),
        ),
    },
    "zero_optimization": {
        "zero_hpz_partition_size": (0, 1),
        "zero_quantized_weights": (False,),
        "zero_quantized_nontrainable_weights": (False,),
        "zero_quantized_gradients": (False,),
        "zeropp_loco_param": (None,),
        "zenflow": (None,),
        "cpu_offload_param": (False, None),
    },
    "zero_optimization.offload_optimizer": {"ratio": (1,), "super_offload": (False,)},
    "fp16": {"consecutive_hysteresis": (False,), "fp16_master_weights_and_grads": (False,)},
    "bf16": {"bf16_master_weights_and_grads": (False,), "bf16_optimizer_states": (False,)},
}

SECTIONS = list(USED)


def ignored(section: str) -> list[str]:
    return IGNORED.get(section, "").split()


def known(section: str) -> list[str]:
    return [*USED.get(section, ()), *ignored(section), *ABSENT.get(section, ())]


def path_of(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def nearest(section: str, key: str) -> str | None:
    """The path of the known key that ``key`` of ``section`` is most likely meant to be: of the
    same section if one is spelt alike, otherwise of any."""
    for sections, likeness in (([section], 0.75), (SECTIONS, 0.9)):
        names = {name: path_of(each, name) for each in sections for name in known(each)}
        found = difflib.get_close_matches(key, names, n=1, cutoff=likeness)
        if found:
            return names[found[0]]
    return None


def table() -> str:
    """Every key and its fate, in Markdown."""
    rows = ["| key | here |", "|---|---|"]
    for section in SECTIONS:
        for key, meaning in USED[section].items():
            rows.append(f"| `{path_of(section, key)}` | {meaning} |")
        for key in ignored(section):
            rows.append(f"| `{path_of(section, key)}` | ignored: it changes no result |")
        for key, values in ABSENT.get(section, {}).items():
            accepted = " or ".join(f"`{json.dumps(value)}`" for value in values) or "switched off"
            rows.append(f"| `{path_of(section, key)}` | accepted only if {accepted} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
