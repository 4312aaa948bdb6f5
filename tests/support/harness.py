"""Data, models and references that tests share. conftest.py has the fixtures."""

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zero_ext
from zero_ext import testing
from zero_ext.testing import assert_bits as assert_bits  # tests take it from here

# Over a device's own backend, lccl or nccl.
OWN_BACKEND = "ccl" in os.environ.get("ZERO_EXT_TEST_BACKENDS", "")
# There, the devices read each other's memory.
DIRECT = os.environ.get("ZERO_EXT_TEST_DIRECT") == "1"
# Ranks of a replica in the fixture `mesh`: hybrid sharding, in two dimensions, if it is set.
SHARDS = int(os.environ.get("ZERO_EXT_TEST_SHARDS", 0))
ONE_UNIT_EACH = 1e-6  # bucket_mb
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Team(NamedTuple):
    """The ranks that a test runs on; the fixture ``team``."""

    rank: int
    world: int
    group: dist.ProcessGroup | None  # None: one process without a process group


class Random:
    """Random numbers on the default device, the same ones on every device."""

    def __init__(self, seed: int):
        self._draw = {"generator": torch.Generator("cpu").manual_seed(seed), "device": "cpu"}

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), **self._draw).to(torch.get_default_device())

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """From ``low`` to ``high - 1``."""
        return torch.randint(low, high, tuple(shape), **self._draw).to(torch.get_default_device())


def rank_data(
    shape: Sequence[int],
    rank: int,
    step: int = 0,
    micro: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Normal values, different for every (rank, step, micro), the same in every process."""
    return Random(1 + rank + 1009 * (micro + 1009 * step)).normal(shape).to(dtype)


def rank_batches(
    shape: Sequence[int], world: int, step: int = 0, micros: int = 1, dtype=torch.float32
) -> list[list[Tensor]]:
    """All ranks' micro-batches of one step, as ``batches[micro][rank]``."""
    return [
        [rank_data(shape, rank, step, micro, dtype) for rank in range(world)]
        for micro in range(micros)
    ]


def mean_square(model: nn.Module, batch) -> Tensor:
    """A loss for any model: its output's mean square, in fp32. A tuple holds the arguments."""
    output = model(*batch) if isinstance(batch, tuple) else model(batch)
    return output.float().square().mean()


def reference_gradients(
    model_fn: Callable[[], nn.Module],
    batches: Sequence[Sequence],
    world: int,
    scale: float = 1.0,
    loss_fn: Callable[[nn.Module, object], Tensor] = mean_square,
) -> dict[str, Tensor | None]:
    """One process's fp32 gradients of ``batches[micro][rank]``, one batch of each rank."""
    for ranks in batches:
        assert len(ranks) == world, f"{len(ranks)} batches for {world} ranks"
    return testing.reference_gradients(model_fn, batches, loss_fn, scale)


def step_and_wait(optimizer) -> None:
    """A step, and what it warns of, which a device tells later."""
    optimizer.step()
    _ = optimizer.skipped_steps


def gathers_together(reduction: str = "exchange", offload=None) -> bool:
    """Whether every rank enters every gather of stage 3."""
    return OWN_BACKEND and not (DIRECT and reduction == "exchange" and offload is None)


GATHERS_TOGETHER = gathers_together()


def needs_own_gathers(stage: int, reduction: str = "exchange", offload=None) -> None:
    """Of a test whose ranks differ in what they run."""
    if stage == 3 and gathers_together(reduction, offload):
        pytest.skip("every rank enters every gather")


def needs_gathers_together() -> None:
    """Of a test that is about collectives of stage 3."""
    if not GATHERS_TOGETHER:
        pytest.skip("no rank enters another one's gather")


def needs_messages_of_the_host() -> None:
    """Of a test whose ranks are on several hosts and take different branches of stage 3."""
    if OWN_BACKEND:
        pytest.skip("between hosts, every rank enters every gather of a device's backend")


def needs_waits_of_the_host() -> None:
    """Of a test whose hosts wait for each other in a backward, or in torch's own collectives."""
    if OWN_BACKEND:
        pytest.skip("the device waits for the other ranks, and a later wait of the host raises")


BETWEEN_HOSTS = (
    "ZERO_EXT_TEST_HOSTS" in os.environ or os.environ.get("ZERO_EXT_CROSS_MEMORY") == "0"
)


def needs_one_host(because: str) -> None:
    """Of a test with an error on one rank. ``because``: what may happen between hosts."""
    if BETWEEN_HOSTS:
        pytest.skip(f"between hosts {because}")


def needs_one_dimension() -> None:
    """Of a test that is about the ranks of one replica, or another group than the mesh's own."""
    if SHARDS:
        pytest.skip("all ranks are one replica")


def watch_reductions(model: nn.Module) -> list[int]:
    """How many reductions had started when each gradient arrived; the list grows."""
    started: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: started.append(model.stats()["reductions"])
        )
    return started


