"""Keywords of ``step`` reach the optimizer that is wrapped."""

import math

import pytest
import torch
from setups import (
    Way,
    assert_same_values,
    backward,
    backward_of_all,
    full_master,
    shard_and_optimizer,
    small_mlp,
)

import zero_ext
from zero_ext.optim.whole import Whole


class Scaled(torch.optim.Optimizer):
    """As published optimizers have it whose step gets the batch's size, a norm or a mode."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None, *, scale=1.0, mode="plain", clip=None, normalize=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad.sign() if mode == "sign" else p.grad
                if clip is not None:
                    update = update.clamp(-clip, clip)
                if normalize:
                    update = update / (update.abs().mean() + 1e-9)
                p.sub_(update * scale, alpha=group["lr"])


class Normalized(Scaled):
    """Not elementwise, so each parameter is updated whole by its owner."""

    def step(self, closure=None, *, scale=1.0, mode="plain", clip=None, normalize=True):
        return super().step(closure, scale=scale, mode=mode, clip=clip, normalize=normalize)


EITHER = pytest.mark.parametrize("kind", [Scaled, Normalized])
GIVEN = [
    {"scale": 3},
    {"scale": torch.tensor(0.5), "mode": "sign"},
    {"clip": 1e-3, "normalize": False},
    {},
]


def wrapped(model, way, group, kind=Scaled):
    def make(params, **kwargs):
        optimizer = zero_ext.optim.wrap(kind, params, **kwargs)
        assert isinstance(optimizer.zero_core.states, Whole) == (kind is Normalized)
        return optimizer

    return way.optimizer(model, group, make, lr=0.05)


@EITHER
@shard_and_optimizer
def test_scalars_count(team, way, kind):
    model, expected = small_mlp(), small_mlp()
    optimizer = wrapped(model, way, team.group, kind)
    reference = kind(expected.parameters(), lr=0.05)
    for step, keywords in enumerate(GIVEN):
        backward(model, team.rank, step)
        backward_of_all(expected, team.world, step)
        optimizer.step(**keywords)
        reference.step(**keywords)
        optimizer.zero_grad()
        reference.zero_grad()
    assert_same_values(model, expected)


WRONG = [
    (
        {"scale": torch.ones(7, 5)},
        r"step\(scale=…\) of a wrapped Scaled is a tensor of shape \(7, 5\)",
    ),
    ({"scale": [1.0, 2.0]}, r"step\(scale=…\) of a wrapped Scaled is a list"),
    (
        {"batch": 5},
        r"unexpected keyword argument 'batch'\. Its signature is step\(closure=None, \*,",
    ),
    ({"normalize": True}, r"Scaled with step\(normalize=True\) .* not elementwise"),
    ({"mode": 3.0, "clip": "x"}, r"Scaled with step\(mode=3.0, clip='x'\) cannot be sharded: the"),
]


@shard_and_optimizer
def test_what_cannot_be_honoured_is_refused_by_name(team, way):
    model = small_mlp()
    optimizer = wrapped(model, way, team.group)
    backward(model, team.rank)
    before = [full_master(p) for p in model.parameters()]
    for keywords, message in WRONG:
        for _ in range(2):
            with pytest.raises(TypeError, match=message):
                optimizer.step(**keywords)
    assert all(map(torch.equal, before, map(full_master, model.parameters())))
    optimizer.step(scale=1.5)
    assert not torch.equal(before[0], full_master(next(model.parameters())))


def test_owners_refuse_what_cannot_be_honoured_by_name(team):
    """As above. A mode that needs whole parameters is none of it."""
    model = small_mlp()
    optimizer = wrapped(model, Way("optimizer", 1), team.group, Normalized)
    backward(model, team.rank)
    before = [full_master(p) for p in model.parameters()]
    for keywords, message in (
        (
            {"scale": torch.ones(7, 5)},
            r"step\(scale=…\) of a wrapped Normalized is a tensor of shape",
        ),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, r"step\(grad_scaler=…\) .* is a GradScaler"),
        ({"batch": 5}, r"Normalized: got an unexpected keyword argument 'batch'\. Its signature"),
        (
            {"mode": 3.0, "clip": "x"},
            r"Normalized with step\(mode=3.0, clip='x'\) cannot be sharded",
        ),
    ):
        for _ in range(2):
            with pytest.raises(TypeError, match=message):
                optimizer.step(**keywords)
    assert all(map(torch.equal, before, map(full_master, model.parameters())))
    optimizer.step(normalize=True)
    assert not torch.equal(before[0], full_master(next(model.parameters())))


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.world(min=2)
@EITHER
@shard_and_optimizer
def test_scalars_that_differ_between_ranks_raise_on_all(group, rank, world, way, kind):
    model = small_mlp()
    optimizer = wrapped(model, way, group, kind)
    backward(model, rank)
    before = [full_master(p) for p in model.parameters()]
    for mine, shown in (
        ({"scale": 1.0 + rank}, r"'step\(scale=1.0\)' on rank 0, 'step\(scale=2.0\)' on rank 1"),
        ({"scale": torch.tensor(rank)}, r"'step\(scale=0\)' on rank 0, 'step\(scale=1\)'"),
        ({"clip": math.inf} if rank else {}, r"on rank 0, 'step\(clip=inf\)' on rank 1"),
        ({"mode": "sign" if rank else "plain"}, r"'step\(mode=plain\)' on rank 0, 'step\(mo"),
    ):
        with pytest.raises(ValueError, match=f"settings of the optimizers differ.*{shown}"):
            optimizer.step(**mine)
    assert all(map(torch.equal, before, map(full_master, model.parameters())))
    optimizer.step(scale=1.5)
    optimizer.step()
