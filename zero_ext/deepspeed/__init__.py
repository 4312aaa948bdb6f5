"""The entry for scripts of DeepSpeed: ``import zero_ext.deepspeed as deepspeed``.

It has what training scripts call: ``initialize``, ``init_distributed``, ``add_config_arguments``,
``DeepSpeedEngine``, ``get_accelerator``, ``checkpointing``, ``comm``, ``ops``, ``runtime``,
``utils`` and ``zero``. Modules below it have DeepSpeed's names, see names.py.
"""

import argparse
import importlib
from typing import TYPE_CHECKING, Any

from zero_ext.deepspeed import names

if TYPE_CHECKING:
    from zero_ext.deepspeed.accelerator import get_accelerator as get_accelerator
    from zero_ext.deepspeed.environment import init_distributed as init_distributed
    from zero_ext.deepspeed.helpers import OnDevice as OnDevice
    from zero_ext.deepspeed.initialization import initialize as initialize
    from zero_ext.deepspeed.training_engine import TrainingEngine as DeepSpeedEngine  # noqa: F401

__version__ = "0.19.8"  # of the DeepSpeed whose calls these are
# Where each name is that is no module of this package.
_PLACES = {
    "DeepSpeedEngine": ("zero_ext.deepspeed.training_engine", "TrainingEngine"),
    "OnDevice": ("zero_ext.deepspeed.helpers", "OnDevice"),
    "get_accelerator": ("zero_ext.deepspeed.accelerator", "get_accelerator"),
    "init_distributed": ("zero_ext.deepspeed.environment", "init_distributed"),
    "initialize": ("zero_ext.deepspeed.initialization", "initialize"),
}
_MODULES = ("accelerator", "checkpointing", "comm", "ops", "runtime", "utils", "zero")

__all__ = [*_PLACES, *_MODULES, "add_config_arguments"]
names.register()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if names.way_without(name) is not None:
        raise names.missing("", name)
    if name not in _PLACES:
        raise AttributeError(
            f"zero_ext: zero_ext.deepspeed has no '{name}'. It has {', '.join(__all__)}."
        )
    module, attribute = _PLACES[name]
    globals()[name] = getattr(importlib.import_module(module), attribute)
    return globals()[name]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config``, which ``initialize(args)`` reads."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use")
    group.add_argument("--deepspeed_config", default=None, help="file of the configuration")
    return parser
