"""Several backwards over one forward: released parameters come back, and go after the last one.

A failure that was reported against a well-known implementation of ZeRO-3: the first backward
released the parameters, the second ran on empty storage. A flag given to the engine's own
``backward`` does not see a plain ``loss.backward(retain_graph=True)``, and outlives an exception.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from harness import ResidualBlock, assert_bits, rank_data
from reference import OneProcess, gradients_of
from setups import gathered
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_ext

WIDTH = 7
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
CHECKPOINTS = pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])


class TwoHeads(nn.Module):
    """Two outputs that share a trunk."""

    def __init__(self, checkpointing: str | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, WIDTH)
        self.trunk = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(3))
        self.heads = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(2))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        for block in self.trunk:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return [head(x) for head in self.heads]


class Pass(NamedTuple):
    """One backward: the weights of the two outputs in its loss."""

    weights: tuple[float, float]
    retain: bool = True


TWO_PASSES = (Pass((1, 0)), Pass((0, 1), retain=False))
THREE_PASSES = (Pass((1, 0)), Pass((0.5, 2)), Pass((0, 1), retain=False))


def batch(rank: int) -> Tensor:
    return rank_data((4, 5), rank)


def loss_of(outputs: list[Tensor], weights: tuple[float, float]) -> Tensor:
    pairs = zip(weights, outputs, strict=True)
    return sum(weight * output.square().mean() for weight, output in pairs if weight)


def sharded(stage: int, mesh, checkpointing: str | None = None, **kwargs) -> nn.Module:
    return zero_ext.shard(TwoHeads(checkpointing), stage, mesh=mesh, bucket_mb=1e-4, **kwargs)


def expected_gradients(passes, world: int) -> dict[str, Tensor | None]:
    """One process: every pass of every rank by itself, added in (pass, rank) order, in fp32."""
    model = TwoHeads()
    sums: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in model.named_parameters())
    for one in passes:
        for rank in range(world):
            model.zero_grad()
            loss_of(model(batch(rank)), one.weights).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    continue
                before = 0 if sums[name] is None else sums[name]
                sums[name] = before + parameter.grad / world
    return sums


def assert_gradients(model: nn.Module, expected: dict[str, Tensor | None], world: int) -> None:
    actual = gradients_of(model)
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is None:
            continue
        if world & (world - 1) == 0:
            assert_bits(actual[name], gradient, name)
        else:  # an average over 3 rounds elsewhere
            torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-7)


def run(model: nn.Module, passes, rank: int, between: Callable[[], None] | None = None) -> None:
    outputs = model(batch(rank))
    for number, one in enumerate(passes):
        if number and between is not None:
            between()
        loss_of(outputs, one.weights).backward(retain_graph=one.retain)
        if not one.retain:
            assert gathered(model) == []


@pytest.mark.dist
@STAGES
@CHECKPOINTS
@pytest.mark.parametrize("passes", [TWO_PASSES, THREE_PASSES], ids=["two", "three"])
def test_passes_add_up(stage, checkpointing, passes, mesh, rank, world):
    model = sharded(stage, mesh, checkpointing)
    run(model, passes, rank)
    assert_gradients(model, expected_gradients(passes, world), world)


@pytest.mark.dist
@STAGES
@CHECKPOINTS
@pytest.mark.parametrize("zero", ["module", "optimizer"])
def test_zero_grad_between_leaves_the_last_pass_alone(
    stage, checkpointing, zero, mesh, rank, world
):
    model = sharded(stage, mesh, checkpointing)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    run(model, TWO_PASSES, rank, model.zero_grad if zero == "module" else optimizer.zero_grad)
    expected = expected_gradients(TWO_PASSES[1:], world)
    assert_gradients(model, expected, world)

    reference = OneProcess(TwoHeads(), lambda p: torch.optim.AdamW(p, lr=0.1))
    reference.step(expected)
    optimizer.step()
    assert gathered(model) == []
    with model.summon_full_params():
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter, reference.parameters[name], rtol=1e-5, atol=2e-6, msg=name
            )


@pytest.mark.dist
@STAGES
def test_a_scaled_loss_retains_as_well(stage, mesh, rank, world):
    # A power of two: every bit of the gradient only moves.
    model = sharded(stage, mesh)
    outputs = model(batch(rank))
    (loss_of(outputs, (1, 0)) * 1024).backward(retain_graph=True)
    (loss_of(outputs, (0, 1)) * 1024).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(1024)
    assert_gradients(model, expected_gradients(TWO_PASSES, world), world)
    assert gathered(model) == []


@pytest.mark.dist
@CHECKPOINTS
@pytest.mark.parametrize("retained_bytes", [0, 500, None])
def test_retained_bytes_bounds_what_stays_and_changes_no_bit(
    checkpointing, retained_bytes, mesh, rank, world
):
    model = sharded(3, mesh, checkpointing, retained_bytes=retained_bytes)
    outputs = model(batch(rank))
    for one in THREE_PASSES:
        loss_of(outputs, one.weights).backward(retain_graph=one.retain)
        held = model.stats()["bytes_full"]
        if world > 1 and one.retain and retained_bytes is not None:
            assert held <= retained_bytes
        if world > 1 and one.retain and retained_bytes is None and checkpointing is None:
            assert len(gathered(model)) >= 4  # the trunk and a head
    assert gathered(model) == []
    assert_gradients(model, expected_gradients(THREE_PASSES, world), world)


@pytest.mark.dist
@STAGES
@CHECKPOINTS
@pytest.mark.parametrize("where", ["trunk.1", "heads.0", "stem"])
def test_a_retained_backward_that_throws(stage, checkpointing, where, mesh, rank, world):
    model = sharded(stage, mesh, checkpointing)
    armed = [True]

    def fail(grad):
        if armed[0]:
            raise ArithmeticError("on purpose")

    def arm(module, args, output):
        if output.requires_grad:
            output.register_hook(fail)

    model.get_submodule(where).register_forward_hook(arm)
    outputs = model(batch(rank))
    before = gathered(model)
    with pytest.raises(ArithmeticError, match="on purpose"):
        loss_of(outputs, (1, 0)).backward(retain_graph=True)
    # The hook of a head's output throws before the backward has reached any unit.
    assert gathered(model) == (before if where == "heads.0" else [])
    assert all(p.grad is None for p in model.parameters())
    armed[0] = False
    loss_of(outputs, (1, 0)).backward(retain_graph=True)
    loss_of(outputs, (0, 1)).backward()
    assert gathered(model) == []
    assert_gradients(model, expected_gradients(TWO_PASSES, world), world)


@pytest.mark.dist
def test_a_forgotten_retain_graph_ends_with_the_step(mesh, rank):
    model = sharded(3, mesh)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    rest = model.stats()["bytes_full"]
    loss_of(model(batch(rank)), (1, 1)).backward(retain_graph=True)
    optimizer.step()
    assert gathered(model) == []
    assert model.stats()["bytes_full"] == rest


@pytest.mark.dist
def test_the_next_backward_that_keeps_nothing_ends_it_too(mesh, rank):
    model = sharded(3, mesh)
    loss_of(model(batch(rank)), (1, 1)).backward(retain_graph=True)
    loss_of(model(batch(rank)), (1, 1)).backward()
    assert gathered(model) == []
