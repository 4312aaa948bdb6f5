"""Config: the settings of a DeepSpeed configuration, in this library's terms.

Note [Settings of DeepSpeed] in keys.py says which settings are taken. Integrations that fill in
``"auto"`` (Accelerate, Transformers) must do so before.
"""

import base64
import binascii
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from zero_ext.deepspeed.optimizers import Named, read_optimizer
from zero_ext.deepspeed.readers import name_of
from zero_ext.deepspeed.schedules import read_schedule
from zero_ext.deepspeed.values import Values
from zero_ext.engine.options import ParametersOffloadPolicy, StatesOffloadPolicy


@dataclass(frozen=True)
class Config:
    """One run's settings. A field with ``is`` in its metadata has the value of that key, of which
    keys.py says what it means; None is the default.

    Args:
        train_batch_size: Samples per step on all ranks: ``micro_batch_size`` times
            ``accumulation_steps`` times the number of ranks.
        dtype: What the parameters are cast to; None leaves them alone.
        autocast: What the engine's forwards run in by ``torch.autocast``; None: without it.
        scaler: Arguments of a ``LossScaler``; None for no loss scale.
        clips_by_default: The configuration does not say how to clip.
        measures_norm: The gradients' norm is measured, also where nothing is clipped.
        sums_gradients: Gradients are summed over the ranks, not averaged.
        tuning: Arguments of ``shard`` that change no result.
        shards: Ranks of a replica, where sharding is hybrid; None: all.
        managed_accumulation: A step is made after ``accumulation_steps`` micro-batches. Otherwise
            the caller says when.
        rejects_unused: A parameter without a gradient is an error of the step.
        monitors: Folder of each monitor: ``"tensorboard"``, ``"csv_monitor"``.
    """

    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    stage: int = field(metadata={"is": "zero_optimization.stage"})
    dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None = field(metadata={"is": "data_types.buffer_dtype"})
    fp32_buffers: tuple[str, ...] | None = field(metadata={"is": "data_types.keep_in_fp32_modules"})
    autocast: torch.dtype | None
    scaler: dict[str, Any] | None
    casts_inputs: bool = field(metadata={"is": "fp16.auto_cast"})
    nonfinite: str
    max_grad_norm: float | None
    clips_by_default: bool
    measures_norm: bool
    offload_policy: OffloadPolicy | None
    reduce_dtype: torch.dtype | None = field(metadata={"is": "communication_data_type"})
    sums_gradients: bool = field(metadata={"is": "gradient_allreduce_op"})
    tuning: dict[str, Any]
    shards: int | None
    optimizer: Named | None
    scheduler: Named | None
    managed_accumulation: bool = field(metadata={"is": "managed_gradient_accumulation"})
    rejects_unused: bool
    drop_last: bool = field(metadata={"is": "dataloader_drop_last"})
    steps_per_print: int | None
    monitors: dict[str, Path]
    wall_clock_breakdown: bool = field(metadata={"is": "wall_clock_breakdown"})
    memory_breakdown: bool = field(metadata={"is": "memory_breakdown"})
    dump_state: bool = field(metadata={"is": "dump_state"})

    @property
    def sharding(self) -> dict[str, Any]:
        """The arguments of ``shard`` beside the stage."""
        policy = MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype)
        return {"offload_policy": self.offload_policy, "mp_policy": policy, **self.tuning}

    @staticmethod
    def read(
        config: dict[str, Any] | str | os.PathLike, world_size: int, strict: bool = False
    ) -> "Config":
        """Read a dict, a JSON or Hjson file, or such a text in URL-safe base64.

        Args:
            strict: A key that DeepSpeed does not know is an error everywhere. Otherwise one at the
                top level is a warning, because DeepSpeed ignores it.
        Raises:
            ValueError: settings are unknown, not available here, or contradict each other. The
                message lists all of them in the order of the file.
        """
        values = Values(read_values(config), strict)
        train, micro, accumulation = _batch_sizes(values, world_size)
        stage, dtype, autocast = values["zero_optimization.stage"], _mode(values), _autocast(values)
        clips_by_default = "gradient_clipping" not in values
        norm = values["zero_optimization.compute_grad_norm"]
        result = Config(
            train_batch_size=train,
            micro_batch_size=micro,
            accumulation_steps=accumulation,
            dtype=dtype,
            autocast=autocast,
            scaler=_scaler(values, dtype, autocast),
            nonfinite="skip" if values["bf16.check_grad_overflow"] else "step",
            max_grad_norm=1.0 if clips_by_default else values["gradient_clipping"] or None,
            clips_by_default=clips_by_default,
            measures_norm=stage > 0 if norm is None else norm,
            offload_policy=_offload(values, stage),
            tuning=_tuning(values, stage, dtype),
            shards=_shards(values, stage, world_size),
            optimizer=read_optimizer(values) if values["optimizer"] else None,
            scheduler=read_schedule(values) if values["scheduler"] else None,
            rejects_unused=not values["zero_optimization.ignore_unused_parameters"],
            steps_per_print=values["steps_per_print"] or None,
            monitors=_monitors(values),
            **{f.name: values[f.metadata["is"]] for f in fields(Config) if f.metadata},
        )
        _check_param_dtype(values, dtype)
        values.finish()
        return result


