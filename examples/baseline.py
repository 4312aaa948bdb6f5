"""What train_lm.py compares with: PyTorch's DDP, and fp32 masters kept by hand."""

import torch
from torch import Tensor, nn


class MasterAdamW(torch.optim.AdamW):
    """torch's fused AdamW on fp32 copies of all parameters, on every rank.

    Call ``accumulate()`` after each backward: it adds the gradients, which DDP has averaged, to
    the masters' fp32 gradients. ``step()`` writes the new values back into the parameters.
    """

    def __init__(self, parameters, **arguments):
        self.parameters = [p for p in parameters if p.requires_grad]
        # An fp32 parameter is its own master: .float() returns the same storage then.
        self.masters = [p.detach().float() for p in self.parameters]
        super().__init__(self.masters, fused=True, **arguments)

    @torch.no_grad()
    def accumulate(self) -> None:
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        gradients = [parameter.grad for parameter in self.parameters]
        torch._foreach_add_([master.grad for master in self.masters], gradients)
        torch._foreach_zero_(gradients)  # not None: DDP then keeps writing into its bucket

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.masters, max_norm)

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.parameters[0].dtype != torch.float32:
            torch._foreach_copy_(self.parameters, self.masters)

    def bytes_held(self) -> int:
        """Of parameters, gradients, masters and moments. DDP's buckets share the gradients."""
        moments = [v for state in self.state.values() for v in state.values()]
        gradients = [t.grad for t in self.parameters + self.masters if t.grad is not None]
        tensors = self.parameters + self.masters + gradients + moments
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


def distribute(model: nn.Module) -> nn.Module:
    """DDP around ``model``; ``model`` itself where there is only one process."""
    if not torch.distributed.is_initialized():
        return model
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
