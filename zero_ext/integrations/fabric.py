"""ShardedStrategy: a strategy of Lightning's ``Fabric`` for sharded models.

``lightning`` has copies of ``lightning_fabric`` and of ``pytorch_lightning``. The strategies belong
to the copy that is imported already, otherwise to the first one that is installed.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_ext import checkpoint as checkpoints
from zero_ext.engine.registry import any_sharded
from zero_ext.integrations import is_sharded
from zero_ext.module.sharding import shard
from zero_ext.optim import adoption
from zero_ext.optim.sharded import Sharded
from zero_ext.ranks import environment
from zero_ext.ranks.agreement import all_or_none
from zero_ext.ranks.groups import resolve
from zero_ext.tensor.shard_tensor import ShardTensor

# Fabric's package and the Trainer's, of each copy.
_COPIES = {"lightning.fabric": "lightning.pytorch", "lightning_fabric": "pytorch_lightning"}
_imported = [f for f, t in _COPIES.items() if t in sys.modules]
_imported += [f for f in _COPIES if f in sys.modules]
_installed = [f for f in _COPIES if importlib.util.find_spec(f.partition(".")[0])]
_copy = [*_imported, *_installed, *_COPIES][0]
TRAINERS = _COPIES[_copy]
DDPStrategy = importlib.import_module(f"{_copy}.strategies").DDPStrategy
STRATEGY_REGISTRY = importlib.import_module(f"{_copy}.strategies").STRATEGY_REGISTRY

_OF_ANY_STRATEGY = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
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


def reject_folders(name: str) -> None:
    """Make ``pl_load`` of the module ``name`` raise for a folder: it does not ask the strategy that
    has saved."""
    module = importlib.import_module(name)
    load: Callable = module.pl_load

    @functools.wraps(load)
    def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike) and (Path(path) / ".metadata").is_file():
            raise ValueError(
                f"zero_ext: '{path}' is a folder of zero_ext.checkpoint, and Lightning reads a "
                "file here. Pass it as ckpt_path= to a Trainer or to fabric.load(), with "
                "strategy=ShardedStrategy(...), or take its weights from "
                "zero_ext.checkpoint.read_whole(path)."
            )
        return load(path, *args, **kwargs)

    module.pl_load = checked


reject_folders(f"{_copy}.plugins.io.torch_io")


class Sharding:
    """The arguments and names of both strategies. A base before Lightning's class."""

    _precision_argument: str  # the name of DDPStrategy's argument

    def __init__(
        self, stage: int | None = None, *, sharding: dict[str, Any] | None = None, **kwargs: Any
    ):
        stage = environment.stage(stage)
        unknown = kwargs.keys() - _OF_ANY_STRATEGY - _OF_DDP_IGNORED - {self._precision_argument}
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
        super().__init__(**{name: kwargs[name] for name in kwargs.keys() - _OF_DDP_IGNORED})
        self._sharding = {"stage": stage, **(sharding or {})}

    def makes_on_meta(self, empty_init: bool | None) -> bool:
        """Only stage 3 gives values to a module that was made on the meta device. In other stages
        the script does, as with DDP."""
        return bool(empty_init) and self._sharding["stage"] == 3

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Lightning's names of this strategy."""
        stages = {"zero_ext": None, **{f"zero_ext_stage_{n}": n for n in range(4)}}
        for name, stage in stages.items():
            description = f"ShardedStrategy with stage={stage}"
            strategy_registry.register(name, cls, description, override=True, stage=stage)


@contextlib.contextmanager
def making_on_meta(precision: contextlib.AbstractContextManager) -> Iterator[None]:
    """In the dtypes of ``precision``."""
    with torch.device("meta"), precision:
        yield


def is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def adopt_all(
    optimizers: Iterable[torch.optim.Optimizer], sharding: dict[str, Any], what: str
) -> list[Sharded]:
    """Adopt the plain optimizers that step sharded parameters, and return them. Collective."""
    given = [
        optimizer
        for optimizer in optimizers
        if any_sharded(adoption.parameters_of(optimizer.param_groups))
        and not isinstance(optimizer, Sharded)
    ]
    with all_or_none(resolve(None, sharding.get("mesh"), []), what):
        for optimizer in given:
            adoption.check(optimizer)
    return [adoption.adopt(optimizer) for optimizer in given]


def folder_of(strategy: Any, path: str | os.PathLike, storage_options: Any) -> Path:
    """The path of a checkpoint that all ranks write, without the file that was there. Collective.

    Raises:
        ValueError: it is something other than a path of a file system.
    """
    if storage_options is not None or "://" in str(path):
        raise ValueError(
            f"zero_ext: the checkpoint '{path}' is written by all ranks, into a folder of a file "
            "system that they share. Leave storage_options and protocols out."
        )
    folder = Path(strategy.broadcast(path))
    if strategy.is_global_zero and folder.is_file():
        folder.unlink()  # is replaced, as Lightning's would be
    strategy.barrier()
    return folder


def gathered(state: Mapping[str, Any], keeps: bool) -> dict[str, Any]:
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


