"""Clipping where ranks have different numbers of batches, by any norm and by value."""

import math

import pytest
import torch
from harness import GATHERS_TOGETHER, mean_square, rank_data
from reference import gradients_of
from setups import small_mlp, values_of
from torch import nn

import zero_ext

STAGES = [1, 2, 3]
several_ranks = pytest.mark.world(min=2)
uneven = pytest.mark.skipif(GATHERS_TOGETHER, reason="every rank enters every collective")

CLIPS = {
    "2": lambda model, optimizers: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "1": lambda model, optimizers: nn.utils.clip_grad_norm_(model.parameters(), 0.05, 1.0),
    "inf": lambda model, optimizers: nn.utils.clip_grad_norm_(model.parameters(), 0.01, math.inf),
    "value": lambda model, optimizers: nn.utils.clip_grad_value_(model.parameters(), 0.003),
    "weights": lambda model, optimizers: nn.utils.clip_grad_norm_(
        [p for p in model.parameters() if p.dim() == 2], 0.05
    ),
}


def halves(model):
    parameters = list(model.parameters())
    return parameters[::2], parameters[1::2]


@pytest.mark.dist
@several_ranks
@uneven
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("stage", STAGES)
def test_torchs_clipping_serves_several_optimizers(mesh, rank, world, stage, clip):
    """Rank 0 has two batches, the others one or none; two optimizers hold the parameters."""
    model = zero_ext.shard(small_mlp(), stage, mesh=mesh)
    optimizers = [zero_ext.optim.SGD(half, lr=0.5) for half in halves(model)]
    plain = small_mlp()
    expected = [torch.optim.SGD(half, lr=0.5) for half in halves(plain)]
    for step in range(3):
        counts = [2 if (r + step) % world == 0 else step % 2 for r in range(world)]
        for k in range(counts[rank]):
            mean_square(model, rank_data((4, 5), rank, step, k)).backward()
        for r in range(world):
            for k in range(counts[r]):
                (mean_square(plain, rank_data((4, 5), r, step, k)) / world).backward()
        norms = [CLIPS[clip](model, optimizers), CLIPS[clip](plain, expected)]
        if norms[1] is not None:
            torch.testing.assert_close(norms[0].cpu(), norms[1].cpu(), rtol=1e-5, atol=1e-7)
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad.float())
        for each in (*optimizers, *expected):
            each.step()
            each.zero_grad()
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", range(4))
def test_without_any_backward_nothing_is_clipped(anywhere, stage):
    model = zero_ext.shard(small_mlp(), stage, mesh=anywhere)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) == 0
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1, math.inf) == 0
    assert optimizer.clip_grad_norm_(0.1, 1.0) == 0
    before = {name: value.clone() for name, value in values_of(model).items()}
    optimizer.step(divide_by=0)
    for name, value in values_of(model).items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("norm_type", [1, 2, 2.5, math.inf, -math.inf, 0])
@pytest.mark.parametrize("stage", range(4))
def test_the_optimizers_own_clipping_takes_torchs_norms(anywhere, rank, world, stage, norm_type):
    model = zero_ext.shard(small_mlp(), stage, mesh=anywhere)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    mean_square(model, rank_data((4, 5), rank)).backward()
    plain = small_mlp()
    for r in range(world):
        (mean_square(plain, rank_data((4, 5), r)) / world).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    norm = optimizer.clip_grad_norm_(0.01, norm_type)
    torch.testing.assert_close(norm.cpu(), expected.cpu(), rtol=1e-5, atol=1e-9)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad.float())


def test_arguments_of_the_optimizers_own_clipping(anywhere, rank):
    model = zero_ext.shard(small_mlp(), 1, mesh=anywhere)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    mean_square(model, rank_data((4, 5), rank)).backward()
    with pytest.raises(TypeError, match="norm_type must be a number, not True"):
        optimizer.clip_grad_norm_(1.0, True)
    norms = [optimizer.clip_grad_norm_(1e9, foreach=foreach) for foreach in (None, True, False)]
    assert norms[0] == norms[1] == norms[2]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.mul_(math.nan)
    for norm_type in (2.0, 3.0):
        with pytest.raises(RuntimeError, match="norm"):
            optimizer.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
