"""Config: the settings of a DeepSpeed configuration, in this library's terms.

Note [Settings of DeepSpeed] in keys.py says which settings are taken. Integrations that fill in
``"auto"`` (Accelerate, Transformers) must do so before.
"""

import base64
import binascii
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from zero_ext.deepspeed.optimizers import OptimizerSettings
from zero_ext.deepspeed.schedules import ScheduleSettings
from zero_ext.deepspeed.sections import Problems, Section
from zero_ext.engine.options import ParametersOffloadPolicy, StatesOffloadPolicy
from zero_ext.optim.scaler import LARGEST_SCALE

_NAMES = {
    torch.float16: ("fp16", "float16", "half", "torch.float16"),
    torch.bfloat16: ("bf16", "bfloat16", "torch.bfloat16", "bfp16"),
    torch.float32: ("fp32", "float32", "float", "torch.float32"),
}
_DTYPES = {name: dtype for dtype, names in _NAMES.items() for name in names}


@dataclass(frozen=True)
class Config:
    """One run's settings.

    Args:
        train_batch_size: Samples per step on all ranks: ``micro_batch_size`` times
            ``accumulation_steps`` times the number of ranks.
        dtype: What the parameters are cast to; None leaves them alone.
        buffer_dtype: What floating point buffers are cast to; None leaves them alone.
        fp32_buffers: Patterns of the buffers that stay in fp32; None: the model's own lists.
        autocast: What the engine's forwards run in by ``torch.autocast``; None: without it.
        scaler: Arguments of a ``LossScaler``; None for no loss scale.
        clips_by_default: The configuration does not say how to clip.
        measures_norm: The gradients' norm is measured, also where nothing is clipped.
        reduce_dtype: What gradients travel in; None: their own.
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
    stage: int
    dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    fp32_buffers: tuple[str, ...] | None
    autocast: torch.dtype | None
    scaler: dict[str, Any] | None
    casts_inputs: bool
    nonfinite: str
    max_grad_norm: float | None
    clips_by_default: bool
    measures_norm: bool
    offload_policy: OffloadPolicy | None
    reduce_dtype: torch.dtype | None
    sums_gradients: bool
    tuning: dict[str, Any]
    shards: int | None
    optimizer: OptimizerSettings | None
    scheduler: ScheduleSettings | None
    managed_accumulation: bool
    rejects_unused: bool
    drop_last: bool
    steps_per_print: int | None
    monitors: dict[str, Path]
    wall_clock_breakdown: bool
    memory_breakdown: bool
    dump_state: bool

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
        values = read_values(config)
        problems = Problems(values, strict)
        root = Section("", values, problems)
        zero = root.section("zero_optimization")
        fp16, bf16, types = root.section("fp16"), _bf16(root), root.section("data_types")
        dtype, autocast = _mode(root, fp16, bf16), _autocast(root)
        stage = _stage(zero)
        train, micro, accumulation = _batch_sizes(root, world_size)
        clips_by_default = not root.has("gradient_clipping")
        clip = 1.0 if clips_by_default else root.number("gradient_clipping", 0)
        optimizer, scheduler = root.take("optimizer", None), root.take("scheduler", None)
        result = Config(
            train_batch_size=train,
            micro_batch_size=micro,
            accumulation_steps=accumulation,
            stage=stage,
            dtype=dtype,
            buffer_dtype=_data_types(types, dtype),
            fp32_buffers=types.names("keep_in_fp32_modules"),
            autocast=autocast,
            scaler=_scaler(fp16, dtype, autocast),
            casts_inputs=dtype == torch.float16 and fp16.flag("auto_cast", False),
            nonfinite=_nonfinite(bf16) if dtype == torch.bfloat16 else "skip",
            max_grad_norm=clip or None,
            clips_by_default=clips_by_default,
            measures_norm=zero.flag("compute_grad_norm", stage > 0),
            offload_policy=_offload(zero, stage),
            reduce_dtype=_dtype(root, "communication_data_type"),
            sums_gradients=root.text("gradient_allreduce_op", ["mean", "sum"]) in ("sum", "SUM"),
            tuning=_tuning(zero, stage, dtype),
            shards=_shards(zero, stage, world_size),
            optimizer=OptimizerSettings.read(optimizer, problems) if optimizer else None,
            scheduler=ScheduleSettings.read(scheduler, problems) if scheduler else None,
            managed_accumulation=root.flag("managed_gradient_accumulation", True),
            rejects_unused=not zero.flag("ignore_unused_parameters", True),
            drop_last=root.flag("dataloader_drop_last", False),
            steps_per_print=root.number("steps_per_print", 0) or None,
            monitors=_monitors(root),
            wall_clock_breakdown=root.flag("wall_clock_breakdown", False),
            memory_breakdown=root.flag("memory_breakdown", False),
            dump_state=root.flag("dump_state", False),
        )
        _finish([root, zero, types], {torch.float16: fp16, torch.bfloat16: bf16}, dtype)
        problems.finish()
        return result


def _finish(
    sections: list[Section], modes: dict[torch.dtype, Section], dtype: torch.dtype | None
) -> None:
    """Judge every setting that was not taken. A mode that is not enabled may say what it likes."""
    for mode, section in modes.items():
        if mode != dtype:
            section.forget()
    for section in (*sections, *modes.values()):
        section.finish()


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


def _bf16(root: Section) -> Section:
    """The section ``bf16``, also under its older name."""
    older = root.take("bfloat16", None)
    newer = root.take("bf16", None)
    return Section("bf16", newer or older or {}, root.problems)


def _mode(root: Section, fp16: Section, bf16: Section) -> torch.dtype | None:
    is_fp16, is_bf16 = fp16.flag("enabled", False), bf16.flag("enabled", False)
    if is_fp16 and is_bf16:
        root.problems.add("bf16", "config enables both fp16 and bf16. Enable one of them.")
    return torch.float16 if is_fp16 else torch.bfloat16 if is_bf16 else None


def _stage(zero: Section) -> int:
    stage = zero.take("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        zero.reject("stage", stage, ", not 0 to 3. Choose one of them.")
        return 0
    return int(stage)


_BATCH_SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def _batch_sizes(root: Section, world_size: int) -> tuple[int, int, int]:
    """Samples per step, per micro-batch, and accumulation steps. A configuration may leave some of
    the three out."""
    given = [root.has(key) for key in _BATCH_SIZES]
    train, micro, accumulation = (root.count(key, None) for key in _BATCH_SIZES)
    sizes = (train, micro, accumulation)
    if any(size is None and was for size, was in zip(sizes, given, strict=True)) and root.problems:
        return 1, 1, 1  # which is a problem already
    if train is None and micro is None:
        root.problems.add(
            "train_batch_size",
            "config has neither 'train_batch_size' nor 'train_micro_batch_size_per_gpu'. Give one.",
        )
        return 1, 1, 1
    if train is None:
        accumulation = accumulation or 1
        return micro * accumulation * world_size, micro, accumulation
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    if micro * accumulation * world_size != train:
        root.problems.add(
            "train_batch_size",
            f"config 'train_batch_size' is {train}, which is not {micro} (micro-batch) · "
            f"{accumulation} (accumulation steps) · {world_size} (ranks). Change one of them.",
        )
    return train, micro, accumulation


def _nonfinite(bf16: Section) -> str:
    return "skip" if bf16.flag("check_grad_overflow", True) else "step"


def _autocast(root: Section) -> torch.dtype | None:
    section = root.section("torch_autocast")
    enabled = section.flag("enabled", False)
    dtype = None
    if enabled:
        dtype = _dtype(section, "dtype")
        section.names("lower_precision_safe_modules")
        if dtype not in (torch.float16, torch.bfloat16) and not root.problems:
            named = None if dtype is None else _NAMES[dtype][0]
            section.reject("dtype", named, ": choose 'bf16' or 'fp16'.")
    section.forget()
    section.finish()
    return dtype


def _scaler(
    fp16: Section, dtype: torch.dtype | None, autocast: torch.dtype | None
) -> dict[str, Any] | None:
    if dtype != torch.float16:
        return {"mode": "dynamic"} if autocast == torch.float16 else None
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
        text = f", not above 0 and at most the first scale, {first:g}. Change one of the two."
        fp16.reject("min_loss_scale", least, text)
    return {"mode": "dynamic", **dynamic}


def _data_types(types: Section, mode: torch.dtype | None) -> torch.dtype | None:
    """The buffers' dtype. Checks the other two."""
    accumulated = _dtype(types, "grad_accum_dtype")
    if accumulated not in (None, torch.float32):
        text = ": gradients are summed in fp32 here. Leave it out."
        types.reject("grad_accum_dtype", _NAMES[accumulated][0], text)
    parameters = _dtype(types, "param_dtype")
    if parameters not in (None, mode or torch.float32):
        text = ", which the sections fp16 and bf16 do not say. Enable the one that does."
        types.reject("param_dtype", _NAMES[parameters][0], text)
    return _dtype(types, "buffer_dtype")


