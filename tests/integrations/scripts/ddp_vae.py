"""A VAE and then a classifier on its code, with a DistributedSampler, a schedule, evaluation on
every rank, no_sync() and a resumed run. It knows nothing of zero_ext."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(1)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(40, 17), nn.Linear(17, 5), nn.Linear(17, 5)
        self.fc3, self.fc4 = nn.Linear(5, 17), nn.Linear(17, 40)

    def forward(self, x):
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        noise = torch.linspace(-1, 1, mu.numel()).view_as(mu)
        code = mu + torch.exp(0.5 * logvar) * noise
        return torch.sigmoid(self.fc4(F.relu(self.fc3(code)))), mu, logvar


class Classifier(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 5, 8)), nn.Conv2d(1, 7, 3), nn.BatchNorm2d(7), nn.ReLU(),
            nn.Flatten(), nn.Linear(7 * 18, 11, bias=False),
        )  # fmt: skip


images = torch.rand(53, 40, generator=torch.Generator().manual_seed(2))
dataset = TensorDataset(images, torch.arange(53) % 11)
sampler = DistributedSampler(dataset, seed=4)
loader = DataLoader(dataset, batch_size=5, sampler=sampler)
losses = []


def told(loss):
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item())


vae = DistributedDataParallel(VAE(), find_unused_parameters=True, bucket_cap_mb=1)
optimizer = torch.optim.Adam(vae.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, _ in loader:
        optimizer.zero_grad()
        recon, mu, logvar = vae(x)
        divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss = F.binary_cross_entropy(recon, x, reduction="sum") + divergence
        loss.backward()
        optimizer.step()
        told(loss)

model = DistributedDataParallel(Classifier())
model.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        last = number % 2 == 1 or number == len(loader) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        told(loss)
    scheduler.step()
model.eval()
with torch.no_grad():
    told(F.cross_entropy(model(images), torch.arange(53) % 11))
assert isinstance(model, DistributedDataParallel)
assert next(iter(model.state_dict())).startswith("module.")
