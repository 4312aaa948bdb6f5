"""A GAN: two sharded models with an optimizer each.

torchrun --standalone --nproc-per-node 2 examples/gallery/gan.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zero_ext

STEPS, BATCH = 100, 32
LR, BETAS = 5e-3, (0.5, 0.999)


def make_models() -> tuple[nn.Module, nn.Module]:
    """The generator makes points of the plane. The discriminator tells them from real ones."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    return generator, nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def draw(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Real points, around (2, -1), and noise for the generator."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    real = torch.tensor([2.0, -1.0]) + 0.3 * torch.randn(BATCH, 2, generator=source)
    return real, torch.randn(BATCH, 4, generator=source)


def loss_of(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def main() -> tuple[nn.Module, nn.Module]:
    dist.init_process_group("gloo")
    generator, discriminator = (zero_ext.shard(model, stage=2) for model in make_models())
    of_generator = zero_ext.optim.Adam(generator.parameters(), lr=LR, betas=BETAS)
    of_discriminator = zero_ext.optim.Adam(discriminator.parameters(), lr=LR, betas=BETAS)
    for step in range(STEPS):
        real, noise = draw(step, dist.get_rank())
        fake = generator(noise)
        # One backward for both halves. detach(): the generator does not learn from this loss.
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        (loss_of(on_real, real=True) + loss_of(on_fake, real=False)).backward()
        of_discriminator.step()
        of_discriminator.zero_grad()
        loss_of(discriminator(fake), real=True).backward()
        of_generator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()  # discards what the generator's loss has added
        if dist.get_rank() == 0 and step % 20 == 19:
            x, y = fake.mean(0).tolist()
            print(f"step {step + 1}: mean of the generated points {x:.3f}, {y:.3f}")
    dist.destroy_process_group()
    return generator, discriminator


if __name__ == "__main__":
    main()
