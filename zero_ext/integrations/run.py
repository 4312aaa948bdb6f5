"""``python -m zero_ext.integrations.run [--stage 3] SCRIPT args…`` shards an unedited script.

Where the script makes an ``accelerate.Accelerator``, a ``transformers.Trainer``, a ``DDPStrategy``
of Lightning or its Fabric, or torch's ``DistributedDataParallel``, it gets the one of this package.
So it does where another library makes one, or an object of a subclass. ``-m MODULE args…`` runs a
module. Launchers run this as a module:
``torchrun --nproc-per-node 2 -m zero_ext.integrations.run --stage 3 SCRIPT args…``.
"""

import argparse
import functools
import importlib
import importlib.abc
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.optim import Optimizer

from zero_ext._scripts import add_script, run_script
from zero_ext._torch import followed
from zero_ext._warnings import warn
from zero_ext.integrations import ddp
from zero_ext.integrations.one_rank_saves import end_script
from zero_ext.ranks import environment


class _Substitution(importlib.abc.MetaPathFinder):
    """A context in which this package's classes stand for those of other libraries.

    It imports none of those libraries: a script may set what they read when they are imported.
    """

    def __init__(self):
        accelerator, trainer = "accelerate.Accelerator", "transformers.ShardedTrainerMixin"
        of_trainer, of_fabric = "lightning.ShardedStrategy", "fabric.ShardedStrategy"
        self._awaited = {
            "accelerate": lambda package: self._replace(package.Accelerator, accelerator),
            "transformers.trainer": lambda module: self._replace(module.Trainer, trainer),
            "lightning.pytorch": functools.partial(self._replace_strategy, of_trainer),
            "pytorch_lightning": functools.partial(self._replace_strategy, of_trainer),
            "lightning.fabric": functools.partial(self._replace_strategy, of_fabric),
            "lightning_fabric": functools.partial(self._replace_strategy, of_fabric),
            "torch.nn.parallel.distributed": self._replace_ddp,
        }
        self._undo = ExitStack()
        self.made = 0  # objects of this package's classes

    def __enter__(self) -> "_Substitution":
        for name in self._awaited.keys() & sys.modules.keys():
            self._imported(name)
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None or issubclass(kind, SystemExit):
            end_script()
        sys.meta_path.remove(self)
        self._undo.close()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._awaited:
            return None
        others = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                self._imported(name)

            spec.loader.exec_module = execute_and_replace
        return spec

    def _imported(self, name: str) -> None:
        self._awaited.pop(name)(sys.modules[name])

    def _replace(self, stock: type, ours: str, subclasses: bool = True) -> None:
        """Whoever makes a ``stock`` gets an object of a class that is both. ``ours`` is imported
        then: in the import of ``stock`` its own library may still be incomplete."""

        @functools.wraps(stock.__init__)
        def make(cls: type, *_: Any, **__: Any) -> Any:
            if subclasses or cls is stock:
                cls = _both(cls, _find(ours))
                self.made += 1
            return object.__new__(cls)

        stock.__new__ = staticmethod(make)
        # Deleting it would leave a class that takes no arguments.
        plain = functools.wraps(stock.__init__)(lambda cls, *_, **__: object.__new__(cls))
        self._undo.callback(setattr, stock, "__new__", staticmethod(plain))

    def _replace_strategy(self, ours: str, package: ModuleType) -> None:
        _find(ours)  # gives Lightning the names of the strategy
        # Others derive from it, DeepSpeed's for one.
        self._replace(package.strategies.DDPStrategy, ours, subclasses=False)
        # Lightning starts the other ranks' processes by commands that name the script.
        launcher = importlib.import_module(
            f"{package.__name__}.strategies.launchers.subprocess_script"
        )
        for name in ("_basic_subprocess_cmd", "_hydra_subprocess_cmd"):
            command = _running_this(getattr(launcher, name))
            self._undo.enter_context(mock.patch.object(launcher, name, command))

    def _replace_ddp(self, module: ModuleType) -> None:
        self._replace(module.DistributedDataParallel, "ddp.ShardedDataParallel")
        construct = followed(Optimizer.__init__, ddp.remember)
        self._undo.enter_context(mock.patch.object(Optimizer, "__init__", construct))
        save = ddp.checked_save(torch.save)
        self._undo.enter_context(mock.patch.object(torch, "save", save))


def _find(ours: str) -> type:
    module, name = ours.split(".")
    return getattr(importlib.import_module(f"zero_ext.integrations.{module}"), name)


@functools.cache
def _both(cls: type, ours: type) -> type:
    if issubclass(cls, ours):
        return cls
    if issubclass(ours, cls):
        return ours
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (ours, cls), names)


def _running_this(make: Any) -> Any:
    """``make`` gives a command, or a tuple that begins with one."""

    @functools.wraps(make)
    def changed(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        command = made[0] if isinstance(made, tuple) else made
        runs_this = ["-m", "zero_ext.integrations.run"]  # the stage is in the environment
        if command[1:3] != runs_this:  # the Trainer's launcher has Fabric's functions
            command[1:1] = runs_this
        return made

    return changed


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """The global names of the script when it has ended.

    Raises:
        ValueError: ``ZERO_EXT_STAGE`` is no stage.
    """
    parser = argparse.ArgumentParser(
        prog="python -m zero_ext.integrations.run", description="Shards an unedited script."
    )
    parser.add_argument(
        "--stage", choices=("0", "1", "2", "3"), help="default: ZERO_EXT_STAGE, or 2"
    )
    add_script(parser)
    chosen = parser.parse_args(arguments)
    if chosen.stage is not None:
        os.environ["ZERO_EXT_STAGE"] = chosen.stage  # for the processes that the script starts, too
    environment.stage(None)
    with _Substitution() as substitution:
        values = run_script(chosen.script, chosen.arguments, chosen.is_module)
    if not substitution.made:
        warn(
            f"zero_ext: '{chosen.script}' has made no DistributedDataParallel, no Accelerator of "
            "accelerate, no Trainer of transformers and no DDPStrategy of Lightning, and nothing "
            "was sharded for it. Call zero_ext.shard() in the script."
        )
    return values


if __name__ == "__main__":
    run(sys.argv[1:])
