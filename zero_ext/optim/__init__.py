"""Sharded optimizers."""

from zero_ext.optim.fused import SGD, Adam, AdamW, wrap

__all__ = ["SGD", "Adam", "AdamW", "wrap"]
