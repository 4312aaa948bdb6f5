"""HostGradient: an offloaded gradient that is whole on this rank. It lies on the CPU, as the
``.grad`` of a parameter on a device."""

import torch
from torch import Tensor


class HostGradient(Tensor):
    """A plain tensor to everybody but torch's GradScaler. Its results are plain tensors.

    GradScaler copies its scale to the gradients' device without waiting for it, and reads the copy
    at once.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            torch.accelerator.synchronize()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo) -> Tensor:
        memo[id(self)] = copied = self.detach().clone()
        return copied

    def __reduce_ex__(self, protocol):
        return self.as_subclass(Tensor).__reduce_ex__(protocol)
