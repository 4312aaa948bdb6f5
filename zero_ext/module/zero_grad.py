"""``module.zero_grad`` of a sharded module."""

import weakref
from typing import Any

import torch
from torch import nn

from zero_ext import _C
from zero_ext.engine.carried import Carried
from zero_ext.engine.handle import Handle
from zero_ext.module.places import is_sharded_by


class ZeroGrad(Carried):
    """Discards the gradients of a sharded module: what ``.grad`` shows, and local sums.

    Parameters of the module that are not sharded lose their gradients as well. A copy does what
    the module's own ``zero_grad`` does.
    """

    def __init__(self, handle: Handle, module: nn.Module):
        self._handle: Handle | None = handle
        self._module = weakref.ref(module)

    def _in_a_copy(self) -> dict[str, Any]:
        return {"_handle": None}

    def __call__(self, *args, **kwargs) -> None:
        module, handle = self._module(), self._handle
        # A method of the user's does more than torch's.
        if handle is None or type(module).zero_grad is not nn.Module.zero_grad:
            type(module).zero_grad(module, *args, **kwargs)
        if handle is None:
            return
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        mode = _C.ZeroGrad.to_none if set_to_none else _C.ZeroGrad.to_zero
        handle.engine.zero_grad(range(len(handle.parameters)), mode)
        for parameter in module.parameters():
            if parameter.grad is not None and not is_sharded_by(handle, parameter):
                parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)
