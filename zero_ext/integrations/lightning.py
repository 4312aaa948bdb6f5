"""ShardedStrategy: a strategy of Lightning's ``Trainer`` for sharded models.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of one library. The strategy belongs
to the copy that is imported already, otherwise to the first one that is installed.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zero_ext import checkpoint as checkpoints
from zero_ext.engine.registry import any_sharded, handle_of
from zero_ext.integrations import is_sharded, optimizers_of
from zero_ext.module.forward_methods import ForwardMethod, register_forward_method
from zero_ext.module.sharding import shard
from zero_ext.optim import adoption
from zero_ext.optim.sharded import Sharded
from zero_ext.ranks import environment
from zero_ext.ranks.agreement import all_or_none
from zero_ext.ranks.groups import resolve
from zero_ext.tensor.shard_tensor import ShardTensor

_COPIES = ("lightning.pytorch", "pytorch_lightning")
_copy = next((name for name in _COPIES if name in sys.modules), None) or next(
    (name for name in _COPIES if importlib.util.find_spec(name.partition(".")[0])), _COPIES[0]
)
DDPStrategy = importlib.import_module(f"{_copy}.strategies").DDPStrategy
StrategyRegistry = importlib.import_module(f"{_copy}.strategies").StrategyRegistry
TorchCheckpointIO = importlib.import_module(f"{_copy}.plugins").TorchCheckpointIO
TrainerFn = importlib.import_module(f"{_copy}.trainer.states").TrainerFn


def _rejects_folders(load: Callable) -> Callable:
    @functools.wraps(load)
    def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike) and (Path(path) / ".metadata").is_file():
            raise ValueError(
                f"zero_ext: '{path}' is a folder of zero_ext.checkpoint, and Lightning reads a "
                "file here. Pass it as ckpt_path= to a Trainer with strategy=ShardedStrategy(...), "
                "or take its weights from zero_ext.checkpoint.read_whole(path)."
            )
        return load(path, *args, **kwargs)

    return checked


# Of load_from_checkpoint(), and of the other strategies. Neither asks the strategy that has saved.
_fabric = "lightning_fabric" if _copy == "pytorch_lightning" else "lightning.fabric"
for _name in (f"{_copy}.core.saving", f"{_fabric}.plugins.io.torch_io"):
    _module = importlib.import_module(_name)
    _module.pl_load = _rejects_folders(_module.pl_load)

_OF_ANY_STRATEGY = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
}
# They change no value, and tune what is not there.
_OF_DDP_IGNORED = {
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
}
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Optimizers that were adopted. A Trainer keeps those of its last fit.
_of_fits: WeakSet[Sharded] = WeakSet()


class ShardedStrategy(DDPStrategy):
    """``Trainer(strategy=ShardedStrategy(stage=3))`` shards the module where DDP would wrap it.

    When this module is imported, ``strategy="zero_ext_stage_3"`` is the same, and ``"zero_ext"``
    leaves the stage open.

    ``configure_optimizers()`` returns this library's optimizers, or torch's, which are adopted with
    their groups, hooks and schedules. A checkpoint of the training is a folder of
    ``zero_ext.checkpoint``, from which a run with any stage and number of ranks continues. A
    checkpoint of the weights alone (``save_weights_only=True``) is Lightning's file. Files that DDP
    has written can be read as well.

    Args:
        stage: As for ``zero_ext.shard``. None: ``ZERO_EXT_STAGE`` of the environment, or 2. Stages
            below 3 shard nothing where nothing is fitted.
        sharding: Further arguments of ``zero_ext.shard``, such as ``mp_policy`` or ``units``.
        kwargs: Arguments of ``DDPStrategy`` that are not for DDP itself, such as ``timeout``. Those
            of DDP that change no value, such as ``find_unused_parameters``, are ignored.
    Raises:
        TypeError: an argument is another one of DDP's own.
        ValueError: stage 3 with a ``start_method`` that pickles the module.
    """

    def __init__(
        self, stage: int | None = None, *, sharding: dict[str, Any] | None = None, **kwargs: Any
    ):
        stage = environment.stage(stage)
        kwargs = {name: kwargs[name] for name in kwargs.keys() - _OF_DDP_IGNORED}
        unknown = kwargs.keys() - _OF_ANY_STRATEGY
        if unknown:
            raise TypeError(
                f"zero_ext: ShardedStrategy has no argument '{min(unknown)}'. Leave out what is "
                "DDP's own; what zero_ext.shard() takes goes into sharding={…}."
            )
        if stage == 3 and kwargs.get("start_method", "popen") != "popen":
            raise ValueError(
                f"zero_ext: with start_method='{kwargs['start_method']}' the module's weights are "
                "pickled by rank 0, which has a part of them with stage 3. Use torchrun or "
                "start_method='popen'."
            )
        super().__init__(**kwargs)
        self._sharding = {"stage": stage, **(sharding or {})}
        # The state_dict that is saved, and the one loaded from a folder, before hooks change them.
        self._saved: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._folder: Path | None = None  # that is being loaded
        self._trusted = False  # whether it may be unpickled
        self._made_on_meta = False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Lightning's names of this strategy."""
        for name, stage in {
            "zero_ext": None,
            **{f"zero_ext_stage_{n}": n for n in range(4)},
        }.items():
            description = f"ShardedStrategy with stage={stage}"
            strategy_registry.register(name, cls, description, override=True, stage=stage)

    # Setting up

    def connect(self, model: Any) -> None:
        super().connect(model)
        self._made_on_meta = False  # in this run

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init`` modules are made on the meta device, and sharded there."""
        with contextlib.ExitStack() as stack:
            if empty_init:
                stack.enter_context(torch.device("meta"))
                stack.enter_context(self.precision_plugin.tensor_init_context())
            else:
                stack.enter_context(super().tensor_init_context(empty_init))
            yield

    def setup(self, trainer: Any) -> None:
        """Shard the module, if it is trained, does not fit one rank, or is sharded already.

        Raises:
            ValueError: the module was sharded before, with another stage; or there is a plugin for
                checkpoints, which all ranks write here.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._made_on_meta = on_meta = _is_on_meta(self.model)
        if not (fitting or on_meta or self._sharding["stage"] == 3 or is_sharded(self.model)):
            super().setup(trainer)
            return
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ValueError(
                f"zero_ext: a {type(self.checkpoint_io).__name__} would not see the training's "
                "checkpoints, which all ranks write into a folder. Leave the plugin out."
            )
        self.accelerator.setup(trainer)
        if is_sharded(self.model):
            self._check_stage()
        else:
            if fitting and self._layer_sync is not None:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
            if not on_meta:
                self.model_to_device()
            shard(self.model, **self._sharding)
            for name in _STEPS if is_sharded(self.model) else ():
                register_forward_method(self.model, name)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _check_stage(self) -> None:
        before = handle_of(self.model).engine.stage
        if before != self._sharding["stage"]:
            raise ValueError(
                f"zero_ext: the {type(self.model).__name__} is sharded with stage {before} "
                f"already, and cannot be with stage {self._sharding['stage']}. Pass "
                f"stage={before}, or another module."
            )

    def setup_optimizers(self, trainer: Any) -> None:
        self._reset_optimizers_and_schedulers()
        before = optimizers_of(self.model, _of_fits)
        for optimizer in before:
            groups = [*optimizer.param_groups]
            optimizer.retire()
            optimizer.param_groups.extend(groups)  # it may be returned once more
            _of_fits.discard(optimizer)
        super().setup_optimizers(trainer)
        for optimizer in {*before} - {*self.optimizers}:
            optimizer.param_groups.clear()
        given = [
            optimizer
            for optimizer in self.optimizers
            if any_sharded(adoption.parameters_of(optimizer.param_groups))
            and not isinstance(optimizer, Sharded)
        ]
        with all_or_none(resolve(None, self._sharding.get("mesh"), []), "setup_optimizers()"):
            for optimizer in given:
                adoption.check(optimizer)
        for optimizer in given:
            _of_fits.add(adoption.adopt(optimizer))
        self.optimizers = list(self.optimizers)  # Lightning wraps them anew

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """With manual optimization this runs inside ``training_step``, whose parameters are
        gathered. They are released for the step."""
        running = self.model.__dict__.get("training_step")
        if not isinstance(running, ForwardMethod) or not running.is_running:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def inside() -> Any:
            with running.inside():
                return closure()

        with running.outside():
            return super().optimizer_step(optimizer, inside, model, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.model.no_sync() if is_sharded(self.model) else contextlib.nullcontext():
            yield

    def teardown(self) -> None:
        """A sharded model stays where it is: another fit may go on with it."""
        if not is_sharded(self.model):
            super().teardown()
            return
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Saving and loading

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True where the model has no memory before the setup. Otherwise callbacks get their states
        first, as with DDP."""
        return self._made_on_meta or _is_on_meta(self.lightning_module)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._saved = super().lightning_module_state_dict()
        return dict(self._saved)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty for a sharded optimizer: ``save_checkpoint`` writes its state in parts."""
        return {} if isinstance(optimizer, Sharded) else super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike, storage_options: Any = None
    ) -> None:
        """Collective.

        Raises:
            ValueError: a training is saved to something other than a path of a file system.
        """
        before, self._saved = self._saved, {}
        if not is_sharded(self.model):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif "optimizer_states" not in checkpoint:
            state = _gathered(checkpoint["state_dict"], self.is_global_zero)
            super().save_checkpoint({**checkpoint, "state_dict": state}, filepath, storage_options)
        else:
            if storage_options is not None or "://" in str(filepath):
                raise ValueError(
                    f"zero_ext: the checkpoint '{filepath}' is written by all ranks, into a folder "
                    "of a file system that they share. Leave storage_options and protocols out."
                )
            path = Path(self.broadcast(filepath))
            if self.is_global_zero and path.is_file():
                path.unlink()  # is replaced, as Lightning's would be
            self.barrier()
            state = checkpoint["state_dict"]
            others = {key: value for key, value in checkpoint.items() if key != "state_dict"}
            if state.keys() != before.keys() or _changed(state, before):
                others["state_dict"] = _gathered(state, self.is_global_zero)  # a hook's
            optimizers = self._checkpointed_optimizers()
            checkpoints.save(path, self.model, optimizers, extra=others)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Collective. The module gets what hooks change in the checkpoint's ``state_dict``.

        Raises:
            ValueError: a folder holds more than plain data. ``weights_only=False`` unpickles it,
                which can run any code that the file names. Pass it only for files that you trust.
        """
        path = Path(self.broadcast(checkpoint_path))
        self._folder = path if path.is_dir() else None
        self._trusted = weights_only is False
        if self._folder is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        if is_sharded(self.lightning_module):  # whose ranks may not have memory for all of it
            strict = self.lightning_module.strict_loading
            others = checkpoints.load(
                path, self.lightning_module, strict=strict, allow_pickle=self._trusted
            )
            state = self.lightning_module.state_dict()
            self._loaded = {} if "state_dict" in others else state
        else:
            state, others = checkpoints.read_whole(path, allow_pickle=self._trusted)
        return {"state_dict": dict(state), **others}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._folder is None or not is_sharded(self.lightning_module):
            super().load_model_state_dict(checkpoint, strict)
        else:
            changes = _changed(checkpoint["state_dict"], self._loaded)
            self._loaded = {}
            if changes:
                self.lightning_module.load_state_dict(changes, strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._folder is not None:
            optimizers = self._checkpointed_optimizers()
            strict = self.lightning_module.strict_loading
            checkpoints.load_optimizers(
                self._folder,
                self.model,
                optimizers,
                strict=strict,
                allow_pickle=self._trusted,
            )
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _checkpointed_optimizers(self) -> list[torch.optim.Optimizer]:
        """Without the empty one that Lightning makes for a module that has none."""
        return optimizers_of(self.model, self.optimizers)


ShardedStrategy.register_strategies(StrategyRegistry)


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _changed(state: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if before.get(name) is not value}


def _gathered(state: dict[str, Any], keeps: bool) -> dict[str, Any]:
    """The values of ``state``, whole and on the host if this rank ``keeps`` them. Collective.

    ``state`` may have been edited. One tensor under several names stays one tensor.
    """
    copies: dict[int, Any] = {}
    for value in state.values():
        if not isinstance(value, Tensor):
            copies[id(value)] = value
        elif id(value) not in copies:
            whole = value.full_tensor() if isinstance(value, ShardTensor) else value
            copies[id(value)] = whole.detach().cpu() if keeps else None
    return {name: copies[id(value)] for name, value in state.items()}
