"""initialize: ``deepspeed.initialize``, for scripts and configurations that were written for it."""

import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from zero_ext.deepspeed import status
from zero_ext.deepspeed.casting import cast
from zero_ext.deepspeed.config import Config
from zero_ext.deepspeed.construction import fill, is_cut, prepare
from zero_ext.deepspeed.environment import init_distributed
from zero_ext.deepspeed.muon import Muon, muon_and_adam
from zero_ext.deepspeed.optimizers import as_torchs
from zero_ext.deepspeed.telling import tell
from zero_ext.deepspeed.training_engine import TrainingEngine, data_loader
from zero_ext.engine.registry import any_sharded
from zero_ext.module.sharding import shard
from zero_ext.optim import adoption
from zero_ext.optim.arguments import check_params
from zero_ext.optim.scaler import LossScaler
from zero_ext.optim.sharded import Sharded
from zero_ext.ranks.agreement import all_or_none, check_same_on_all_ranks
from zero_ext.ranks.groups import resolve

_log = logging.getLogger("zero_ext")


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
    distributed_port: int | None = None,
    strict_config: bool = False,
    **sharding: Any,
) -> tuple[TrainingEngine, Sharded | None, DataLoader | None, Any]:
    """``deepspeed.initialize``: shard ``model`` as a DeepSpeed configuration says. Collective.

    Args:
        args: Its ``deepspeed_config`` is the configuration where ``config`` is None.
        model: On the device to train on, or on the CPU beside a GPU, to which it is then moved.
        optimizer: A torch optimizer over the model's parameters that has not stepped yet, whose
            groups and settings are adopted, or a function that makes one of parameters.
            Default: the configuration's.
        model_parameters: Parameters or groups for an optimizer to be made. Default: all.
        training_data: Gets a ``DataLoader`` of micro-batches, with a ``DistributedSampler``.
        lr_scheduler: Stepped after each step that was made, or a function that makes one of an
            optimizer. Default: the configuration's.
        config, config_params: A dict, the path of a JSON or Hjson file, or its text in base64, in
            DeepSpeed's terms (docs/deepspeed_keys.md lists the keys).
        dist_init_required: False: make no process group. Default: make it where torchrun has
            started this process and there is none.
        distributed_port: Ignored: torchrun chooses it.
        strict_config: A top-level key that DeepSpeed does not know is an error. Default: a warning,
            because DeepSpeed ignores it.
        sharding: Further arguments of ``zero_ext.shard``, such as ``units``.
    Returns:
        The engine, its optimizer, its loader and its schedule. Each of the last three may be None.
    Raises:
        ValueError: settings are not available here (the message lists them all), or the optimizer
            cannot be adopted; the model is unchanged then. And what ``zero_ext.shard`` raises.
    """
    if dist_init_required is not False:
        init_distributed()
    parameters = model.parameters() if isinstance(model, nn.Module) else []
    groups = resolve(None, sharding.get("mesh"), parameters)
    for other in (config_params, getattr(args, "deepspeed_config", None)):
        config = other if config is None else config
    with all_or_none(groups, "initialize()"):
        _check_arguments(model, config, mpu, training_data, sharding)
        settings = Config.read(config, groups.world, strict_config)
        _check_said_once(settings, sharding)
        ours = arguments_of_ours(settings)
        given = _optimizer_given(settings, model, optimizer, model_parameters)
        schedule = _schedule_given(settings, lr_scheduler, given)
        loader = None
        if training_data is not None:
            loader = data_loader(settings, groups, training_data, collate_fn=collate_fn)
    check_same_on_all_ranks(
        groups,
        repr(settings).split(", "),
        "the configurations",
        remedy="Give every rank the same configuration.",
    )
    if settings.clips_by_default and groups.rank == 0:
        _log.warning(
            "the configuration has no 'gradient_clipping': DeepSpeed's default is 1.0. Set it, "
            "to 0 for no clipping."
        )
    names = adoption.names_of(model)
    engine = TrainingEngine(_sharded(model, settings, sharding), settings, collate_fn)
    if settings.stage == 3:
        status.note(engine.module)
    if settings.sums_gradients:
        engine.module.set_gradient_divide_factor(1.0)
    if given is not None:
        adoption.follow_models(given, names)
        engine.optimizer = tell(adoption.adopt(given, **ours))
        engine._divides()
        engine.lr_scheduler = schedule
    engine.training_dataloader = loader
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _check_arguments(model, config, mpu, data, sharding: dict[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"zero_ext: initialize() needs a model, not {type(model).__name__}.")
    if config is None:
        raise ValueError("zero_ext: initialize() needs config=, or args with a deepspeed_config.")
    if mpu is not None:
        raise ValueError("zero_ext: there is no model parallelism here: leave mpu out.")
    own = {"module", "stage", "offload_policy"}  # which the configuration gives
    unknown = sorted(sharding.keys() - (inspect.signature(shard).parameters.keys() - own))
    if unknown:
        raise ValueError(f"zero_ext: initialize() has no argument '{unknown[0]}'. Leave it out.")
    if any_sharded(model.parameters()):
        raise ValueError("zero_ext: the model is sharded already. Pass the plain one.")
    if data is not None and not hasattr(data, "__len__"):
        raise TypeError(
            f"zero_ext: training_data must be a dataset with a length, not a {type(data).__name__}."
        )


def _check_said_once(settings: Config, sharding: dict[str, Any]) -> None:
    for setting, value, argument, both_say in (
        ("communication_data_type", settings.reduce_dtype, "mp_policy", "how gradients travel"),
        ("mics_shard_size", settings.shards, "mesh", "which ranks are a replica"),
    ):
        if value is not None and argument in sharding:
            raise ValueError(
                f"zero_ext: '{setting}' and {argument}= both say {both_say}. Give one."
            )


def _sharded(model: nn.Module, settings: Config, sharding: dict[str, Any]) -> nn.Module:
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    if is_cut(model):
        prepare(model, by_unit=settings.stage == 3)
        sharding = {"param_init_fn": fill, **sharding}
    if torch.cuda.is_available() and on_cpu:
        device = torch.device("cuda", torch.cuda.current_device())
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    cast(model, settings)
    if settings.shards is not None and dist.is_initialized():
        shape = (dist.get_world_size() // settings.shards, settings.shards)
        kind = resolve(None, None, model.parameters()).device.type
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
        sharding = {**sharding, "mesh": mesh}
    return shard(model, stage=settings.stage, **{**settings.sharding, **sharding})


# Optimizer and schedule


def arguments_of_ours(settings: Config) -> dict[str, Any]:
    """Arguments of this package's optimizers that torch's do not have."""
    scaler = LossScaler(**settings.scaler) if settings.scaler else None
    measured = math.inf if settings.measures_norm else None  # clips by a factor of 1
    return {
        "max_grad_norm": settings.max_grad_norm or measured,
        "nonfinite": settings.nonfinite,
        "loss_scaler": scaler,
    }


def _optimizer_given(
    settings: Config, model: nn.Module, optimizer, parameters
) -> torch.optim.Optimizer | None:
    """A torch optimizer over the plain model: its errors are raised before anything changes."""
    parameters = list(model.parameters() if parameters is None else check_params(parameters))
    if optimizer is None:
        if settings.optimizer is None:
            return None
        if settings.optimizer.kind is Muon:
            parameters = muon_and_adam(model, parameters)
        try:
            given = settings.optimizer.kind(parameters, **settings.optimizer.arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f"zero_ext: config 'optimizer.params': {error}") from error
    elif isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        given = optimizer
    else:
        given = optimizer(parameters)
    given = as_torchs(given)
    adoption.check(given)
    own = {id(p) for p in model.parameters()}
    for parameter in adoption.parameters_of(given.param_groups):
        if id(parameter) not in own:
            raise ValueError(
                f"zero_ext: a parameter of shape {tuple(parameter.shape)} for the optimizer is not "
                "one of the model's."
            )
    return given


def _schedule_given(settings: Config, schedule, given: torch.optim.Optimizer | None) -> Any:
    if schedule is not None:
        if hasattr(schedule, "step") and not isinstance(schedule, type):
            return schedule
        if not callable(schedule):
            raise ValueError(f"zero_ext: lr_scheduler is {schedule!r}, not a schedule.")
        return None if given is None else schedule(given)
    if settings.scheduler is None or given is None:
        return None
    try:
        return settings.scheduler.kind(given, **settings.scheduler.arguments)
    except TypeError as error:
        raise ValueError(f"zero_ext: config 'scheduler.params': {error}") from error
