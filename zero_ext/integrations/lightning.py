"""ShardedStrategy: a strategy of Lightning's ``Trainer`` for sharded models.

``fabric.py`` has that of Fabric, what both share, and which copy of the library they belong to.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from zero_ext import checkpoint as checkpoints
from zero_ext.engine.registry import handle_of
from zero_ext.integrations import fabric, is_sharded, optimizers_of
from zero_ext.module.forward_methods import ForwardMethod, register_forward_method
from zero_ext.module.sharding import shard
from zero_ext.optim.sharded import Sharded

DDPStrategy = importlib.import_module(f"{fabric.TRAINERS}.strategies").DDPStrategy
StrategyRegistry = importlib.import_module(f"{fabric.TRAINERS}.strategies").StrategyRegistry
TorchCheckpointIO = importlib.import_module(f"{fabric.TRAINERS}.plugins").TorchCheckpointIO
TrainerFn = importlib.import_module(f"{fabric.TRAINERS}.trainer.states").TrainerFn

fabric.reject_folders(f"{fabric.TRAINERS}.core.saving")  # of load_from_checkpoint()

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Optimizers that were adopted. A Trainer keeps those of its last fit.
_of_fits: WeakSet[Sharded] = WeakSet()


class ShardedStrategy(fabric.Sharding, DDPStrategy):
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

    _precision_argument = "precision_plugin"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # The state_dict that is saved, and the one loaded from a folder, before hooks change them.
        self._saved: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._folder: Path | None = None  # that is being loaded
        self._trusted = False  # whether it may be unpickled
        self._made_on_meta = False

    # Setting up

    def connect(self, model: Any) -> None:
        super().connect(model)
        self._made_on_meta = False  # in this run

    def tensor_init_context(
        self, empty_init: bool | None = None
    ) -> contextlib.AbstractContextManager:
        """With ``empty_init`` stage 3 makes modules on the meta device, and shards them there."""
        if self.makes_on_meta(empty_init):
            return fabric.making_on_meta(self.precision_plugin.tensor_init_context())
        return super().tensor_init_context(empty_init)

    def setup(self, trainer: Any) -> None:
        """Shard the module, if it is trained, does not fit one rank, or is sharded already.

        Raises:
            ValueError: the module was sharded before, with another stage; or there is a plugin for
                checkpoints, which all ranks write here.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._made_on_meta = on_meta = fabric.is_on_meta(self.model)
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
        _of_fits.update(fabric.adopt_all(self.optimizers, self._sharding, "setup_optimizers()"))
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
        return self._made_on_meta or fabric.is_on_meta(self.lightning_module)

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
            state = fabric.gathered(checkpoint["state_dict"], self.is_global_zero)
            super().save_checkpoint({**checkpoint, "state_dict": state}, filepath, storage_options)
        else:
            path = fabric.folder_of(self, filepath, storage_options)
            state = checkpoint["state_dict"]
            others = {key: value for key, value in checkpoint.items() if key != "state_dict"}
            if state.keys() != before.keys() or _changed(state, before):
                others["state_dict"] = fabric.gathered(state, self.is_global_zero)  # a hook's
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
            checkpoints.load_optimizers(
                self._folder,
                self.model,
                self._checkpointed_optimizers(),
                strict=self.lightning_module.strict_loading,
                allow_pickle=self._trusted,
            )
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _checkpointed_optimizers(self) -> list[torch.optim.Optimizer]:
        """Without the empty one that Lightning makes for a module that has none."""
        return optimizers_of(self.model, self.optimizers)


ShardedStrategy.register_strategies(StrategyRegistry)


def _changed(state: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if before.get(name) is not value}
