"""Config: the settings of a DeepSpeed configuration, in this library's terms.

Note [Settings of DeepSpeed]
A setting does here what DeepSpeed's documentation says. One that changes only speed or memory is
ignored (``_TUNING``). Every other one is an error that names it, because it would change a result.
Integrations that fill in ``"auto"`` (Accelerate, Transformers) must do so before.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from zero_ext.optim.scaler import LARGEST_SCALE

_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "bfp16": torch.bfloat16,
    "fp32": torch.float32,
}

# Settings that change speed, memory or what is printed, but no result.
_TUNING = {
    "": """
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown
        memory_breakdown dump_state disable_allgather checkpoint log_level disable_python_gc aio
        """,
    "zero_optimization": """
        allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size
        contiguous_gradients round_robin_gradients use_multi_rank_bucket_allreduce sub_group_size
        load_from_fp32_weights elastic_checkpoint ignore_unused_parameters legacy_stage1
        log_trace_cache_warnings memory_efficient_linear pipeline_loading_checkpoint
        override_module_apply enable_sanity_checks parameter_alignment
        stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params
        stage3_allgather_sequential cpu_offload_use_pin_memory mics_hierarchical_params_gather
        """,
    "zero_optimization.offload_optimizer": """
        nvme_path buffer_count buffer_size pipeline_read pipeline_write fast_init cpuadam_cores_perc
        """,
    "zero_optimization.offload_param": "nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "bf16": "immediate_grad_update",
}

# Settings that matter only in an enabled section.
_WHERE_ENABLED = {
    "fp16": """
        auto_cast loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale
        """,
    "bf16": "check_grad_overflow",
}

# Features that this library does not have, with the values that switch them off.
_ABSENT = {
    "prescale_gradients": (False,),
    "gradient_predivide_factor": (1,),
    "gradient_allreduce_op": ("mean",),
    "sparse_gradients": (False,),
    "managed_gradient_accumulation": (True,),
    "data_types": ({"grad_accum_dtype": "fp32"},),
    "zero_optimization.zero_hpz_partition_size": (0, 1),
    "zero_optimization.zero_quantized_weights": (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.cpu_offload_param": (False, None),
    "zero_optimization.offload_optimizer.ratio": (1,),
    "zero_optimization.offload_optimizer.super_offload": (False,),
    "fp16.consecutive_hysteresis": (False,),
    "fp16.fp16_master_weights_and_grads": (False,),
    "bf16.bf16_master_weights_and_grads": (False,),
    "bf16.bf16_optimizer_states": (False,),
}


@dataclass(frozen=True)
class Config:
    """One run's settings.

    Args:
        train_batch_size: Samples per step on all ranks: ``micro_batch_size`` times
            ``accumulation_steps`` times the number of ranks.
        dtype: What the model is cast to; None leaves it alone.
        scaler: Arguments of a ``LossScaler``; None for no loss scale.
        measures_norm: The gradients' norm is measured, also where nothing is clipped.
        reduce_dtype: What gradients travel in; None: their own.
        shards: Ranks of a replica, where sharding is hybrid; None: all.
        optimizer, scheduler: Name and arguments.
    """

    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    stage: int
    dtype: torch.dtype | None
    scaler: dict[str, Any] | None
    casts_inputs: bool
    nonfinite: str
    max_grad_norm: float | None
    measures_norm: bool
    offload_policy: CPUOffloadPolicy | None
    reduce_dtype: torch.dtype | None
    shards: int | None
    optimizer: tuple[str, dict[str, Any]] | None
    scheduler: tuple[str, dict[str, Any]] | None
    drop_last: bool
    steps_per_print: int | None

    @staticmethod
    def read(config: dict[str, Any] | str | os.PathLike, world_size: int) -> "Config":
        """Read a dict or a JSON file.

        Raises:
            ValueError: a setting is unknown, not available here, or contradicts another one.
        """
        root = _Section("", _loaded(config))
        zero = root.section("zero_optimization")
        fp16, bf16 = root.section("fp16"), _bf16(root)
        is_fp16, is_bf16 = fp16.flag("enabled", False), bf16.flag("enabled", False)
        if is_fp16 and is_bf16:
            raise ValueError("zero_ext: config enables both fp16 and bf16. Enable one of them.")
        stage = zero.take("stage", 0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            zero.reject("stage", stage, ", not 0 to 3.")
        train, micro, accumulation = _batch_sizes(root, world_size)
        result = Config(
            train_batch_size=train,
            micro_batch_size=micro,
            accumulation_steps=accumulation,
            stage=int(stage),
            dtype=torch.float16 if is_fp16 else torch.bfloat16 if is_bf16 else None,
            scaler=_scaler(fp16) if is_fp16 else None,
            casts_inputs=is_fp16 and fp16.flag("auto_cast", False),
            nonfinite="step" if is_bf16 and not bf16.flag("check_grad_overflow", True) else "skip",
            max_grad_norm=root.number("gradient_clipping", 0) or None,
            measures_norm=zero.flag("compute_grad_norm", stage > 0),
            offload_policy=_offload(zero),
            reduce_dtype=_dtype(root, "communication_data_type"),
            shards=_shards(zero, int(stage), world_size),
            optimizer=_named(root, "optimizer"),
            scheduler=_named(root, "scheduler"),
            drop_last=root.flag("dataloader_drop_last", False),
            steps_per_print=root.number("steps_per_print", 0) or None,
        )
        for section, enabled in ((fp16, is_fp16), (bf16, is_bf16)):
            if not enabled:
                section.forget()
        for section in (root, zero, fp16, bf16):
            section.finish()
        return result


class _Section:
    """One object of the JSON file. Each setting is taken once; ``finish`` judges the others."""

    def __init__(self, path: str, values: dict[str, Any]):
        if not isinstance(values, dict):
            raise ValueError(f"zero_ext: config '{path}' is {values!r}, not an object.")
        self.path = path
        self._values = dict(values)

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def reject(self, key: str, value: Any, problem: str) -> NoReturn:
        raise ValueError(f"zero_ext: config '{self.name(key)}' is {value!r}{problem}")

    def take(self, key: str, default: Any) -> Any:
        value = self._values.pop(key, default)
        if "auto" in _elements(value):
            self.reject(key, value, ", which an integration is to fill in before. Give its value.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            self.reject(key, value, ", not true or false.")
        return value

    def text(self, key: str) -> str | None:
        value = self.take(key, None)
        if value is not None and not isinstance(value, str):
            self.reject(key, value, ", not a name.")
        return value

    def number(self, key: str, default: float, most: float = math.inf) -> float:
        value = self.take(key, default)
        value = default if value is None else value
        if not _is_number(value) or not 0 <= value <= most:
            allowed = "from 0 on" if most == math.inf else f"from 0 to {most:g}"
            self.reject(key, value, f", not a number {allowed}.")
        return value

    def count(self, key: str, default: int | None) -> int | None:
        """A whole number, which may be written as 1000.0."""
        value = self.take(key, default)
        if value is None:
            return default
        if not _is_number(value) or not value >= 1 or value % 1 != 0:
            self.reject(key, value, ", not a count of at least 1.")
        return int(value)

    def section(self, key: str) -> "_Section":
        return _Section(self.name(key), self.take(key, None) or {})

    def rest(self) -> dict[str, Any]:
        return {key: self.take(key, None) for key in list(self._values)}

    def forget(self) -> None:
        """Drop the settings of a section that is not enabled."""
        known = f"{_WHERE_ENABLED[self.path]} {_TUNING.get(self.path, '')}".split()
        for key in list(self._values):
            if key in known or self.name(key) in _ABSENT:
                del self._values[key]

    def finish(self) -> None:
        """Raise for a setting that was not taken, unless it changes no result."""
        tuning = _TUNING.get(self.path, "").split()
        for key, value in self.rest().items():
            absent = value in _ABSENT.get(self.name(key), ())
            if key not in tuning and not _is_off(value) and not absent:
                self.reject(key, value, ": there is no such setting here. Remove it.")


def _elements(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_quoted_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def _is_off(value: Any) -> bool:
    """Whether ``value`` is the section of a feature that is switched off."""
    if not isinstance(value, dict):
        return False
    off = [_is_off(each) if isinstance(each, dict) else not each for each in value.values()]
    return value.get("enabled") is False or all(off)


def _loaded(config: dict[str, Any] | str | os.PathLike) -> dict[str, Any]:
    if isinstance(config, dict):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(
            "zero_ext: config must be a dict or the path of a JSON file, not a "
            f"{type(config).__name__}."
        )
    try:
        return json.loads(Path(config).read_text(), object_pairs_hook=_without_repetition)
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"zero_ext: config '{config}' cannot be read: {error}") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"zero_ext: config has '{key}' twice.")
    return result


def _bf16(root: _Section) -> _Section:
    """The section ``bf16``, also under its older name."""
    older = root.take("bfloat16", None)
    newer = root.take("bf16", None)
    return _Section("bf16", newer or older or {})


_BATCH_SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def _batch_sizes(root: _Section, world_size: int) -> tuple[int, int, int]:
    """Samples per step, per micro-batch, and accumulation steps. A configuration may leave some of
    the three out."""
    train, micro, accumulation = (root.count(key, None) for key in _BATCH_SIZES)
    if train is None and micro is None:
        raise ValueError(
            "zero_ext: config has neither 'train_batch_size' nor 'train_micro_batch_size_per_gpu'."
        )
    if train is None:
        accumulation = accumulation or 1
        return micro * accumulation * world_size, micro, accumulation
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    if micro * accumulation * world_size != train:
        raise ValueError(
            f"zero_ext: config 'train_batch_size' is {train}, which is not {micro} (micro-batch) · "
            f"{accumulation} (accumulation steps) · {world_size} (ranks)."
        )
    return train, micro, accumulation


def _scaler(fp16: _Section) -> dict[str, Any]:
    static = fp16.number("loss_scale", 0, most=LARGEST_SCALE)
    first = 2.0 ** fp16.number("initial_scale_power", 16, most=math.log2(LARGEST_SCALE))
    dynamic = {
        "init_scale": first,
        "growth_interval": fp16.count("loss_scale_window", 1000),
        "hysteresis": fp16.count("hysteresis", 2),
        "min_scale": fp16.number("min_loss_scale", 1),
    }
    if static:
        return {"mode": "static", "init_scale": static}
    least = dynamic["min_scale"]
    if not 0 < least <= first:
        most = f"at most the first scale, {first:g}"
        fp16.reject("min_loss_scale", least, f", not above 0 and {most}.")
    return {"mode": "dynamic", **dynamic}


def _offload(zero: _Section) -> CPUOffloadPolicy | None:
    params = zero.section("offload_param")
    if params.take("device", "none") != "none":
        raise ValueError(
            f"zero_ext: config '{params.path}' is not available: sharded parameters stay on their "
            "device. offload_optimizer moves masters, gradients and states."
        )
    params.finish()
    states = zero.section("offload_optimizer")
    device = states.take("device", "none")
    if device not in ("none", "cpu"):
        states.reject("device", device, ": choose 'cpu' or 'none'.")
    pinned = states.flag("pin_memory", False)
    states.finish()
    if device == "none" and not zero.flag("cpu_offload", False):
        return None
    return CPUOffloadPolicy(pin_memory=pinned)


def _shards(zero: _Section, stage: int, world_size: int) -> int | None:
    """Ranks of a replica, in hybrid sharding, which DeepSpeed calls MiCS."""
    size = zero.take("mics_shard_size", -1)
    if size == -1:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size != 0:
        zero.reject("mics_shard_size", size, f", which does not divide the {world_size} ranks.")
    if stage != 3:
        zero.reject("mics_shard_size", size, f" with stage {stage}: it needs 3.")
    return size


def _dtype(root: _Section, key: str) -> torch.dtype | None:
    name = root.text(key)
    if name is not None and name not in _DTYPES:
        root.reject(key, name, ": choose fp16, bf16 or fp32.")
    return _DTYPES.get(name)


def _named(root: _Section, key: str) -> tuple[str, dict[str, Any]] | None:
    """``{"type": …, "params": {…}}``."""
    given = root.take(key, None) or {}
    section = _Section(key, given)
    kind, params = section.text("type"), section.section("params")
    arguments = params.rest()
    section.take("legacy_fusion", False)
    section.finish()
    for name, value in arguments.items():
        if any(_is_quoted_number(element) for element in _elements(value)):
            params.reject(name, value, ": a number in quotes. Remove the quotes.")
    if kind is None and given:
        root.reject(key, given, ", without a 'type'. Give it.")
    return None if kind is None else (kind, arguments)