def _offload(zero: Section, stage: int) -> OffloadPolicy | None:
    """DeepSpeed ignores ``offload_param`` below stage 3."""
    states, states_pinned = _offloads(zero, "offload_optimizer")
    parameters, parameters_pinned = _offloads(zero, "offload_param")
    states = zero.flag("cpu_offload", False) or states
    parameters = parameters and stage == 3
    if states and parameters:
        return CPUOffloadPolicy(pin_memory=states_pinned and parameters_pinned)
    if states:
        kind = StatesOffloadPolicy if stage == 3 else CPUOffloadPolicy
        return kind(pin_memory=states_pinned)
    return ParametersOffloadPolicy(pin_memory=parameters_pinned) if parameters else None


def _offloads(zero: Section, key: str) -> tuple[bool, bool]:
    """Whether it moves anything, and into pinned memory."""
    section = zero.section(key)
    device = section.text("device", ["cpu", "none"]) or "none"
    pinned = section.flag("pin_memory", True)
    section.finish()
    return device.lower() == "cpu", pinned


def _tuning(zero: Section, stage: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """DeepSpeed counts elements, ``shard`` bytes of them in the parameters' dtype."""
    size = (dtype or torch.float32).itemsize
    bucket, ahead, live = (
        zero.size(key)
        for key in (
            "reduce_bucket_size",
            "stage3_prefetch_bucket_size",
            "stage3_max_live_parameters",
        )
    )
    tuning = {}
    if bucket:
        tuning["bucket_mb"] = min(25.0, bucket * size / 2**20)
    if stage == 3 and ahead is not None:
        tuning["prefetch_mb"] = ahead * size / 2**20
    if stage == 3 and live is not None:
        tuning["retained_bytes"] = int(live * size)
    return tuning


def _shards(zero: Section, stage: int, world_size: int) -> int | None:
    """Ranks of a replica, in hybrid sharding, which DeepSpeed calls MiCS."""
    size = zero.take("mics_shard_size", -1)
    if size == -1:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size != 0:
        text = f", which does not divide the {world_size} ranks. Choose one that does."
        zero.reject("mics_shard_size", size, text)
        return None
    if stage != 3:
        zero.reject("mics_shard_size", size, f" with stage {stage}: it needs stage 3.")
    return size


def _monitors(root: Section) -> dict[str, Path]:
    folders = {}
    for name in ("tensorboard", "csv_monitor"):
        section = root.section(name)
        folder = Path(section.text("output_path") or ".", section.text("job_name") or "DeepSpeed")
        if section.flag("enabled", False):
            folders[name] = folder
        section.finish()
    return folders


def _dtype(section: Section, key: str) -> torch.dtype | None:
    name = section.text(key)
    if name is not None and name.lower() not in _DTYPES:
        section.reject(key, name, ": choose fp16, bf16 or fp32.")
    return None if name is None else _DTYPES.get(name.lower())