def read_values(config: dict[str, Any] | str | os.PathLike) -> dict[str, Any]:
    """The keys and values of a configuration, as they are."""
    if isinstance(config, dict):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(
            "zero_ext: config must be a dict or the path of a JSON file, not a "
            f"{type(config).__name__}."
        )
    try:
        text = Path(config).read_text()
    except (OSError, UnicodeDecodeError) as error:
        text = _decoded(config)
        if text is None:
            raise ValueError(f"zero_ext: config '{config}' cannot be read: {error}") from error
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except json.JSONDecodeError as error:
        return _read_hjson(text, config, error)


def _decoded(config: Any) -> str | None:
    """The text that ``config`` is in base64; None if it is something else."""
    try:
        text = base64.b64decode(str(config).encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return text if text.lstrip().startswith("{") else None


def _read_hjson(text: str, config: Any, error: json.JSONDecodeError) -> dict[str, Any]:
    """Hjson is JSON with comments, and without most of its quotes and commas."""
    try:
        import hjson
    except ImportError:
        raise ValueError(
            f"zero_ext: config '{config}' cannot be read as JSON: {error}. If it is Hjson, "
            "pip install hjson."
        ) from error
    try:
        return hjson.loads(text, object_pairs_hook=_without_repetition)
    except hjson.HjsonDecodeError as hjson_error:
        raise ValueError(f"zero_ext: config '{config}' cannot be read: {hjson_error}") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"zero_ext: config has '{key}' twice. Keep one of them.")
    return result


def _mode(values: Values) -> torch.dtype | None:
    if values["fp16.enabled"] and values["bf16.enabled"]:
        values.add("bf16", "config enables both fp16 and bf16. Enable one of them.")
    if values["fp16.enabled"]:
        return torch.float16
    return torch.bfloat16 if values["bf16.enabled"] else None


_BATCH_SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def _batch_sizes(values: Values, world_size: int) -> tuple[int, int, int]:
    """Samples per step, per micro-batch, and accumulation steps. A configuration may leave some of
    the three out."""
    train, micro, accumulation = (values[key] for key in _BATCH_SIZES)
    if values.wrong & {*_BATCH_SIZES}:
        return 1, 1, 1
    if train is None and micro is None:
        values.add(
            "train_batch_size",
            "config has neither 'train_batch_size' nor 'train_micro_batch_size_per_gpu'. Give one.",
        )
        return 1, 1, 1
    if train is None or micro is None:
        accumulation = accumulation or 1
    if train is None:
        train = micro * accumulation * world_size
    elif micro is None:
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    if micro * accumulation * world_size != train:
        values.add(
            "train_batch_size",
            f"config 'train_batch_size' is {train}, which is not {micro} (micro-batch) · "
            f"{accumulation} (accumulation steps) · {world_size} (ranks). Change one of them.",
        )
    return train, micro, accumulation


