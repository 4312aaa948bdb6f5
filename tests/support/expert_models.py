"""A model with experts that lie on the ranks of one dimension of a mesh, and its training without
sharding."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from harness import Random
from reference import fma
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

WIDTH, HIDDEN, TOKENS, ROWS = 7, 13, 11, 9


class Experts(nn.Module):
    """``count`` of them, of which each rank of ``mesh`` computes with its own."""

    def __init__(self, count: int, mesh: DeviceMesh):
        super().__init__()
        self.mesh, self.count = mesh, count
        up, down = torch.randn(count, WIDTH, HIDDEN), torch.randn(count, HIDDEN, WIDTH)
        self.up = nn.Parameter(distribute_tensor(up / 3, mesh, [Shard(0)], src_data_rank=None))
        self.down = nn.Parameter(distribute_tensor(down / 3, mesh, [Shard(0)], src_data_rank=None))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        order = torch.argsort(chosen, stable=True)
        sent = torch.bincount(chosen, minlength=self.count).view(self.mesh.size(), -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.mesh.get_group())
        ways = received.sum(1).tolist(), sent.sum(1).tolist()
        group = self.mesh.get_group()
        tokens = all_to_all_single_autograd(x[order].contiguous(), *ways, group)
        up, down = self.up.to_local(), self.down.to_local()
        parts = tokens.split(received.flatten().tolist())
        done = [
            functional.silu(part @ up[k % up.shape[0]]) @ down[k % up.shape[0]]
            for k, part in enumerate(parts)
        ]
        back = all_to_all_single_autograd(torch.cat(done), *ways[::-1], group)
        return torch.zeros_like(x).index_copy(0, order, back)


class Layer(nn.Module):
    def __init__(self, count: int, mesh: DeviceMesh):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count, bias=False)
        self.experts = Experts(count, mesh)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weight, chosen = self.router(normed).softmax(-1).max(-1)
        return x + weight.unsqueeze(-1) * self.experts(normed, chosen)


class MixtureOfExperts(nn.Module):
    def __init__(self, mesh: DeviceMesh, per_rank: int = 3):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(per_rank * mesh.size(), mesh) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made_with_experts(mesh: DeviceMesh) -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(mesh)


def batch_of(step: int, micro: int) -> Tensor:
    return Random(1 + 100 * step + micro).integers(0, TOKENS, (ROWS + 1,))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch[:-1]), batch[1:])


class ByExpertsAlone:
    """Training with experts on a mesh, and without sharding: its ranks run the micro-batches of all
    rows of ranks, one after the other.

    ``mesh``: the ranks with other experts. What they share has the gradients of all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        optimizer_fn: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    ):
        self.model, self.mesh, self.optimizer = model, mesh, optimizer_fn(model.parameters())
        self.losses: list[Tensor] = []

    def gradients(self, step: int, micros: int, rows: int) -> dict[str, Tensor]:
        """The average over all ranks, of experts this rank's part."""
        width, own = self.mesh.size(), self.mesh.get_local_rank()
        scale = torch.tensor(1 / (rows * width), dtype=torch.float32).item()
        sums: dict[str, Tensor] = {}
        for row in range(micros * rows):
            loss = loss_of(self.model, batch_of(step, row * width + own))
            loss.backward()
            self.losses.append(loss.detach())
            for name, p in self.model.named_parameters():
                parts, p.grad = [p.grad], None
                if isinstance(p, DTensor):
                    parts = [parts[0].to_local()]
                else:
                    mine, parts = parts[0], [torch.empty_like(p) for _ in range(width)]
                    dist.all_gather(parts, mine, group=self.mesh.get_group())
                for part in parts:
                    sums[name] = fma(scale, part, sums.get(name, torch.zeros_like(part)))
        return sums

    def step(self, gradients: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            part = gradients[name]
            is_expert = isinstance(p, DTensor)
            p.grad = DTensor.from_local(part, p.device_mesh, p.placements) if is_expert else part
        self.optimizer.step()
        self.optimizer.zero_grad()
