"""Sharded optimizers."""

from zero_ext.optim.fused import SGD, Adam, AdamW
from zero_ext.optim.wrapped_optimizer import wrap

__all__ = ["SGD", "Adam", "AdamW", "wrap"]
