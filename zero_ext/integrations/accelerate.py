"""``accelerate.Accelerator``, whose prepared models and optimizers are sharded."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn

from zero_ext import checkpoint
from zero_ext._torch import followed
from zero_ext.deepspeed.casting import cast
from zero_ext.deepspeed.config import Config
from zero_ext.deepspeed.initialization import arguments_of_ours
from zero_ext.engine.checks import stays_whole
from zero_ext.engine.registry import any_sharded, find, find_all
from zero_ext.integrations import deepspeed_file, is_sharded, optimizers_of, stock_files
from zero_ext.module.forward_methods import register_forward_method
from zero_ext.module.sharding import shard
from zero_ext.optim import adoption
from zero_ext.optim.sharded import Sharded
from zero_ext.ranks import environment
from zero_ext.ranks.agreement import all_or_none
from zero_ext.ranks.groups import Groups, resolve
from zero_ext.state.model_state import gather_state_dict

_DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


# A model and its optimizers: the contents of one checkpoint.
_Sharded = tuple[nn.Module, list[Sharded]]


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` that shards models where the other wraps them with DDP.

    ``prepare()`` shards every model that has something to train, in place. It adopts the model's
    torch optimizer with its settings, groups, hooks and schedules. With ``mixed_precision``
    parameters stay fp32 and are cast by autocast, as in accelerate. A ``mp_policy`` in ``sharding``
    casts them once per gather instead. ``save_state()`` and ``load_state()`` write and read
    ``zero_ext.checkpoint``, from which a run with any stage and number of ranks continues. Their
    hooks see every model, and run first. In the place of a sharded model's weights they see an
    object that cannot be read.

    A ``deepspeed_plugin`` is read without DeepSpeed: its stage, offload, accumulation, clipping and
    bf16 hold. Its optimizer and schedule are rejected.

    Args:
        args, kwargs: Those of ``accelerate.Accelerator``.
        stage: As for ``zero_ext.shard``. None: ``ZERO_EXT_STAGE`` of the environment, or 2.
        sharding: Further arguments of ``zero_ext.shard``, such as ``mp_policy`` or ``units``.
    Raises:
        ValueError: accelerate is configured for FSDP, fp8, another parallelism, or a ``comm_hook``
            of DDP; ``ZERO_EXT_STAGE`` is no stage; a DeepSpeed setting is not available here.
    """

    def __init__(
        self,
        *args: Any,
        stage: int | None = None,
        sharding: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        plugin = deepspeed_file.take_plugin(kwargs)
        if plugin is None:
            stage = environment.stage(stage)
        elif stage is not None:
            raise ValueError(
                "zero_ext: 'zero_optimization.stage' of the DeepSpeedPlugin and stage= both say "
                "what is sharded. Leave stage out."
            )
        mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        mixed = kwargs.get("mixed_precision") or mixed
        if plugin is not None:
            kwargs["mixed_precision"] = "no"  # parameters are cast, and there is no autocast
        with deepspeed_file.set_aside():
            super().__init__(*args, **kwargs)
        self._settings: Config | None = None
        if plugin is not None:
            self._settings = deepspeed_file.from_plugin(plugin, self, mixed)
            self.gradient_accumulation_steps = self._settings.accumulation_steps
            stage = self._settings.stage
            sharding = self._settings.sharding | (sharding or {})
        self._refuse_other_ways()
        self._sharding = {"stage": stage, **(sharding or {})}
        # While save_state() or load_state() runs.
        self._set_apart: list[_Sharded] | None = None

    def _refuse_other_ways(self) -> None:
        """Raise for a setting that would change values and has no effect here."""
        hook = getattr(self.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
        for way, is_asked in (
            (self.distributed_type.value, self.distributed_type not in _DATA_PARALLEL),
            ("a parallelism_config", self.parallelism_config is not None),
            ("fp8", self.mixed_precision == "fp8"),
            # accelerate itself ignores these two plugins on the CPU.
            ("FSDP", deepspeed_file.is_plugin_asked("FSDP")),
            ("MEGATRON_LM", deepspeed_file.is_plugin_asked("MEGATRON_LM")),
            (f"the comm_hook {hook} of DDP", hook != DDPCommunicationHookType.NO),
        ):
            if is_asked:
                raise ValueError(
                    f"zero_ext: accelerate is configured for {way}, which does not go with "
                    "sharding here. Leave it out of accelerate's configuration."
                )

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate's. Prepare a model with its optimizer, in one call or before it. Collective
        if there are models or optimizers among the arguments.

        Raises:
            ValueError, TypeError: an optimizer cannot be adopted, and nothing has changed. Also the
                errors of ``zero_ext.shard``.
        """
        models = [each for each in args if isinstance(each, nn.Module)]
        given = [each for each in args if _is_of_torch(each)]
        names = adoption.names_of(*models)
        if models or given:
            with all_or_none(self._all_ranks(), "prepare()"):
                for optimizer in given:
                    _check(optimizer, names)
        if device_placement is None or len(device_placement) == len(args):
            placement = device_placement or [None] * len(args)
            args = tuple(
                self.prepare_model(each, placed) if isinstance(each, nn.Module) else each
                for each, placed in zip(args, placement, strict=True)
            )
            for optimizer in given:
                adoption.follow_models(optimizer, names)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        trained = any(parameter.requires_grad for parameter in model.parameters())
        prepared = getattr(model, "_is_accelerate_prepared", False) and is_sharded(model)
        if prepared or evaluation_mode or not trained:  # there is nothing to reduce
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        # The model may have been prepared for an evaluation.
        model._is_accelerate_prepared = False
        self._models = [each for each in self._models if each is not model]
        entries = find_all(model.parameters())
        by_shard = any(each and each.handle.sharded_methods is not None for each in entries)
        if None in entries and not by_shard:  # raises where an optimizer has sharded a part
            placed = self.device_placement if device_placement is None else device_placement
            if placed and not any(p.is_meta for p in model.parameters()):
                model.to(self.device)
            if self._settings is not None:
                cast(model, self._settings)
            shard(model, **self._sharding)
            if callable(getattr(model, "generate", None)):  # it calls parts of the model
                register_forward_method(model, "generate")
        # accelerate's autocast and compiler, without its DDP.
        model = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        model._is_accelerate_prepared = True
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        of_torch = _is_of_torch(optimizer)
        if of_torch and any_sharded(adoption.parameters_of(optimizer.param_groups)):
            _check(optimizer, {})
            ours = {} if self._settings is None else arguments_of_ours(self._settings)
            adoption.adopt(optimizer, **ours)
        if isinstance(optimizer, Sharded):
            device_placement = False  # its state is where the parameters are
        return super().prepare_optimizer(optimizer, device_placement)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As accelerate's. With a ``DeepSpeedPlugin`` it measures only: the step clips to
        ``gradient_clipping``."""
        if self._settings is not None:
            max_norm = math.inf
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    # State

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state of a sharded model on rank 0, on the host; an empty dict on the others.
        Collective."""
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)
        return gather_state_dict(model) if self._set_apart is None else _WrittenApart()

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """As accelerate's, with a checkpoint of ``zero_ext.checkpoint`` in the folder for each
        sharded model. Collective.

        Raises:
            ValueError, RuntimeError: as ``zero_ext.checkpoint.save``.
        """
        with self._sharded_set_apart(self.register_save_state_pre_hook, self._save_sharded):
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As accelerate's. Sharded models and their optimizers are loaded from what ``save_state``
        has written with any stage and number of ranks, or accelerate's own. Collective.

        Nothing of a sharded model or its optimizer is unpickled unasked. To allow classes in it,
        pass them to ``torch.serialization.add_safe_globals``. accelerate itself unpickles objects
        that were given to ``register_for_checkpointing``: load them only from files that you trust.

        Raises:
            ValueError, RuntimeError: as ``zero_ext.checkpoint.load``.
        """
        strict = kwargs.get("strict", True)
        load = functools.partial(self._load_sharded, self._optimizers, strict)
        with self._sharded_set_apart(self.register_load_state_pre_hook, load):
            super().load_state(*args, **kwargs)

    @contextlib.contextmanager
    def _sharded_set_apart(self, register: Callable, hook: Callable) -> Iterator[None]:
        """Hide sharded optimizers from accelerate, which would write rank 0's part of their state
        as if it were all of it. ``hook`` runs after the user's hooks."""
        every = self._optimizers
        sharded = [each.optimizer for each in every if isinstance(each.optimizer, Sharded)]
        models = filter(is_sharded, self._models)
        self._set_apart = [(model, optimizers_of(model, sharded)) for model in models]
        self._optimizers = [o for o in every if not isinstance(o.optimizer, Sharded)]
        hooks_of_user = contextlib.ExitStack()

        def after_those_of_user(*args: Any) -> None:
            hooks_of_user.close()
            hook(*args)

        own = register(after_those_of_user)
        try:
            with hooks_of_user:
                if self._set_apart:
                    what = "a hook of save_state() or load_state()"
                    hooks_of_user.enter_context(all_or_none(self._all_ranks(), what))
                yield
        finally:
            own.remove()
            self._optimizers, self._set_apart = every, None

    def _all_ranks(self) -> Groups:
        return resolve(None, self._sharding.get("mesh"), [])

    def _save_sharded(self, models: list, weights: list, folder: str | os.PathLike) -> None:
        weights[:] = [each for each in weights if not isinstance(each, _WrittenApart)]
        for number, pair in enumerate(self._set_apart):
            checkpoint.save(_path(folder, number), *pair)

    def _load_sharded(
        self,
        optimizers: list[AcceleratedOptimizer],
        strict: bool,
        models: list[nn.Module],
        folder: str | os.PathLike,
    ) -> None:
        if not self._set_apart:
            return
        groups = self._all_ranks()
        with all_or_none(groups, f"load_state('{folder}')") as found:
            stock = stock_files.is_of_accelerate(folder)
            if groups.rank == 0:  # one choice, as other collectives follow
                found["stock"] = stock
        if found["stock"]:
            self._load_stock(optimizers, strict, models, folder, groups)
            return
        models[:] = [model for model in models if not is_sharded(model)]
        for number, pair in enumerate(self._set_apart):
            checkpoint.load(_path(folder, number), *pair, strict=strict)

    def _load_stock(
        self,
        optimizers: list[AcceleratedOptimizer],
        strict: bool,
        models: list[nn.Module],
        folder: str | os.PathLike,
        groups: Groups,
    ) -> None:
        """Load all models and optimizers: there plain and sharded ones are counted together."""
        for number, model in enumerate(models):
            model = getattr(model, "_orig_mod", model)  # of torch.compile
            with all_or_none(groups, f"load_state('{folder}')"):
                state = stock_files.read_weights(folder, number, model)
            model.load_state_dict(state, strict=strict)
        for number, optimizer in enumerate(optimizers):
            with all_or_none(groups, f"load_state('{folder}')"):
                state = stock_files.read_optimizer(folder, number)
            optimizer.load_state_dict(state)
        models.clear()
        self._optimizers.clear()  # those that accelerate would load

    # DDP only

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: list, even_batches: bool | None = None
    ) -> Iterator[None]:
        """As accelerate's.

        Raises:
            ValueError: one of ``joinables`` is a sharded model.
        """
        if any(isinstance(each, nn.Module) and is_sharded(each) for each in joinables):
            raise ValueError(
                "zero_ext: join_uneven_inputs() is for DDP. The ranks of a sharded model may run "
                "different numbers of backwards without it: leave it out, and call "
                "optimizer.step() equally often on every rank."
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield


def _is_of_torch(value: Any) -> bool:
    """An optimizer that neither accelerate nor this library has prepared."""
    prepared = (AcceleratedOptimizer, Sharded)
    return isinstance(value, torch.optim.Optimizer) and not isinstance(value, prepared)


def _check(optimizer: torch.optim.Optimizer, coming: dict[int, Any]) -> None:
    """Raise if ``optimizer`` cannot be adopted, unless it is accelerate's to keep: then none of its
    parameters is sharded. ``coming``: by id, the parameters that are about to be sharded."""
    every, name = adoption.parameters_of(optimizer.param_groups), type(optimizer).__name__
    parameters = [p for p in every if id(p) in coming or find(p) is not None]
    if not parameters:
        return
    owners = {
        id(entry.handle if (entry := find(p)) else coming[id(p)][0])
        for p in parameters
        if not stays_whole(p)
    }
    if len(owners) > 1:
        raise ValueError(
            f"zero_ext: the {name} steps several models. Give each an optimizer of its own, or "
            "prepare one module that holds them: nn.ModuleList([one, another])."
        )
    adoption.check(optimizer)


class _WrittenApart(dict):
    """Stands for a sharded model's weights in the list that save hooks may shorten."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "zero_ext: a save hook reads the weights of a sharded model, which the checkpoint "
            "'zero_ext_0' in its folder holds. Call accelerator.get_state_dict(model) on every "
            "rank before save_state()."
        )

    __getitem__ = __iter__ = get = keys = values = items = __reduce_ex__ = _refuse


def _reject_sharded(local_sgd: LocalSGD) -> None:
    """accelerate asks no accelerator whether its models may train apart."""
    if local_sgd.enabled and is_sharded(local_sgd.model):
        raise ValueError(
            f"zero_ext: LocalSGD lets ranks train apart, and the {type(local_sgd.model).__name__} "
            "is sharded: every step averages over the ranks. Pass enabled=False, or prepare the "
            "model with accelerate's own Accelerator."
        )


LocalSGD.__init__ = followed(LocalSGD.__init__, _reject_sharded)


def _path(folder: str | os.PathLike, number: int) -> Path:
    return Path(folder) / f"zero_ext_{number}"
