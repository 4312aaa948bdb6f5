"""Sequences of different lengths: each rank cuts its own into micro-batches by a budget of tokens.

torchrun --standalone --nproc-per-node 2 examples/gallery/token_budget.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zero_ext

STEPS, BUDGET, TOKENS = 20, 48, 11


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(TOKENS, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 11))


def micro_batches(step: int, rank: int) -> list[Tensor]:
    """Six sequences of 4 to 40 tokens. A micro-batch joins as many as the budget allows."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    cut: list[list[Tensor]] = [[]]
    for length in torch.randint(4, 41, (6,), generator=draw).tolist():
        first = torch.randint(TOKENS, (1,), generator=draw)
        sequence = (first + 3 * torch.arange(length)) % TOKENS  # each token tells the next one
        if sum(map(len, cut[-1])) + length > BUDGET:
            cut.append([])
        cut[-1].append(sequence)
    return [torch.cat(sequences) for sequences in cut]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The sum over tokens: a mean would weigh those of small micro-batches more."""
    return F.cross_entropy(model(tokens), (tokens + 3) % TOKENS, reduction="sum")


def main() -> nn.Module:
    dist.init_process_group("gloo")
    model = zero_ext.shard(make_model(), stage=2)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        tokens, total = 0, 0.0
        for batch in micro_batches(step, dist.get_rank()):  # as many as this rank happens to have
            loss = loss_of(model, batch)
            loss.backward()
            tokens += len(batch)
            total += loss.item()
        optimizer.step(divide_by=tokens)  # the sum over all ranks divides the gradients
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {total / tokens:.4f} in {tokens} tokens")
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
