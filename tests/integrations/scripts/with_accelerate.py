"""A script of accelerate, driven by flags. It knows nothing of zero_ext."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--save")
flags = parser.parse_args()

accelerator = Accelerator(cpu=True)
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(13, 1083), nn.Tanh(), nn.Linear(1083, 7))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(64, 13), torch.arange(64) % 7)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=3))
losses = []
for _, (x, y) in zip(range(flags.steps), loader, strict=False):
    loss = nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
if flags.save:
    accelerator.save_state(flags.save)
print("losses", losses)
