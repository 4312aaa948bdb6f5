"""Checkpoints that any stage and any number of ranks can load."""

from zero_ext.checkpoint.export import export_safetensors
from zero_ext.checkpoint.folders import latest
from zero_ext.checkpoint.loading import from_deepspeed, load, load_optimizers, read_whole
from zero_ext.checkpoint.saving import save

__all__ = [
    "export_safetensors",
    "from_deepspeed",
    "latest",
    "load",
    "load_optimizers",
    "read_whole",
    "save",
]