class _Forward(nn.Module):
    """Calls a sharded module. Fabric sends methods that are marked as forward ones through it, as
    through DDP's wrapper."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _unwrapped(module: Any) -> Any:
    return module.module if isinstance(module, _Forward) else module


class _SyncControl:
    def no_backward_sync(
        self, module: nn.Module, enabled: bool
    ) -> contextlib.AbstractContextManager:
        return _unwrapped(module).no_sync() if enabled else contextlib.nullcontext()


class ShardedStrategy(Sharding, DDPStrategy):
    """``Fabric(strategy=ShardedStrategy(stage=3))`` shards the module where DDP would wrap it.

    When this module is imported, ``strategy="zero_ext_stage_3"`` is the same, and ``"zero_ext"``
    leaves the stage open. The Trainer's strategy is that of ``zero_ext.integrations.lightning``:
    Lightning's two kinds of strategies have methods of the same names with other arguments.

    ``fabric.setup`` and ``setup_optimizers`` take this library's optimizers, or torch's, which are
    adopted with their groups, hooks and schedules. ``fabric.save`` of a model with its optimizers
    writes a folder of ``zero_ext.checkpoint``. ``fabric.load`` reads it with any stage and any
    number of ranks. Without optimizers ``fabric.save`` writes Lightning's file, on rank 0.
    ``fabric.load`` also reads files that DDP has written.

    Args:
        stage: As for ``zero_ext.shard``. None: ``ZERO_EXT_STAGE`` of the environment, or 2.
        sharding: Further arguments of ``zero_ext.shard``, such as ``mp_policy`` or ``units``.
        kwargs: Arguments of ``DDPStrategy`` that are not for DDP itself, such as ``timeout``. Those
            of DDP that change no value, such as ``find_unused_parameters``, are ignored.
    Raises:
        TypeError: an argument is another one of DDP's own.
        ValueError: stage 3 with a ``start_method`` that pickles the module.
    """

    _precision_argument = "precision"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _SyncControl()

    # Setting up

    def module_init_context(
        self, empty_init: bool | None = None
    ) -> contextlib.AbstractContextManager:
        """With ``empty_init`` stage 3 makes modules on the meta device, and shards them there."""
        if self.makes_on_meta(empty_init):
            return making_on_meta(self.precision.module_init_context())
        return super().module_init_context(empty_init)

    def module_to_device(self, module: nn.Module) -> None:
        if not is_on_meta(module) and not is_sharded(module):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Collective. A module without parameters stays as it is."""
        if next(module.parameters(), None) is None:
            return module
        return _Forward(shard(module, **self._sharding))

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Collective."""
        adopt_all([optimizer], self._sharding, "setup_optimizers()")
        return optimizer

    # Saving and loading

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return super().get_module_state_dict(_unwrapped(module))

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        super().load_module_state_dict(_unwrapped(module), state_dict, strict)

    def save_checkpoint(
        self,
        path: str | os.PathLike,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Collective.

        Raises:
            ValueError: optimizers are saved beside several sharded modules or none, with a filter
                for one of them, or to something other than a path of a file system.
        """
        filters = filter or {}
        modules = {k: m for k, v in state.items() if is_sharded(m := _module_of(v))}
        if not any(isinstance(value, Sharded) for value in state.values()):
            whole = self._convert_stateful_objects_in_state(state, filters)
            for name in [name for name in modules if name in whole]:  # as on all ranks
                whole[name] = gathered(whole[name], self.is_global_zero)
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(whole, path, storage_options=storage_options)
            return
        module, optimizers, others = _parts(state, f"save() to '{path}'")
        if filters.keys() - others.keys():
            raise ValueError(
                f"zero_ext: save() to '{path}' got a filter for '{min(filters.keys() - others)}', "
                "whose values all ranks write. Save the model without optimizers, into a file."
            )
        extra = self._convert_stateful_objects_in_state(others, filters)
        folder = folder_of(self, path, storage_options)
        checkpoints.save(folder, module, optimizers, extra=extra)

    def load_checkpoint(
        self,
        path: str | os.PathLike,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Collective.

        Raises:
            KeyError: a folder lacks an entry of ``state``, and ``strict`` is true.
            ValueError: ``state`` has no sharded module for a folder; or the folder holds more than
                plain data. ``weights_only=False`` unpickles it, which can run any code that it
                names. Pass it only for files that you trust.
        """
        folder = Path(self.broadcast(path))
        if not folder.is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        wanted = {"model": state} if isinstance(state, nn.Module) else state or {}
        module, optimizers, others = _parts(wanted, f"load() of the folder '{path}'")
        trusted = weights_only is False
        left = checkpoints.load(folder, module, optimizers, strict=strict, allow_pickle=trusted)
        if strict and (missing := others.keys() - left.keys()):
            raise KeyError(
                f"zero_ext: the checkpoint '{path}' has no '{min(missing)}', but "
                f"{sorted(left)}. Leave it out of the state, or pass strict=False."
            )
        for name in [name for name in others if name in left]:
            if hasattr(others[name], "load_state_dict"):
                others[name].load_state_dict(left.pop(name))
            else:
                wanted[name] = left.pop(name)
        return left


ShardedStrategy.register_strategies(STRATEGY_REGISTRY)


def _module_of(value: Any) -> nn.Module | None:
    return _unwrapped(value) if isinstance(value, nn.Module) else None


def _parts(
    state: dict[str, Any], what: str
) -> tuple[nn.Module, list[torch.optim.Optimizer], dict[str, Any]]:
    """The sharded module, its optimizers in the order of ``state``, and the other entries.

    Raises:
        ValueError: there is no sharded module, or several.
    """
    modules = {k: m for k, v in state.items() if is_sharded(m := _module_of(v))}
    if len(modules) != 1:
        raise ValueError(
            f"zero_ext: {what} needs one sharded module, and got {sorted(modules) or 'none'}. Pass "
            "the model that fabric.setup() has returned, each with its optimizers and a path of "
            "its own."
        )
    optimizers = {k: v for k, v in state.items() if isinstance(v, Sharded)}
    others = {k: v for k, v in state.items() if k not in modules.keys() | optimizers.keys()}
    return next(iter(modules.values())), list(optimizers.values()), others
