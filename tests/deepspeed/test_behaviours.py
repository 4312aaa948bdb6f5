"""What DeepSpeed's users rely on, beside the calls: backwards, accumulation, torch.func."""

import torch
from harness import MLP, assert_bits, mean_square
from setups import train_batch
from test_initialize import STAGES, initialized
from torch import nn

import zero_ext
import zero_ext.deepspeed as deepspeed

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def engine_of(mesh, model, stage):
    return initialized(mesh, model, stage, SGD, gradient_accumulation_steps=1)


def assert_same(one, other):
    for p, q in zip(one.module.parameters(), other.module.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q))


@STAGES
def test_one_loss_of_two_engines(anywhere, rank, stage):
    together = [engine_of(anywhere, MLP(13), stage) for _ in range(2)]
    apart = [engine_of(anywhere, MLP(13), stage) for _ in range(2)]
    for step in range(2):
        batches = [train_batch(rank, step, micro) for micro in range(2)]
        losses = [mean_square(e, batch) for e, batch in zip(together, batches, strict=True)]
        sum(losses).backward()
        for engine in together:
            engine.step()
        for engine, batch in zip(apart, batches, strict=True):
            engine.backward(mean_square(engine, batch))
            engine.step()
    for one, other in zip(together, apart, strict=True):
        assert_same(one, other)


@STAGES
def test_a_backward_of_a_tensor(anywhere, rank, stage):
    engine, other = (engine_of(anywhere, MLP(13), stage) for _ in range(2))
    batch = train_batch(rank)
    output = engine(batch)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    output.backward(weights)
    engine.step()
    other.backward((other(batch) * weights).sum())
    other.step()
    assert_same(engine, other)


@STAGES
def test_functions_of_torch_func(anywhere, rank, stage):
    engine, plain = engine_of(anywhere, MLP(13), stage), MLP(13)
    batch = train_batch(rank)

    def of(module):
        return lambda x: module(x).square().sum()

    gradient, value = torch.func.grad_and_value(of(engine))(batch)
    expected, its_value = torch.func.grad_and_value(of(plain))(batch)
    torch.testing.assert_close((gradient, value), (expected, its_value))
    # They left nothing behind: the step is that of one backward.
    engine.backward(mean_square(engine, batch))
    engine.step()
    other = engine_of(anywhere, MLP(13), stage)
    other.backward(mean_square(other, batch))
    other.step()
    assert_same(engine, other)


class Checkpointed(nn.Module):
    """Blocks that are computed again, with a frozen weight and a trained one in each."""

    def __init__(self, again):
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 13).requires_grad_(False), nn.Tanh(), nn.Linear(13, 5))
            for _ in range(2)
        )
        self.again = again

    def forward(self, x):
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.again else block(x)
        return x


@STAGES
def test_checkpointed_blocks_with_frozen_parameters(anywhere, rank, stage):
    engine, other = (engine_of(anywhere, Checkpointed(again), stage) for again in (True, False))
    for each in (engine, other):
        for step in range(2):
            x = train_batch(rank, step).requires_grad_()
            each.backward(mean_square(each, x))
            each.step()
    assert not torch.equal(
        zero_ext.full_tensor(engine.blocks[0][2].weight), Checkpointed(True).blocks[0][2].weight
    )
    assert_same(engine, other)
