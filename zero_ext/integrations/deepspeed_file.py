"""DeepSpeed's configurations in transformers' Trainer and accelerate, without DeepSpeed."""

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin

from zero_ext.deepspeed.config import Config, read_values

_USES_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"  # set by "accelerate launch"


def _meanings(args: Any, steps: int) -> dict[str, tuple[str, Any]]:
    """The meanings of "auto": by the key's path, the argument's name and its value."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    of_batch = "per_device_train_batch_size · gradient_accumulation_steps · ranks"
    own_names = {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
        "optimizer.params.lr": "learning_rate",
        "optimizer.params.eps": "adam_epsilon",
        "optimizer.params.weight_decay": "weight_decay",
        "scheduler.params.warmup_max_lr": "learning_rate",
    }
    return {
        **{path: (name, getattr(args, name)) for path, name in own_names.items()},
        "train_batch_size": (of_batch, batch),
        "optimizer.params.betas": ("adam_beta1 and adam_beta2", [args.adam_beta1, args.adam_beta2]),
        "scheduler.params.warmup_min_lr": ("", 0),
        "scheduler.params.total_num_steps": ("max_steps", steps),
        "scheduler.params.warmup_num_steps": ("warmup_steps", args.get_warmup_steps(steps)),
        "bf16.enabled": ("bf16", args.bf16 or args.bf16_full_eval),
        "fp16.enabled": ("fp16", args.fp16 or args.fp16_full_eval),
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
    wrong = []
    for path, (argument, value) in _meanings(args, steps).items():
        *sections, key = path.split(".")
        section = values
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict) or key not in section:
            continue
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
    _check(settings)
    return settings


def is_plugin_asked(name: str) -> bool:
    """By "accelerate launch", in the environment."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"


def take_plugin(kwargs: dict[str, Any]) -> DeepSpeedPlugin | None:
    """Take the plugin out of an Accelerator's arguments, or make that of the environment."""
    given = [kwargs.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    plugin = next((each for each in given if each is not None), None)
    if plugin is None and is_plugin_asked("DEEPSPEED"):
        plugin = DeepSpeedPlugin()
    if plugin is not None and not isinstance(plugin, DeepSpeedPlugin):
        raise ValueError(
            f"zero_ext: deepspeed_plugin is a {type(plugin).__name__}. Pass one DeepSpeedPlugin."
        )
    return plugin


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """accelerate imports DeepSpeed where the environment asks for it."""
    value = os.environ.pop(_USES_DEEPSPEED, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[_USES_DEEPSPEED] = value


def from_plugin(plugin: DeepSpeedPlugin, accelerator: Accelerator, mixed_precision: str) -> Config:
    """The settings of accelerate's plugin, with its meaning of "auto".

    Args:
        accelerator: Says the accumulation steps where the plugin does not.
        mixed_precision: accelerate's. "bf16" means parameters in bf16, as with DeepSpeed.
    Raises:
        ValueError: settings are unknown, not available here, or contradict ``mixed_precision``.
    """
    plugin = copy.deepcopy(plugin)
    plugin.set_mixed_precision(mixed_precision)
    values = plugin.deepspeed_config
    del values["steps_per_print"]  # infinite: the plugin's own
    # Loaders are the script's. A size that cannot be known is left out.
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if values.get(key) == "auto":
            del values[key]
    if "train_batch_size" not in values:
        values.setdefault("train_micro_batch_size_per_gpu", 1)
    for path, value in (
        ("gradient_accumulation_steps", accelerator.gradient_accumulation_steps),
        ("gradient_clipping", 1.0),
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save", False),
    ):
        plugin.fill_match(path, must_match=False, **{path: value})
    settings = Config.read(values, accelerator.num_processes)
    for name, given in (("optimizer", settings.optimizer), ("scheduler", settings.scheduler)):
        if given is not None:
            raise ValueError(
                f"zero_ext: config '{name}' does not go with accelerate's DeepSpeedPlugin here. "
                f"Leave it out, and make torch's {name} in the script."
            )
    _check(settings)
    return settings


def _check(settings: Config) -> None:
    for name, is_set in (
        ("fp16", settings.dtype == torch.float16),
        ("zero_optimization.mics_shard_size", settings.shards is not None),
        ("gradient_allreduce_op", settings.sums_gradients),
        ("torch_autocast", settings.autocast is not None),
        ("managed_gradient_accumulation", not settings.managed_accumulation),
    ):
        if is_set:
            raise ValueError(
                f"zero_ext: config '{name}' does not go with a Trainer or an Accelerator here. "
                "Leave it out, or train with zero_ext.initialize()."
            )
