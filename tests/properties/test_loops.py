"""Training loops that exist already, unchanged but for the optimizer, against one plain process.

torch's own GradScaler, autocast, clipping, schedulers and closures, with other data on each rank.
Both sides run the same lines; the reference sees every rank's batches one after the other.
"""

import pytest
import torch
from harness import Team, assert_bits, gather_objects, mean_square
from reference import OneProcess, fma_gradients
from setups import (
    Way,
    add_gradients,
    all_ways,
    assert_same_gradients,
    assert_same_values,
    everything,
    full,
    full_master,
    shard_and_optimizer,
    small_mlp,
    train_batch,
    values_of,
)
from torch import nn

import zero_ext

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LR = 0.05
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


class Loop:
    """A sharded model and a plain one, each with an optimizer and a stock GradScaler."""

    def __init__(self, way: Way, team, dtype=None, scale: float = 2.0**10, growth_interval=2000):
        self.team, self.dtype = team, dtype
        self.model, self.expected = small_mlp(), small_mlp()
        self.optimizer = way.optimizer(self.model, team.group, lr=LR)
        self.reference = torch.optim.AdamW(self.expected.parameters(), lr=LR)
        self.scaler, self.expected_scaler = (
            torch.amp.GradScaler(
                torch.get_default_device().type, init_scale=scale, growth_interval=growth_interval
            )
            for _ in range(2)
        )

    @property
    def sides(self):
        return (
            (self.model, self.optimizer, self.scaler),
            (self.expected, self.reference, self.expected_scaler),
        )

    def loss(self, model, rank: int, step: int, micro: int = 0, factor: float = 1.0):
        with torch.autocast(
            torch.get_default_device().type, self.dtype, enabled=self.dtype is not None
        ):
            return mean_square(model, factor * train_batch(rank, step, micro))

    def backward(self, step: int, micro: int = 0, factors=None) -> None:
        """Of one micro-batch on both sides; ``factors`` makes some ranks' inputs larger."""
        factors = factors or [1.0] * self.team.world
        rank = self.team.rank
        self.scaler.scale(self.loss(self.model, rank, step, micro, factors[rank])).backward()
        for r, factor in enumerate(factors):
            loss = self.expected_scaler.scale(self.loss(self.expected, r, step, micro, factor))
            add_gradients(self.expected, loss, 1 / self.team.world)

    def align(self) -> None:
        """Go on from equal values: autocast may round the last place to half precision's next."""
        with torch.no_grad():
            for name, value in values_of(self.model).items():
                self.expected.get_parameter(name).copy_(value)

    def check(self) -> None:
        assert self.scaler.get_scale() == self.expected_scaler.get_scale()
        assert_same_values(self.model, self.expected)


@DTYPES
@all_ways
def test_scaler_autocast_clipping_and_a_scheduler(team, way, dtype):
    loop = Loop(way, team, dtype, growth_interval=2)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=LR, total_steps=8)
        for o in (loop.optimizer, loop.reference)
    ]
    for step in range(4):
        for micro in range(2):
            loop.backward(step, micro)
        norms = []
        for model, optimizer, scaler in loop.sides:
            scaler.unscale_(optimizer)
            norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)  # order of summation
        assert loop.optimizer.param_groups[0]["lr"] == loop.reference.param_groups[0]["lr"]
        loop.check()
        loop.align()
    assert loop.scaler.get_scale() == 2.0**12


@pytest.mark.parametrize("bad_rank", [0, -1], ids=["first-rank", "last-rank"])
@all_ways
def test_an_overflow_on_one_rank_skips_the_step_on_all(team, way, bad_rank):
    """A loss of one rank grows until its fp16 gradients overflow; then training goes on."""
    loop = Loop(way, team, F16, growth_interval=1)
    bad_rank %= team.world
    scales = []
    for step in range(5):
        overflows = step in (1, 3)
        factors = [3e3 if overflows and r == bad_rank else 1.0 for r in range(team.world)]
        loop.backward(step, factors=factors)
        before = everything(loop.model, loop.optimizer)
        for _, optimizer, scaler in loop.sides:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(loop.scaler.get_scale())
        assert loop.scaler.get_scale() == loop.expected_scaler.get_scale()
        for old, new in zip(before, everything(loop.model, loop.optimizer), strict=True):
            if overflows:
                assert_bits(new, old)
        loop.check()
        loop.align()
    assert scales == [2.0**11, 2.0**10, 2.0**11, 2.0**10, 2.0**11]
    assert [int(loop.optimizer.state[p]["step"]) for p in loop.model.parameters()] == [3] * 6
    if team.group is not None:
        assert gather_objects(scales, team.group) == [scales] * team.world


