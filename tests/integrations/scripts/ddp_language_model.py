"""A small GPT in one file: an optimizer made before DDP, accumulation by a flag of the wrapped
model, clipping, a schedule by hand, checkpoints of rank 0. It knows nothing of zero_ext."""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", default=None)
parser.add_argument("--resume", default=None)
flags = parser.parse_args()
steps, micro_steps, block, width, vocabulary = 6, 3, 16, 24, 31


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width, bias=False)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).split(width, -1)
        heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.h = nn.ModuleList([Block() for _ in range(3)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))

    @torch.no_grad()
    def generate(self, idx, count):
        for _ in range(count):
            idx = torch.cat([idx, self(idx[:, -block:])[0][:, -1:].argmax(-1)], 1)
        return idx


if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337 + rank)
data = torch.randint(0, vocabulary, (400,), generator=torch.Generator().manual_seed(5))


def get_batch(step):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    at = torch.randint(0, len(data) - block - 1, (4,), generator=draw)
    rows = torch.stack([data[i : i + block + 1] for i in at.tolist()])
    return rows[:, :-1], rows[:, 1:]


model = GPT()
first = 0
if flags.resume:
    checkpoint = torch.load(flags.resume)
    model.load_state_dict(checkpoint["model"])
    first = checkpoint["iter_num"]
optimizer = model.configure_optimizers(0.1, 1e-2)
model = DistributedDataParallel(model)
raw_model = model.module
losses = []
for step in range(first, steps):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
    for micro_step in range(micro_steps):
        model.require_backward_grad_sync = micro_step == micro_steps - 1
        x, y = get_batch(step * micro_steps + micro_step)
        logits, loss = model(x, y)
        loss = loss / micro_steps
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mean = loss.detach() * micro_steps
    dist.all_reduce(mean)
    losses.append(mean.item() / world)
if flags.out and rank == 0:
    torch.save(
        {"model": raw_model.state_dict(), "iter_num": steps}, os.path.join(flags.out, "ckpt.pt")
    )
sampled = raw_model.generate(data[None, :3], 5) if rank == 0 else None
dist.barrier()
