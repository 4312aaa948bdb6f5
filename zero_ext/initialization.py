"""initialize: ``deepspeed.initialize``, for scripts and configurations that were written for it."""

import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zero_ext import elementwise, optim
from zero_ext.api import shard
from zero_ext.config import Config
from zero_ext.engine import TrainingEngine
from zero_ext.groups import all_or_none, check_same_on_all_ranks, resolve
from zero_ext.scaler import LossScaler
from zero_ext.schedules import SCHEDULES
from zero_ext.sharded_optimizer import ShardedOptimizer

_OWN = {
    torch.optim.AdamW: optim.AdamW,
    torch.optim.Adam: optim.Adam,
    torch.optim.SGD: optim.SGD,
}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable | None = None,
    training_data: Dataset | None = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable | None = None,
    config: dict[str, Any] | str | os.PathLike | None = None,
    config_params: dict[str, Any] | str | os.PathLike | None = None,
    dist_init_required: bool | None = None,
    mpu: None = None,
    **sharding: Any,
) -> tuple["TrainingEngine", ShardedOptimizer | None, DataLoader | None, Any]:
    """``deepspeed.initialize``: shard ``model`` as a DeepSpeed configuration says. Collective.

    Args:
        args: Its ``deepspeed_config`` is the configuration where ``config`` is None.
        model: On the device to train on, or on the CPU beside a GPU, to which it is then moved.
        optimizer: A torch optimizer over the model's parameters that has not stepped yet, whose
            groups and settings are taken over, or a function that makes one of parameters.
            Default: the configuration's.
        model_parameters: Parameters or groups for an optimizer to be made. Default: all.
        training_data: Gets a ``DataLoader`` of micro-batches, with a ``DistributedSampler``.
        lr_scheduler: Stepped after each step that was made, or a function that makes one of an
            optimizer. Default: the configuration's.
        config, config_params: A dict or the path of a JSON file, in DeepSpeed's terms (Note
            [Settings of DeepSpeed] in zero_ext/config.py).
        dist_init_required: False: make no process group. Default: make it where torchrun has
            started this process and there is none.
        sharding: Further arguments of ``zero_ext.shard``, such as ``units``.
    Returns:
        Engine, its optimizer, its loader and its schedule; None for what there is not.
    Raises:
        ValueError: a setting is not available here, or the optimizer cannot be taken over; the
            model is unchanged then. And what ``zero_ext.shard`` raises.
    """
    if model is None:
        raise ValueError("zero_ext: initialize() needs a model.")
    if mpu is not None:
        raise ValueError("zero_ext: there is no model parallelism here: leave mpu out.")
    for other in (config_params, getattr(args, "deepspeed_config", None)):
        config = other if config is None else config
    if config is None:
        raise ValueError("zero_ext: initialize() needs config=, or args with a deepspeed_config.")
    _join(dist_init_required)
    groups = resolve(None, sharding.get("mesh"), model.parameters())
    with all_or_none(groups, "initialize()"):
        settings = Config.read(config, groups.world)
        make = _optimizer_maker(settings, model, optimizer, model_parameters)
        make_schedule = _schedule_maker(settings, lr_scheduler)
    check_same_on_all_ranks(
        groups,
        repr(settings).split(", "),
        "the configurations",
        remedy="Give every rank the same configuration.",
    )
    engine = TrainingEngine(_sharded(model, settings, sharding), settings)
    if make is not None:
        engine.optimizer = make(engine.module)
        engine.lr_scheduler = make_schedule(engine.optimizer)
    engine._follows = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _join(required: bool | None) -> None:
    """Make the process group that torchrun has prepared."""
    if dist.is_initialized() or required is False or "WORLD_SIZE" not in os.environ:
        return
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group()


def _sharded(model: nn.Module, settings: Config, sharding: dict[str, Any]) -> nn.Module:
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    if torch.cuda.is_available() and on_cpu:
        model.to(torch.device("cuda", torch.cuda.current_device()))
    if settings.dtype is not None:
        model.to(settings.dtype)
    if settings.reduce_dtype is not None:
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=settings.reduce_dtype)
        sharding = {"mp_policy": policy, **sharding}
    return shard(model, stage=settings.stage, offload_policy=settings.offload_policy, **sharding)


# Optimizer and schedule


