"""A small transformer with a plan of tensor parallelism, and its training by that alone."""

from collections.abc import Callable, Iterable

import torch
from harness import Random
from reference import fma
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

WIDTH, HEADS, HIDDEN, TOKENS, LENGTH = 12, 2, 22, 26, 6  # odd parts of ranks, 13 rows of 26


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (x.shape[0], x.shape[1], -1, WIDTH // HEADS)
        q, k, v = (each(x).view(heads).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.between = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(functional.silu(self.up(self.between(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def made_parallel(
    mesh: DeviceMesh, *, sequence: bool = False, model: Transformer | None = None
) -> Transformer:
    """Column, row and embedding plans; with ``sequence`` also the norms', whose gradients arrive as
    partial sums."""
    torch.manual_seed(0)
    model = Transformer() if model is None else model
    cut = Shard(1) if sequence else Replicate()
    norm = {"norm": SequenceParallel()} if sequence else {}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
        **norm,
    }
    parallelize_module(model, mesh, plan)
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=cut)
    for layer in model.layers:
        plan = {
            "attention": PrepareModuleInput(
                input_layouts=(cut,), desired_input_layouts=(Replicate(),)
            ),
            **dict.fromkeys(("attention.q", "attention.k", "attention.v"), columns),
            "attention.o": rows,
            "up": ColwiseParallel(input_layouts=cut),
            "down": rows,
        }
        if sequence:
            plan |= {"before": SequenceParallel(), "between": SequenceParallel()}
        parallelize_module(layer, mesh, plan)
    return model


def batch_of(step: int, micro: int) -> Tensor:
    return Random(1 + 100 * step + micro).integers(0, TOKENS, (2, LENGTH + 1))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch[:, :-1])
    return functional.cross_entropy(output.flatten(0, 1), batch[:, 1:].flatten())


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it on the mesh of the plan."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def parts_of(model: nn.Module) -> dict[str, Tensor]:
    """What this rank has of each parameter of a sharded model. Collective."""
    with model.summon_full_params():
        return {name: local(p).clone() for name, p in model.named_parameters()}


class ByPlanAlone:
    """Training by the plan alone: each rank runs the micro-batches of all data ranks.

    Gradients are brought to their parameters' placements after each backward, and added in fp32 in
    the order of the micro-batches.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    ):
        self.model, self.optimizer = model, optimizer_fn(model.parameters())
        self.losses: list[Tensor] = []

    def train(self, batches: list[Tensor], world: int) -> dict[str, Tensor]:
        """One step. Returns the gradients, averaged over ``world`` data ranks: local parts."""
        sums: dict[str, Tensor] = {}
        scale = torch.tensor(1 / world, dtype=torch.float32).item()
        for batch in batches:
            loss = loss_of(self.model, batch)
            loss.backward()
            self.losses.append(loss.detach())
            for name, p in self.model.named_parameters():
                gradient, p.grad = p.grad, None
                if isinstance(p, DTensor):
                    gradient = gradient.redistribute(p.device_mesh, p.placements).to_local()
                before = sums.get(name, torch.zeros_like(gradient))
                sums[name] = fma(scale, gradient, before)
        return sums

    def step(self, gradients: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            p.grad = (
                gradients[name]
                if not isinstance(p, DTensor)
                else DTensor.from_local(
                    gradients[name],
                    p.device_mesh,
                    p.placements,
                    run_check=False,
                    shape=p.shape,
                    stride=p.stride(),
                )
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
