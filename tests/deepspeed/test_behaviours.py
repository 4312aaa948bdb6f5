"""What DeepSpeed's users rely on, beside the calls: backwards, accumulation, torch.func."""

import contextlib

import pytest
import torch
from harness import MLP, OWN_BACKEND, assert_bits, mean_square
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
    if OWN_BACKEND and stage < 2:
        pytest.skip("there every rank runs the last backward of those that accumulate")
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


TRANSFORMS = {
    "grad": lambda of: torch.func.grad(lambda x: of(x).square().sum()),
    "grad_and_value": lambda of: torch.func.grad_and_value(lambda x: of(x).square().sum()),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "jacrev of grad": lambda of: torch.func.jacrev(torch.func.grad(lambda x: of(x).sum())),
    "vmap": torch.func.vmap,
    "vmap of grad": lambda of: torch.func.vmap(torch.func.grad(lambda x: of(x).square().sum())),
    "vjp": lambda of: lambda x: torch.func.vjp(of, x)[1](torch.ones(4, 5)),
    "jvp": lambda of: lambda x: torch.func.jvp(of, (x,), (torch.ones(4, 5),)),
}


ON_STAGES = [
    pytest.param(stage, name, marks=() if stage == 3 or name == "grad" else pytest.mark.slow)
    for stage in (0, 1, 2, 3)
    for name in TRANSFORMS
]


@pytest.mark.parametrize(("stage", "transform"), ON_STAGES)
def test_functions_of_torch_func(anywhere, rank, stage, transform):
    """Nothing divides their results by the accumulation steps, and they leave nothing behind."""
    engine, other = (
        initialized(anywhere, MLP(13), stage, SGD, gradient_accumulation_steps=2) for _ in range(2)
    )
    batch, plain = train_batch(rank), MLP(13)
    if transform in ("jacfwd", "jvp") and batch.device.type == "lagged":
        pytest.skip("a plain module crashes there")
    made = TRANSFORMS[transform]
    whole = contextlib.nullcontext()
    if stage == 3 and transform == "jacrev of grad":  # a double backward
        whole = engine.module.summon_full_params(writeback=False)
    with whole:
        found = made(engine)(batch)
    torch.testing.assert_close(found, made(plain)(batch), rtol=1e-5, atol=1e-6)
    for each in (engine, other):
        for micro in range(2):
            if each is engine and micro == 1:  # between two micro-batches
                torch.func.grad(lambda x: engine(x).square().sum())(batch)
            each.backward(mean_square(each, train_batch(rank, 0, micro)))
            each.step()
    assert_same(engine, other)


@STAGES
def test_a_functional_call_with_other_parameters(anywhere, rank, stage):
    engine, plain, batch = engine_of(anywhere, MLP(13), stage), MLP(13), train_batch(rank)
    others = {
        name: torch.linspace(-1, 1, p.numel()).view_as(p) for name, p in plain.named_parameters()
    }

    def loss_of(module):
        return lambda values: torch.func.functional_call(module, values, (batch,)).square().sum()

    found = torch.func.grad_and_value(loss_of(engine.module))(others)
    torch.testing.assert_close(found, torch.func.grad_and_value(loss_of(plain))(others))


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