def _optimizer_maker(settings: Config, model: nn.Module, optimizer, parameters) -> Callable | None:
    """A function of the sharded module; checks before anything is sharded."""
    parameters = None if parameters is None else list(parameters)
    _check_its_parameters(model, parameters or [])
    common = {"max_grad_norm": settings.max_grad_norm}

    def scaler() -> dict[str, Any]:
        return {"loss_scaler": LossScaler(**settings.scaler)} if settings.scaler else {}

    if optimizer is None:
        if settings.optimizer is None:
            return None
        kind, arguments = _class_of(*settings.optimizer)
        return lambda module: _made(
            kind, parameters or module.parameters(), arguments, **common, **scaler()
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_taken_over(optimizer)
        _check_its_parameters(model, optimizer.param_groups)
        return lambda module: _taken_over(optimizer, **common, **scaler())
    if not callable(optimizer):
        raise ValueError(f"zero_ext: optimizer is a {type(optimizer).__name__}, not an optimizer.")

    def from_function(module: nn.Module) -> ShardedOptimizer:
        made = optimizer(parameters or list(module.parameters()))
        _check_taken_over(made)
        return _taken_over(made, **common, **scaler())

    return from_function


def _check_its_parameters(model: nn.Module, groups: Iterable) -> None:
    """``groups``: parameters, named ones or groups of either, as an optimizer takes them."""
    own = {id(p) for p in model.parameters()}
    for group in groups:
        for entry in group["params"] if isinstance(group, dict) else [group]:
            parameter = entry[1] if isinstance(entry, tuple) else entry
            if id(parameter) not in own:
                raise ValueError(
                    f"zero_ext: a parameter of shape {tuple(parameter.shape)} for the optimizer is "
                    "not one of the model's."
                )


def _class_of(name: str, arguments: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """Of a configuration's optimizer: the class in torch, and its arguments."""
    arguments = dict(arguments)
    if "max_grad_norm" in arguments:
        raise ValueError(
            "zero_ext: config 'optimizer.params.max_grad_norm': use 'gradient_clipping'."
        )
    kinds = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if _is_class(kind)}
    kind = kinds.get(name.lower())
    if kind is None:
        raise ValueError(
            f"zero_ext: config 'optimizer.type' is {name!r}: choose Adam, AdamW, SGD or another "
            "elementwise one of torch.optim, or pass optimizer=."
        )
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = arguments.pop("adam_w_mode", True) or kind is torch.optim.AdamW
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        if not arguments.pop("torch_adam", False):
            arguments.setdefault("weight_decay", 0.0)  # DeepSpeed's default, in AdamW too
        for absent in ("bias_correction", "fp32_optimizer_states"):
            if not arguments.pop(absent, True):
                raise ValueError(
                    f"zero_ext: config 'optimizer.params.{absent}' is false, which is not "
                    "available here. Remove it."
                )
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    kind([nn.Parameter(torch.zeros(1))], **arguments)  # raises what torch raises
    if kind not in _OWN:
        elementwise.check(kind, arguments)
    return kind, arguments


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def _made(kind: type, parameters, arguments: dict[str, Any], **ours: Any) -> ShardedOptimizer:
    if kind in _OWN:
        return _OWN[kind](parameters, **arguments, **ours)
    return optim.wrap(kind, parameters, **arguments, **ours)


def _check_taken_over(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    foreign = type(optimizer).__module__.startswith("deepspeed")
    if isinstance(optimizer, ShardedOptimizer) or foreign:
        raise ValueError(
            "zero_ext: initialize() makes its own optimizer of a torch one. Pass torch.optim's in "
            f"place of this {name}, or name it in the config."
        )
    if type(optimizer) not in _OWN:
        elementwise.check(type(optimizer), _arguments_of(optimizer))
    if optimizer.state:
        raise ValueError(
            f"zero_ext: the {name} has a state already. Give initialize() one that has not "
            "stepped, and load its state_dict() into what is returned."
        )


def _taken_over(optimizer: torch.optim.Optimizer, **ours: Any) -> ShardedOptimizer:
    """Over the same groups, the same dicts: a schedule that was made on the other one sets ours."""
    return _made(type(optimizer), optimizer.param_groups, _arguments_of(optimizer), **ours)


def _arguments_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    known = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in known}


def _schedule_maker(settings: Config, schedule) -> Callable[[torch.optim.Optimizer], Any]:
    if schedule is not None:
        made = hasattr(schedule, "step") and not isinstance(schedule, type)
        return (lambda optimizer: schedule) if made else schedule
    if settings.scheduler is None:
        return lambda optimizer: None
    name, arguments = settings.scheduler
    kind = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if kind is None:
        raise ValueError(
            f"zero_ext: config 'scheduler.type' is {name!r}: choose {', '.join(SCHEDULES)} or one "
            "of torch.optim.lr_scheduler, or pass lr_scheduler=."
        )
    return lambda optimizer: kind(optimizer, **arguments)
