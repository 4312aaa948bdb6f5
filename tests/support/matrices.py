"""A model of matrices, for optimizers that need them whole, and one process that trains it."""

from collections.abc import Callable, Iterable, Sequence

import torch
from harness import assert_bits, mean_square, rank_data
from reference import fma_gradients
from torch import nn

import zero_ext


class Matrices(nn.Module):
    """Matrices that straddle ranks and units, and one that is transposed in memory."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(13, 13, bias=False) for _ in range(3))
        self.transposed = nn.Parameter((torch.randn(7, 13) / 4).t())
        self.last = nn.Parameter(torch.randn(1, 7) / 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return torch.tanh(x @ self.transposed) * self.last


class One(nn.Module):
    """Fewer matrices than ranks, one without elements on some ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.only = nn.Linear(13, 2, bias=False)

    def forward(self, x):
        return torch.tanh(self.only(x))


def straddling(model: nn.Module, stage: int, mesh, **arguments) -> nn.Module:
    """``model`` in units that are smaller than some of its matrices."""
    return zero_ext.shard(model, stage, mesh=mesh, bucket_mb=400 / 2**20, **arguments)


def train(model, optimizers, rank: int, steps: Iterable[int], micros: int = 1) -> None:
    """With one optimizer or several, on this rank's batches."""
    several = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    for step in steps:
        for micro in range(micros):
            mean_square(model, rank_data((3, 13), rank, step, micro)).backward()
        for optimizer in several:
            optimizer.step()
            optimizer.zero_grad()


class OneProcess:
    """A plain optimizer on fp32 parameters, with the average of all ranks' gradients."""

    def __init__(
        self,
        world: int,
        make: Callable[[Iterable], torch.optim.Optimizer],
        model: Callable[[], nn.Module] = Matrices,
    ):
        self.world, self._make_model, self.model = world, model, model()
        self.optimizer = make(self.model.parameters())

    def train(self, steps: Iterable[int], micros: int = 1) -> None:
        for step in steps:
            batches = [
                [rank_data((3, 13), rank, step, micro) for rank in range(self.world)]
                for micro in range(micros)
            ]
            gradients = fma_gradients(self.copy(), batches, self.world)
            for name, p in self.model.named_parameters():
                gradient = gradients[name] if p.requires_grad else None
                p.grad = None if gradient is None else gradient.to(p.device)
            self.optimizer.step()

    def copy(self) -> nn.Module:
        model = self._make_model()
        model.load_state_dict(self.model.state_dict())
        return model


def assert_same_parameters(model: nn.Module, plain: nn.Module) -> None:
    for name, p in model.named_parameters():
        assert_bits(zero_ext.full_tensor(p), plain.get_parameter(name), name)
