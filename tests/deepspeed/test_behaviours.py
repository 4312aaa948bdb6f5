"""What DeepSpeed's users rely on, beside the calls: backwards, leaf modules, torch.func."""

import pytest
import torch
from harness import MLP, assert_bits, mean_square
from setups import train_batch
from test_initialize import MICROS, STAGES, initialized
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


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("bf16", [False, True], ids=["", "bf16"])
@STAGES
def test_ranks_without_some_or_all_micro_batches_of_a_step(mesh, rank, world, stage, bf16):
    """Rank 0 has all of them. Every rank calls ``engine.step()`` equally often."""
    config = {"gradient_clipping": 0.2, "bf16": {"enabled": bf16}}
    engine = initialized(mesh, MLP(13), stage, SGD, **config)
    dtype, chance = engine.module.layers[0].weight.dtype, 0.02 if bf16 else 1e-5
    plain = MLP(13)
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    for step, rest in enumerate([(0, 1, 2), (0, 1), (1, 2), (0,), (2,), (), (0, 1, 2)]):
        for micro in range(MICROS):
            if rank == 0 or micro in rest:
                engine.backward(mean_square(engine, train_batch(rank, step, micro, dtype)))
            engine.step()
            for r in range(world):
                if r == 0 or micro in rest:
                    loss = mean_square(plain, train_batch(r, step, micro))
                    (loss / (MICROS * world)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        torch.testing.assert_close(engine.get_global_grad_norm(), norm.item(), rtol=chance, atol=0)
        reference.step()
        reference.zero_grad()
    assert engine.global_steps == step + 1
    for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
        value = zero_ext.full_tensor(p).float()
        torch.testing.assert_close(value, q.detach(), rtol=chance, atol=chance / 10)


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


class Experts(nn.Module):
    """A rank runs one of three experts; nobody runs the third."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.experts = nn.ModuleList(nn.Linear(5, 13) for _ in range(3))
        self.last = nn.Linear(13, 7)
        self.chosen = 0

    def forward(self, x):
        return self.last(torch.tanh(self.experts[self.chosen](x)))


@STAGES
def test_leaf_modules_of_which_each_rank_uses_another_part(anywhere, rank, stage):
    model = Experts()
    deepspeed.utils.set_z3_leaf_modules(model, [nn.ModuleList])
    model.chosen = rank % 2
    engine = engine_of(anywhere, model, stage)
    engine.backward(mean_square(engine, train_batch(rank)))
    engine.step()
    plain = Experts()
    peers = [rank] if anywhere is None else range(anywhere.size())
    for peer in peers:
        plain.chosen = peer % 2
        (mean_square(plain, train_batch(peer)) / len(peers)).backward()
    for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
        expected = q.detach() if q.grad is None else q.detach() - 0.1 * q.grad
        torch.testing.assert_close(zero_ext.full_tensor(p), expected, rtol=1e-5, atol=1e-6)


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