def _autocast(values: Values) -> torch.dtype | None:
    path = "torch_autocast.dtype"
    dtype = values[path]
    if values["torch_autocast.enabled"] and dtype is None and path not in values.wrong:
        values.reject(path, None, ": choose 'bf16' or 'fp16'.")
    return dtype


def _scaler(
    values: Values, dtype: torch.dtype | None, autocast: torch.dtype | None
) -> dict[str, Any] | None:
    if dtype != torch.float16:
        return {"mode": "dynamic"} if autocast == torch.float16 else None
    if static := values["fp16.loss_scale"]:
        return {"mode": "static", "init_scale": static}
    first, least = 2.0 ** values["fp16.initial_scale_power"], values["fp16.min_loss_scale"]
    if not 0 < least <= first:
        text = f", not above 0 and at most the first scale, {first:g}. Change one of the two."
        values.reject("fp16.min_loss_scale", least, text)
    return {
        "mode": "dynamic",
        "init_scale": first,
        "growth_interval": values["fp16.loss_scale_window"],
        "hysteresis": values["fp16.hysteresis"],
        "min_scale": least,
    }


def _check_param_dtype(values: Values, mode: torch.dtype | None) -> None:
    path = "data_types.param_dtype"
    if values[path] not in (None, mode or torch.float32):
        text = ", which the sections fp16 and bf16 do not say. Enable the one that does."
        values.reject(path, name_of(values[path]), text)


def _offload(values: Values, stage: int) -> OffloadPolicy | None:
    """DeepSpeed ignores ``offload_param`` below stage 3."""
    zero = "zero_optimization"
    states = values[f"{zero}.cpu_offload"] or values[f"{zero}.offload_optimizer.device"]
    states_pinned = values[f"{zero}.offload_optimizer.pin_memory"]
    parameters = values[f"{zero}.offload_param.device"] and stage == 3
    parameters_pinned = values[f"{zero}.offload_param.pin_memory"]
    if states and parameters:
        return CPUOffloadPolicy(pin_memory=states_pinned and parameters_pinned)
    if states:
        kind = StatesOffloadPolicy if stage == 3 else CPUOffloadPolicy
        return kind(pin_memory=states_pinned)
    return ParametersOffloadPolicy(pin_memory=parameters_pinned) if parameters else None


def _tuning(values: Values, stage: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """DeepSpeed counts elements, ``shard`` bytes of them in the parameters' dtype."""
    size, tuning = (dtype or torch.float32).itemsize, {}
    bucket = values["zero_optimization.reduce_bucket_size"]
    ahead = values["zero_optimization.stage3_prefetch_bucket_size"]
    live = values["zero_optimization.stage3_max_live_parameters"]
    if bucket:
        tuning["bucket_mb"] = min(25.0, bucket * size / 2**20)
    if stage == 3 and ahead is not None:
        tuning["prefetch_mb"] = ahead * size / 2**20
    if stage == 3 and live is not None:
        tuning["retained_bytes"] = int(live * size)
    return tuning


def _shards(values: Values, stage: int, world_size: int) -> int | None:
    """Ranks of a replica, in hybrid sharding, which DeepSpeed calls MiCS."""
    path = "zero_optimization.mics_shard_size"
    size = values[path]
    if size == -1:
        return None
    if world_size % size != 0:
        text = f", which does not divide the {world_size} ranks. Choose one that does."
        values.reject(path, size, text)
        return None
    if stage != 3:
        values.reject(path, size, f" with stage {stage}: it needs stage 3.")
    return size


def _monitors(values: Values) -> dict[str, Path]:
    return {
        name: Path(values[f"{name}.output_path"] or ".", values[f"{name}.job_name"] or "DeepSpeed")
        for name in ("tensorboard", "csv_monitor")
        if values[f"{name}.enabled"]
    }
