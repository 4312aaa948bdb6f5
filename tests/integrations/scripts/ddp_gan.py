"""A DCGAN: two wrapped models, two optimizers, BatchNorm. It knows nothing of zero_ext."""

import torch
import torch.distributed as dist
from torch import nn, optim

if not dist.is_initialized():
    dist.init_process_group("gloo")
rank = dist.get_rank()
latent, features = 7, 5


def weights_init(m):
    name = m.__class__.__name__
    if "Conv" in name:
        nn.init.normal_(m.weight.data, 0.0, 0.1)
    elif "BatchNorm" in name:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


torch.manual_seed(3)
generator = nn.Sequential(
    nn.ConvTranspose2d(latent, 2 * features, 4, 1, 0, bias=False),
    nn.BatchNorm2d(2 * features),
    nn.ReLU(True),
    nn.ConvTranspose2d(2 * features, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
)
critic = nn.Sequential(
    nn.Conv2d(3, features, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.BatchNorm2d(features),
    nn.Conv2d(features, 1, 4, 1, 0, bias=False),
    nn.Flatten(0),
    nn.Sigmoid(),
)
generator.apply(weights_init)
critic.apply(weights_init)
# DDP's own buffers would be those of the last forward in a step of several.
generator = nn.parallel.DistributedDataParallel(generator, broadcast_buffers=False)
critic = nn.parallel.DistributedDataParallel(critic, broadcast_buffers=False)
criterion = nn.BCELoss()
critic_optimizer = optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))
optimizer = optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
losses = []
for step in range(4):
    draw = torch.Generator().manual_seed(10 * step + rank)
    real = torch.randn(6, 3, 8, 8, generator=draw)
    critic.zero_grad()
    real_loss = criterion(critic(real), torch.ones(6))
    real_loss.backward()
    fake = generator(torch.randn(6, latent, 1, 1, generator=draw))
    fake_loss = criterion(critic(fake.detach()), torch.zeros(6))
    fake_loss.backward()
    critic_optimizer.step()
    generator.zero_grad()
    loss = criterion(critic(fake), torch.ones(6))
    loss.backward()
    optimizer.step()
    both = torch.stack([real_loss + fake_loss, loss]).detach()
    dist.all_reduce(both)
    losses += both.tolist()
model = generator