@all_ways
def test_a_step_with_a_closure(team, way):
    loop = Loop(way, team)
    losses = []

    def closure():
        loop.optimizer.zero_grad()
        loss = loop.loss(loop.model, team.rank, len(losses))
        loss.backward()
        return loss.detach()

    def expected_closure():
        loop.reference.zero_grad()
        every = [loop.loss(loop.expected, r, len(losses)) for r in range(team.world)]
        for loss in every:
            add_gradients(loop.expected, loss, 1 / team.world)
        return every[team.rank].detach()

    for _ in range(3):
        pair = loop.optimizer.step(closure), loop.reference.step(expected_closure)
        losses.append(pair)
        torch.testing.assert_close(*pair, rtol=1e-5, atol=0)  # values differ in their last place
    loop.check()


@all_ways
def test_zero_grad_that_keeps_the_gradients(team, way):
    loop = Loop(way, team)
    for step in range(3):
        for _, optimizer, _ in loop.sides:
            optimizer.zero_grad(set_to_none=False)
        assert step == 0 or all(full(p.grad).eq(0).all() for p in loop.model.parameters())
        loop.backward(step)
        for _, optimizer, scaler in loop.sides:
            scaler.step(optimizer)
            scaler.update()
    loop.check()


@pytest.mark.parametrize("when", ["before", "after"])
@all_ways
def test_clipping_before_and_after_unscale(team, way, when):
    """Before, the limit is in the unit of the scaled gradients."""
    loop = Loop(way, team)
    for step in range(3):
        loop.backward(step)
        norms = []
        for model, optimizer, scaler in loop.sides:
            if when == "after":
                scaler.unscale_(optimizer)
            limit = 0.05 * (scaler.get_scale() if when == "before" else 1)
            norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), limit)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=0)
    loop.check()


@shard_and_optimizer
def test_clipping_by_value_and_the_total_norm(team, way):
    loop = Loop(way, team)
    loop.backward(0)
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        norms = [
            full(nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type))
            for model in (loop.model, loop.expected)
        ]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)  # order of summation
    for model, optimizer, scaler in loop.sides:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert_same_gradients(loop.model, loop.expected)
    for _, optimizer, scaler in loop.sides:
        scaler.step(optimizer)
        scaler.update()
    loop.check()


@pytest.mark.dist
@pytest.mark.world(min=2)
@all_ways
def test_gradients_are_inspected_with_full_tensor(group, rank, world, way):
    loop = Loop(way, Team(rank, world, group))
    for step in range(2):
        loop.backward(step)
        for mine, theirs in zip(loop.model.parameters(), loop.expected.parameters(), strict=True):
            gradient = mine.grad.full_tensor()
            assert gradient.shape == mine.shape and gradient.dtype == F32
            torch.testing.assert_close(gradient, theirs.grad, rtol=1e-4, atol=5e-3)
        for _, optimizer, scaler in loop.sides:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    loop.check()


EDITS = {
    "scaled": lambda p: p.grad.mul_(0.25),
    "decayed": lambda p: p.grad.add_(0.5),
    "clamped": lambda p: p.grad.clamp_(-0.02, 0.02),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 3.0),
    "zeroed": lambda p: p.grad.zero_(),
}


@pytest.mark.parametrize("edit", list(EDITS))
@shard_and_optimizer
def test_gradients_edited_in_place_after_unscale(team, way, edit):
    loop = Loop(way, team)
    for step in range(3):
        loop.backward(step)
        for model, optimizer, scaler in loop.sides:
            scaler.unscale_(optimizer)
            EDITS[edit](model.layers[1].weight)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    loop.check()


@all_ways
def test_an_fp16_model_with_a_stock_scaler(team, way):
    """Gradients are fp16 at the loss's scale; sums and masters are fp32."""
    scale = 2.0**8
    model = small_mlp(F16)
    reference = OneProcess(small_mlp(F16), lambda p: torch.optim.AdamW(p, lr=LR))
    optimizer = way.optimizer(model, team.group, lr=LR)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=scale)

    def scaled_loss(m, batch):
        return scale * mean_square(m, batch)

    for step in range(3):
        batches = [[train_batch(r, step, 0, F16) for r in range(team.world)]]
        gradients = fma_gradients(reference.model, batches, team.world * scale, scaled_loss)
        scaler.scale(mean_square(model, batches[0][team.rank])).backward()
        scaler.unscale_(optimizer)
        for name, parameter in model.named_parameters():
            assert_bits(full(parameter.grad), gradients[name], name)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        reference.step(gradients)
        for name, parameter in model.named_parameters():
            # One update of AdamW, a few roundings relative to it.
            torch.testing.assert_close(
                full_master(parameter), reference.masters[name], rtol=1e-6, atol=1e-6
            )
        # One ulp of a master may be one of an fp16 weight: go on from the same ones.
        with torch.no_grad():
            for name, value in values_of(model).items():
                reference.parameters[name].copy_(value)
    assert zero_ext.stats(optimizer)["skipped_steps"] == 0
