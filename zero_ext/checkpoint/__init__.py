"""Checkpoints that any stage and any number of ranks can load."""

from zero_ext.checkpoint.checkpoint import load, load_optimizers, read_whole, save
from zero_ext.checkpoint.export import export_safetensors

__all__ = ["export_safetensors", "load", "load_optimizers", "read_whole", "save"]
