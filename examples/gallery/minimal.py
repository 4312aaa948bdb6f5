"""The smallest training: `shard` and the optimizer's line make a loop of PyTorch ZeRO.

torchrun --standalone --nproc-per-node 2 examples/gallery/minimal.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zero_ext

STEPS = 40


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Each rank has other samples in each step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 16, generator=draw)
    return x, x[:, :8].argmax(1)


def main() -> nn.Module:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = zero_ext.shard(make_model(), stage=2)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        x, y = batch_of(step, rank)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
