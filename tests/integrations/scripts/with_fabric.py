"""A script of Lightning's Fabric, driven by flags. It knows nothing of zero_ext."""

import argparse

import lightning_fabric
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--devices", type=int, default=2)
losses: list[float] = []
if __name__ == "__main__":
    flags = parser.parse_args()
    fabric = lightning_fabric.Fabric(
        accelerator="cpu", strategy=flags.strategy, devices=flags.devices
    )
    fabric.launch()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(13, 1083), nn.Tanh(), nn.Linear(1083, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(24, 13, generator=torch.Generator().manual_seed(7))
    wrapped, stepped = fabric.setup(model, optimizer)
    loader = DataLoader(TensorDataset(x, torch.arange(24) % 7), batch_size=3)
    for inputs, targets in fabric.setup_dataloaders(loader):
        stepped.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(inputs), targets)
        fabric.backward(loss)
        stepped.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
