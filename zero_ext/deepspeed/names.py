"""Where the names are that scripts import from modules of DeepSpeed.

``from zero_ext.deepspeed.runtime.zero.config import ZeroStageEnum`` works as it does there. The
import of what is not here raises an ``ImportError`` that says what to use.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_PACKAGE = "zero_ext.deepspeed"
_TORCH = "torch.distributed"
# Modules of DeepSpeed, and those in which their names are looked up: of this package, or torch's.
_ELSEWHERE = {
    "accelerator.real_accelerator": ("accelerator",),
    "comm": ("environment", _TORCH),
    "comm.comm": ("environment", _TORCH),
    "ops.adagrad": ("helpers",),
    "runtime.activation_checkpointing": ("",),
    "runtime.activation_checkpointing.checkpointing": ("checkpointing",),
    "runtime.compiler": ("helpers",),
    "runtime.dataloader": ("helpers",),
    "runtime.engine": ("",),
    "runtime.utils": ("helpers", "torch.nn.utils"),
    "runtime.zero": ("zero",),
    "runtime.zero.config": ("helpers",),
    "runtime.zero.offload_config": ("helpers",),
    "runtime.zero.partition_parameters": ("zero", "helpers"),
    "utils.init_on_device": ("helpers",),
    "utils.logging": ("utils",),
    "utils.nvtx": ("helpers",),
    "utils.tensor_fragment": ("utils",),
    "utils.z3_leaf_module": ("utils",),
    "utils.zero_to_fp32": ("helpers",),
}
_MEMORY = "Call zero_ext.estimate_memory, or run python -m zero_ext.plan."
_NO_OTHER_PARALLELISM = "There is data parallelism alone here."
# Missing modules and names, with the remedy for each.
_ABSENT = {
    "PipelineModule": _NO_OTHER_PARALLELISM,
    "autotuning": _MEMORY,
    "checkpoint": "Checkpoints of zero_ext load on any number of ranks: see zero_ext.checkpoint.",
    "compression": "Use torchao.",
    "elasticity": "Use zero_ext.elastic and zero_ext.data.GlobalBatches.",
    "env_report": "Run python -m zero_ext.info.",
    "inference": "Use the plain module, or an inference server.",
    "init_inference": "Use the plain module, or an inference server.",
    "launcher": "Start the script with torchrun.",
    "moe": _NO_OTHER_PARALLELISM,
    "monitor": "Write engine.get_global_grad_norm() and the loss to a logger of your own.",
    "ops.op_builder": "Nothing is compiled at run time.",
    "ops.transformer": "Use torch.nn.functional.scaled_dot_product_attention.",
    "pipe": _NO_OTHER_PARALLELISM,
    "profiling": "Use torch.utils.flop_counter.FlopCounterMode.",
    "runtime.config": "Pass the dictionary or the file to initialize(config=).",
    "runtime.fp16": "Use zero_ext.LossScaler, or fp16 in the configuration.",
    "runtime.pipe": _NO_OTHER_PARALLELISM,
    "runtime.zero.stage3": _MEMORY,
    "runtime.zero.tiling": "Use nn.Linear.",
    "runtime.zero.stage_1_and_2": _MEMORY,
    "sequence": _NO_OTHER_PARALLELISM,
    "tp_model_init": _NO_OTHER_PARALLELISM,
    "utils.groups": "Use torch.distributed.",
    "utils.timer": "Use torch.profiler.",
    "zero.TiledLinear": "Use nn.Linear.",
}
_NO_MODULES = ("PipelineModule", "init_inference", "tp_model_init", "zero.TiledLinear")
# Modules below those, as scripts name them.
_BELOW = (
    "launcher.runner", "moe.layer", "moe.utils", "monitor.monitor", "ops.transformer.inference",
    "pipe.module", "profiling.flops_profiler", "profiling.flops_profiler.profiler",
    "runtime.fp16.loss_scaler", "runtime.pipe.engine", "runtime.pipe.module",
    "runtime.pipe.topology", "sequence.layer",
)  # fmt: skip


def way_without(path: str) -> str | None:
    """The remedy for a missing module or name; None: it is not known."""
    while path and path not in _ABSENT:
        path = path.rpartition(".")[0]
    return _ABSENT.get(path)


def missing(path: str, name: str) -> ImportError:
    way = way_without(f"{path}.{name}".lstrip(".")) or "docs/migration.md lists what is here."
    return ImportError(f"zero_ext: '{name}' of deepspeed{path and '.'}{path} is not here. {way}")


class _Module(ModuleType):
    """Its names are those of others."""

    def __init__(self, path: str, others: tuple[str, ...]):
        super().__init__(f"{_PACKAGE}.{path}", f"``deepspeed.{path}``, as scripts import from it.")
        self._path, self._others = path, others

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for other in self._others:
            full = other if other.startswith("torch.") else f"{_PACKAGE}.{other}".rstrip(".")
            module = importlib.import_module(full)
            if name in vars(module) or name in getattr(module, "__all__", ()):
                return getattr(module, name)
        try:
            return child(self.__name__, name)
        except AttributeError:
            raise missing(self._path, name) from None


def child(package: str, name: str) -> ModuleType:
    """A module of a package that is here or is said to be absent.

    Raises:
        ImportError: it is said what to use in its place.
        AttributeError: nothing is known of it.
    """
    full = f"{package}.{name}"
    try:
        if not name.startswith("__"):
            return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:  # a module that this one needs
            raise
    if way_without(full.removeprefix(f"{_PACKAGE}.")) is not None:
        raise missing(package.removeprefix(_PACKAGE).lstrip("."), name)
    raise AttributeError(f"zero_ext: module '{package}' has no attribute '{name}'")


def register() -> None:
    """Python finds a module in ``sys.modules`` before it looks for a file."""
    absent = (path for path in (*_ABSENT, *_BELOW) if path not in _NO_MODULES)
    for path, others in (dict.fromkeys(absent, ()) | _ELSEWHERE).items():
        sys.modules[f"{_PACKAGE}.{path}"] = _Module(path, others)
