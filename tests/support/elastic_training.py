"""A training that goes on after ranks were lost, and a program that takes part in it.

python tests/support/elastic_training.py PORT FOLDER STAGE STEPS REPORT
"""

import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import zero_ext
from zero_ext.data import GlobalBatches

MICRO_BATCHES = 12
TOKENS = 7
TIMEOUT_S = 4  # of a round: many programs share few cores


class Model(nn.Module):
    """With dropout, a head that is tied to the embedding, a frozen part and matrices for Muon."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 9)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(9, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + functional.dropout(functional.gelu(block(x)), 0.3, self.training)
        return self.head(self.norm(x))


class Training:
    """Muon and AdamW, with clipping and a schedule, on global batches.

    Args:
        where: How ``shard`` is told the ranks.
    """

    def __init__(self, stage: int, rank: int, world: int, **where: Any):
        model = Model().bfloat16()
        self.model = zero_ext.shard(model, stage, bucket_mb=1e-4, reduction="exchange", **where)
        matrices = [b.weight for b in self.model.blocks if b.weight.requires_grad]
        others = [p for p in self.model.parameters() if all(p is not m for m in matrices)]
        self.optimizers = [
            zero_ext.optim.Muon(matrices, lr=0.02),
            zero_ext.optim.AdamW(others, lr=0.01, max_grad_norm=0.3),
        ]
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[1], 0.97)
        generator = torch.Generator("cpu").manual_seed(1)
        tokens = torch.randint(0, 13, (83, TOKENS), generator=generator, device="cpu")
        self.batches = GlobalBatches(
            tokens, 2, MICRO_BATCHES, num_replicas=world, rank=rank, seed=3
        )
        self._loader = DataLoader(tokens, batch_sampler=self.batches)

    @property
    def extra(self) -> dict[str, Any]:
        return {"batches": self.batches, "schedule": self.schedule}

    def step(self, replay_every: int | None = None) -> None:
        steps = self.batches.steps(
            self._loader, self.model, replay_every=replay_every, loss_of=self._loss_of
        )
        [step] = itertools.islice(steps, 1)
        self._make(step)

    def _loss_of(self, tokens) -> torch.Tensor:
        tokens = tokens.to(torch.get_default_device())
        logits = self.model(tokens).float()[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _make(self, step) -> None:
        for tokens in step:
            self._loss_of(tokens).backward()
        for optimizer in self.optimizers:
            optimizer.step(divide_by=len(step))
            optimizer.zero_grad()
        self.schedule.step()

    def run(self, run: zero_ext.elastic.Run, steps: int, kept: Callable[[], None]) -> None:
        """Go on until ``run`` has finished so many steps. ``kept()`` is called after each one."""
        while run.step < steps:
            for step in self.batches.steps(self._loader, self.model):
                self._make(step)
                try:
                    run.keep()
                finally:
                    kept()
                if run.step == steps:
                    return

    def fingerprint(self) -> str:
        return zero_ext.fingerprint(self.model, *self.optimizers)


def main(port: int, folder: str, stage: int, steps: int, report: str) -> None:
    """Takes part until the end. Each finished step and the last fingerprint are lines of a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)

    def tell(**facts: Any) -> None:
        with open(report, "a") as file:
            file.write(json.dumps(facts | {"pid": os.getpid(), "time": time.time()}) + "\n")

    def train() -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        [era] = broadcast([f"{os.getpid()} {time.time()}"])
        tell(begins=era)
        training = Training(stage, rank, world)
        with zero_ext.elastic.Run(
            training.model, training.optimizers, extra=training.extra, folder=folder
        ) as run:
            training.run(run, steps, lambda: tell(step=run.step, world=world, era=era))
            tell(fingerprint=training.fingerprint())

    def broadcast(value: list[str]) -> list[str]:
        dist.broadcast_object_list(value)
        return value

    zero_ext.elastic.train_in_place(
        train, store, run_id="events", timeout_s=TIMEOUT_S, backend="gloo"
    )


if __name__ == "__main__":
    port, folder, stage, steps, report = sys.argv[1:]
    main(int(port), folder, int(stage), int(steps), report)
