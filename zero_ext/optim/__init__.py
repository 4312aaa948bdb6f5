"""Sharded optimizers."""

from zero_ext.optim.fused import SGD, Adam, AdamW
from zero_ext.optim.muon import Muon
from zero_ext.optim.muon_groups import muon_groups
from zero_ext.optim.wrapped_optimizer import wrap

__all__ = ["SGD", "Adam", "AdamW", "Muon", "muon_groups", "wrap"]
