"""Sharded optimizers."""

from typing import NoReturn

import torch

from zero_ext.optim.adoption import adopt, wrap
from zero_ext.optim.fused import SGD, Adam, AdamW
from zero_ext.optim.muon import Muon, muon_groups


def __getattr__(name: str) -> NoReturn:
    remedy = ""
    if name in torch.optim.__all__ or isinstance(getattr(torch.optim, name, None), type):
        remedy = f" Write zero_ext.optim.wrap(torch.optim.{name}, parameters, …)."
    raise AttributeError(f"module 'zero_ext.optim' has no attribute '{name}'.{remedy}")


__all__ = ["SGD", "Adam", "AdamW", "Muon", "adopt", "muon_groups", "wrap"]
