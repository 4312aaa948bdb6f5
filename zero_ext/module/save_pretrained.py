"""``save_pretrained()`` of a sharded model, or of a part of it, in stage 3."""

import torch
from torch import nn

from zero_ext.engine.carried import CarriedReplacement
from zero_ext.module.methods import ShardedMethods

_NAME = "save_pretrained"


class SavePretrained(CarriedReplacement):
    """The module's own method, with whole parameters (stage 3).

    Every rank may call it. One rank may call it alone where all ranks share a host: it reads the
    other ranks' parts.
    """

    def __init__(self, module: nn.Module, methods: ShardedMethods):
        super().__init__(module, _NAME)
        self._methods = methods

    def __call__(self, *args, **kwargs):
        save = self._method()
        if kwargs.get("state_dict") is not None:
            return save(*args, **kwargs)
        with self._methods.summon_full_params(writeback=False):
            return save(*args, **kwargs)


def attach(module: nn.Module, methods: ShardedMethods) -> None:
    """To ``module`` and each submodule that can save itself. Pipelines save their parts."""
    for each in module.modules():
        if callable(getattr(type(each), _NAME, None)) and not isinstance(
            each, torch.jit.ScriptModule
        ):
            each.__dict__[_NAME] = SavePretrained(each, methods)
