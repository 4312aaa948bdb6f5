"""States of wrapped optimizers that have no value for each element must be equal on all ranks.

The trial has 12 steps: each of these states appears only after them.
"""

import copy

import pytest
import torch
from harness import assert_bits, mean_square, rank_data
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
    """A scale for every 256 elements of large parts, as 8-bit optimizers have, after a warm-up."""

    def late(self, p, state, step):
        if p.numel() > 8192 and step > 12:
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


class Powers(Late):
    """Of two numbers, as many as some parts have elements."""

    def late(self, p, state, step):
        powers = state.setdefault("powers", p.new_ones(2))
        powers *= p.new_tensor([0.5, 0.25])
        p.mul_(powers.sum())


class LatePowers(Powers):
    def late(self, p, state, step):
        if step > 2:
            super().late(p, state, step)


class Lookahead(Late):
    """Slow weights, from the third step on (Zhang et al. 2019)."""

    def late(self, p, state, step):
        if step > 2:
            p.copy_(state.setdefault("slow", p.clone()).lerp_(p, 0.5))


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
            13,
            r"'absmax' of 'linear.weight': \S+ \(42,\) .* on rank 0, .* rank 1",
        ),
        (Statistic, 13, r"'clip' of 'linear.weight': [\d.e-]+' on rank 0, .* on rank 1"),
        (
            OnOneRank,
            14,
            r"'large' of 'linear.weight': {since: \[14, None\]}' on rank 0, 'nothing' on .* 1",
        ),
        (Named, 13, r"'norm': [\d.e-]+ torch.float32 \(\)' on rank 0, .* on rank 1"),
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
        assert optimizer.zero_core.settings.new_states  # which the next step compares
        steps(model, optimizer, rank, 1)
        assert not optimizer.zero_core.settings.new_states
        steps(model, optimizer, rank, 13)
        assert all(float(optimizer.state[p]["step"]) == 15 for p in model.parameters())
        other = model_and_optimizer(kind, mesh, stage)
        other[1].load_state_dict(optimizer.state_dict())
        steps(*other, rank, 2)
        assert all(float(other[1].state[p]["step"]) == 17 for p in other[0].parameters())


@pytest.mark.parametrize("kind", [Powers, LatePowers, Lookahead])
def test_what_a_state_is_does_not_depend_on_the_size_of_a_part(anywhere, rank, world, kind):
    """Of these shapes some have as many elements as a state, or as a rank's part of another."""
    shapes = {"scale": (), "pair": (2,), "four": (4,), "matrix": (3, 3)}

    def made() -> nn.ParameterDict:
        return nn.ParameterDict({n: nn.Parameter(torch.ones(s)) for n, s in shapes.items()})

    def train(model, optimizer, gradient: float) -> None:
        for step in range(2, 4):
            (sum(p.sum() for p in model.values()) * (gradient * step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, plain = zero_ext.shard(made(), 1, mesh=anywhere), made()
    ranks = 1 if anywhere is None else world
    expected, saved = kind(plain.values()), None
    for _ in range(3):
        optimizer = zero_ext.optim.wrap(kind, model.parameters())
        if saved is not None:
            optimizer.load_state_dict(saved)
        train(model, optimizer, rank + 1.0)
        train(plain, expected, (ranks + 1) / 2)  # the average over the ranks
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.retire()
    for i, (name, parameter) in enumerate(model.items()):
        assert_bits(zero_ext.full_tensor(parameter), plain[name].detach(), name)
        for state, value in expected.state_dict()["state"][i].items():
            ours = saved["state"][i][state]
            ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
            assert_bits(ours, value, f"{state} of {name}")
