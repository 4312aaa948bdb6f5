"""The entry for scripts of DeepSpeed: ``import zero_ext.deepspeed as deepspeed``.

It has what training scripts call: ``initialize``, ``init_distributed``, ``add_config_arguments``,
``DeepSpeedEngine``, ``get_accelerator``, ``checkpointing``, ``comm``, ``ops``, ``runtime``,
``utils`` and ``zero``.
"""

import argparse
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_ext.deepspeed.accelerator import get_accelerator
    from zero_ext.deepspeed.environment import init_distributed
    from zero_ext.deepspeed.initialization import initialize
    from zero_ext.deepspeed.training_engine import TrainingEngine as DeepSpeedEngine

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "runtime",
    "utils",
    "zero",
]

# Where each name is, and under which name.
_PLACES = {
    "DeepSpeedEngine": ("zero_ext.deepspeed.training_engine", "TrainingEngine"),
    "accelerator": ("zero_ext.deepspeed.accelerator", None),
    "checkpointing": ("zero_ext.deepspeed.checkpointing", None),
    "comm": ("torch.distributed", None),
    "get_accelerator": ("zero_ext.deepspeed.accelerator", "get_accelerator"),
    "init_distributed": ("zero_ext.deepspeed.environment", "init_distributed"),
    "initialize": ("zero_ext.deepspeed.initialization", "initialize"),
    "ops": ("zero_ext.deepspeed.ops", None),
    "runtime": ("zero_ext.deepspeed.runtime", None),
    "utils": ("zero_ext.deepspeed.utils", None),
    "zero": ("zero_ext.deepspeed.zero", None),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(
            f"zero_ext: zero_ext.deepspeed has no '{name}'. It has {', '.join(__all__)}."
        )
    module, attribute = _PLACES[name]
    value = importlib.import_module(module)
    value = value if attribute is None else getattr(value, attribute)
    globals()[name] = value
    return value


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config``, which ``initialize(args)`` reads."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use")
    group.add_argument("--deepspeed_config", default=None, help="file of the configuration")
    return parser
