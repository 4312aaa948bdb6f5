"""DeepSpeed's configurations in transformers' Trainer, without DeepSpeed."""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from zero_ext.deepspeed.config import Config, read_values

# What "auto" means, by the key's path: the argument of TrainingArguments and its value.
_ARGUMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "train_micro_batch_size_per_gpu": (
        "per_device_train_batch_size",
        lambda args: args.per_device_train_batch_size,
    ),
    "gradient_accumulation_steps": (
        "gradient_accumulation_steps",
        lambda args: args.gradient_accumulation_steps,
    ),
    "train_batch_size": (
        "per_device_train_batch_size · gradient_accumulation_steps · ranks",
        lambda args: (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        ),
    ),
    "gradient_clipping": ("max_grad_norm", lambda args: args.max_grad_norm),
    "optimizer.params.lr": ("learning_rate", lambda args: args.learning_rate),
    "optimizer.params.betas": (
        "adam_beta1 and adam_beta2",
        lambda args: [args.adam_beta1, args.adam_beta2],
    ),
    "optimizer.params.eps": ("adam_epsilon", lambda args: args.adam_epsilon),
    "optimizer.params.weight_decay": ("weight_decay", lambda args: args.weight_decay),
    "scheduler.params.warmup_min_lr": ("", lambda args: 0),
    "scheduler.params.warmup_max_lr": ("learning_rate", lambda args: args.learning_rate),
    "bf16.enabled": ("bf16", lambda args: args.bf16 or args.bf16_full_eval),
    "fp16.enabled": ("fp16", lambda args: args.fp16 or args.fp16_full_eval),
}


def from_hf(
    config: dict[str, Any] | str | os.PathLike, args: Any, num_training_steps: int | None = None
) -> Config:
    """A configuration with Hugging Face's meaning of "auto": the values of ``TrainingArguments``.

    Args:
        config: As for ``initialize``.
        args: The ``TrainingArguments``.
        num_training_steps: What "auto" means in a schedule's steps. None: not known yet.
    Raises:
        ValueError: a value is neither "auto" nor that of ``args``, or it is not available here.
    """
    values = copy.deepcopy(read_values(config))
    steps = 2 if num_training_steps is None else num_training_steps
    arguments = {
        **_ARGUMENTS,
        "scheduler.params.total_num_steps": ("max_steps", lambda args: steps),
        "scheduler.params.warmup_num_steps": (
            "warmup_steps",
            lambda args: args.get_warmup_steps(steps),
        ),
    }
    wrong = []
    for path, (argument, value_of) in arguments.items():
        *sections, key = path.split(".")
        section = values
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict) or key not in section:
            continue
        value = value_of(args)
        if section[key] == "auto":
            section[key] = value
        elif argument and section[key] != value and not path.startswith("scheduler."):
            wrong.append(f"'{path}' is {section[key]!r}, and {argument} is {value!r}")
    if wrong:
        raise ValueError(
            f"zero_ext: the DeepSpeed configuration and TrainingArguments differ: "
            f'{"; ".join(wrong)}. Write "auto" into the configuration.'
        )
    settings = Config.read(values, args.world_size)
    for name, is_set in (
        ("fp16", settings.dtype == torch.float16),
        ("zero_optimization.mics_shard_size", settings.shards is not None),
        ("gradient_allreduce_op", settings.sums_gradients),
        ("zero_optimization.offload_param", settings.offload_params and args.device.type != "cpu"),
    ):
        if is_set:
            raise ValueError(
                f"zero_ext: config '{name}' does not go with a Trainer here. Leave it out, or "
                "train with zero_ext.initialize()."
            )
    return settings


def sharding_of(settings: Config) -> dict[str, Any]:
    """The arguments of ``shard`` beside the stage."""
    policy = None
    if settings.reduce_dtype is not None:
        policy = MixedPrecisionPolicy(reduce_dtype=settings.reduce_dtype)
    return {"offload_policy": settings.offload_policy, "mp_policy": policy, **settings.tuning}