def assert_two_buckets(model, plain, world: int, stage: int, bucket_mb=ONE_UNIT_EACH) -> None:
    estimate = zero_ext.estimate_memory(
        plain,
        world,
        stage,
        shards=SHARDS or world,
        bucket_mb=bucket_mb,
        device=torch.get_default_device(),
        peer_memory=DIRECT,
    )
    assert 0 < model.stats()["bytes_bucket"] <= estimate["buckets"]


def gather_objects(value, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's ``value``, in rank order, on every rank."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class MLP(nn.Module):
    """``features → hidden → … → features`` with GELU. Like all models here seeded by itself."""

    def __init__(self, hidden: int = 7, features: int = 5, layers: int = 3, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        sizes = [features, *[hidden] * (layers - 1), features]
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = functional.gelu(layer(x))
        return self.layers[-1](x)


class ManyLayers(nn.Module):
    """361 residual blocks of three parameters, 1,083 in all; ``used`` picks those to run."""

    class Block(nn.Module):
        def __init__(self, width: int, dtype):
            super().__init__()
            self.linear = nn.Linear(width, width, dtype=dtype)
            self.gain = nn.Parameter(torch.ones(width, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gain * torch.tanh(self.linear(x))

    def __init__(self, blocks: int = 361, width: int = 64, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block(width, dtype) for _ in range(blocks))

    def forward(self, x: Tensor, used: Sequence[int] | None = None) -> Tensor:
        for index in range(len(self.blocks)) if used is None else used:
            x = self.blocks[index](x)
        return x


class Blocks(nn.Module):
    """Equally large units of which one is the root's. Every size that is used here has padding."""

    def __init__(self, width: int = 37, blocks: int = 6, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(blocks))
        self.head = nn.Linear(width, width, dtype=dtype)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class ResidualBlock(nn.Module):
    """``x + outer(tanh(inner(x)))``, twice as wide inside. The caller seeds."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Tied(nn.Module):
    """Tokens in, logits out; one weight is both the embedding and the head."""

    def __init__(self, tokens: int = 11, width: int = 6, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(tokens, width, dtype=dtype)
        self.middle = nn.Linear(width, width, dtype=dtype)
        self.head = nn.Linear(width, tokens, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class Branching(nn.Module):
    """A trunk and two branches, ``left`` and ``right``; the caller names those that are taken."""

    def __init__(self, width: int = 6, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(width, width, dtype=dtype)
        self.left = nn.Linear(width, width, dtype=dtype)
        self.right = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: Tensor, taken: Sequence[str] = ("left", "right")) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return sum((getattr(self, name)(x) for name in taken), x)


class Odd(nn.Module):
    """0-dim, zero-size, transposed, channels_last, frozen, never used. Input [batch, 3, 4, 4]."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.nothing = nn.Parameter(torch.empty(0, 4, dtype=dtype))
        self.conv = nn.Conv2d(3, 5, 3, dtype=dtype).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(7, 20).to(dtype).t())
        self.frozen = nn.Parameter(torch.randn(7, 7).to(dtype), requires_grad=False)
        self.last = nn.Linear(7, 2, dtype=dtype)
        self.unused = nn.Parameter(torch.randn(3).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x).flatten(1))  # [batch, 20]
        x = torch.tanh(x @ self.transposed @ self.frozen)
        return self.scale * self.last(x) + self.nothing.sum()
