"""LoRA in plain PyTorch: the frozen weights are sharded, and small adapters are trained.

torchrun --standalone --nproc-per-node 2 examples/gallery/adapters.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zero_ext

STEPS, WIDTH, NARROW = 40, 32, 4


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two narrow matrices that is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, NARROW, bias=False)
        self.up = nn.Linear(NARROW, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)  # the first forward is that of the frozen model

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), nn.GELU(), Adapted())


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    return F.mse_loss(model(x), x[:, :2].repeat(1, WIDTH // 2))


def main() -> nn.Module:
    dist.init_process_group("gloo")
    model = zero_ext.shard(make_model(), stage=3, units=Adapted)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = zero_ext.optim.AdamW(adapters.values(), lr=3e-2)
    for step in range(STEPS):
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    whole = {name: zero_ext.full_tensor(p) for name, p in adapters.items()}  # on every rank
    if dist.get_rank() == 0:
        torch.save(whole, "adapters.pt")
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
