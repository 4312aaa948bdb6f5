"""States of wrapped optimizers that have no value for each element must be equal on all ranks.

The trial has 12 steps and at most 8,192 elements: each of these states appears only after that.
"""

import pytest
import torch
from harness import mean_square, rank_data
from own_optimizers import EachByItself
from setups import values_of
from torch import nn

import zero_ext


class Late(EachByItself):
    """SGD, which counts its steps and makes more states in ``late``."""

    def update(self, p, state, group):
        state["step"] = state.get("step", torch.zeros(1)) + 1
        self.late(p, state, int(state["step"]))
        p.sub_(p.grad, alpha=group["lr"])


class BlockScales(Late):
    """A scale for every 256 elements of large parts, as 8-bit optimizers have."""

    def late(self, p, state, step):
        if p.numel() > 8192:
            state["absmax"] = torch.stack([part.abs().max() for part in p.grad.split(256)])


class Statistic(Late):
    """A number that depends on all elements of a part, from the 13th step on."""

    def late(self, p, state, step):
        if step > 12:
            state["clip"] = p.grad.norm().item()


class OnOneRank(Late):
    """A flag of parts that are larger than the other rank's, from the 14th step on."""

    def late(self, p, state, step):
        if step > 13 and p.numel() > 10_600:
            state["large"] = {"since": [step, None]}


class Named(Late):
    """A statistic of all parameters under a name."""

    def late(self, p, state, step):
        if step > 12:
            self.state["norm"] = self.state.get("norm", 0) + p.grad.sum()


class Equal(Late):
    """What appears late is equal on all ranks."""

    def late(self, p, state, step):
        self.state["text"] = "warm" if step > 12 else "cold"
        if step > 12:
            state["text"] = {
                "warm": True,
                "rates": (0.5, torch.tensor([1.0, 2.0])),
                "nothing": None,
            }


class Model(nn.Module):
    """Each rank has more than 8,192 elements of the weight, and one has all of the scale."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(151, 140)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.linear(x) * self.scale


def model_and_optimizer(kind, mesh, stage):
    model = zero_ext.shard(Model(), stage, mesh=mesh)
    return model, zero_ext.optim.wrap(kind, model.parameters(), lr=0.01)


def steps(model, optimizer, rank, count):
    for step in range(count):
        mean_square(model, rank_data((2, 151), rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.world(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_differs_between_ranks_is_rejected_by_name_when_it_appears(mesh, rank, stage):
    for kind, after, message in (
        (
            BlockScales,
            1,
            r"'absmax' of 'linear.weight': \S+ \(42,\) .* on rank 0 and .* rank 1",
        ),
        (Statistic, 13, r"'clip' of 'linear.weight': [\d.e-]+' on rank 0 and .* on rank 1"),
        (
            OnOneRank,
            14,
            r"'large' of 'linear.weight': {since: \[14, None\]}' on rank 0 and 'nothing' on .* 1",
        ),
        (Named, 13, r"'norm': [\d.e-]+ torch.float32 \(\)' on rank 0 and .* on rank 1"),
    ):
        model, optimizer = model_and_optimizer(kind, mesh, stage)
        steps(model, optimizer, rank, after)
        before = values_of(model)
        for _ in range(2):  # it stays an error
            with pytest.raises(ValueError, match=f"no value for each element.*{message}.*stage 0"):
                steps(model, optimizer, rank, 1)
            optimizer.zero_grad()
        assert all(torch.equal(before[name], value) for name, value in values_of(model).items())


@pytest.mark.dist
def test_equal_states_and_those_of_stage_0_may_appear_at_any_time(mesh, rank):
    """A count in a tensor of one element is none of a parameter of one element."""
    for kind, stage in ((Equal, 1), (Equal, 3), (BlockScales, 0), (Statistic, 0)):
        model, optimizer = model_and_optimizer(kind, mesh, stage)
        steps(model, optimizer, rank, 1)
        assert optimizer._settings.states.hash() != 0  # which the next step compares
        steps(model, optimizer, rank, 1)
        assert optimizer._settings.states.hash() == 0
        steps(model, optimizer, rank, 13)
        assert all(float(optimizer.state[p]["step"]) == 15 for p in model.parameters())
        other = model_and_optimizer(kind, mesh, stage)
        other[1].load_state_dict(optimizer.state_dict())
        steps(*other, rank, 2)
        assert all(float(other[1].state[p]["step"]) == 17 for p in other[0].parameters())
