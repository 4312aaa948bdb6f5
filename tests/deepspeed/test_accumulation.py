"""Micro-batches: who says when a step is made, no_sync, and parameters that no loss reaches."""

import pytest
import torch
from harness import MLP, assert_bits, mean_square
from setups import train_batch
from test_initialize import STAGES, initialized
from torch import nn

import zero_ext

LR = 0.1
SGD = {"type": "SGD", "params": {"lr": LR}}


def assert_close(engine, plain) -> None:
    for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
        value = zero_ext.full_tensor(p).to(q.device)  # offloaded masters are in host memory
        torch.testing.assert_close(value, q.detach(), rtol=1e-5, atol=1e-6)


def ranks_of(mesh, rank):
    return [rank] if mesh is None else range(mesh.size())


@STAGES
def test_the_caller_says_when_a_step_is_made(anywhere, rank, stage):
    engine = initialized(
        anywhere, MLP(13), stage, SGD, managed_gradient_accumulation=False, steps_per_print=1
    )
    plain, ranks = MLP(13), ranks_of(anywhere, rank)
    torchs = torch.optim.SGD(plain.parameters(), lr=LR)
    samples = 0
    assert not engine.managed_gradient_accumulation()
    for step, backwards in enumerate([2, 1, 4]):  # of 3 that the file has
        for micro in range(backwards):
            assert not engine.is_gradient_accumulation_boundary()
            loss = mean_square(engine, train_batch(rank, step, micro))
            if micro == 0 or step == 0:
                engine.backward(loss)
            else:
                engine.backward(loss / 3, scale_wrt_gas=False)
            for peer in ranks:
                (mean_square(plain, train_batch(peer, step, micro)) / (3 * len(ranks))).backward()
        engine.step()
        torchs.step()
        torchs.zero_grad()
        samples += 4 * len(ranks) * backwards
        assert engine.was_step_applied() and engine.global_steps == engine.micro_steps == step + 1
        assert engine.global_samples == samples
        assert_close(engine, plain)
    with pytest.raises(RuntimeError, match=r"set_gradient_accumulation_boundary\(\) where config"):
        engine.set_gradient_accumulation_boundary(True)
    engine.set_train_batch_size(8 * len(ranks))  # no accumulation is ever in its middle
    assert engine.gradient_accumulation_steps() == 2


@STAGES
def test_the_file_says_when_a_step_is_made(anywhere, rank, stage):
    engine = initialized(anywhere, MLP(13), stage, SGD)
    applied = []
    for micro in range(6):
        engine.backward(mean_square(engine, train_batch(rank, 0, micro)))
        engine.step()
        applied.append((engine.was_step_applied(), engine.global_steps))
    assert applied == [(False, 0), (False, 0), (True, 1), (False, 1), (False, 1), (True, 2)]


@STAGES
def test_no_sync_inside_no_sync(anywhere, rank, stage):
    engine, flat = (
        initialized(anywhere, MLP(13), stage, SGD, gradient_accumulation_steps=1) for _ in range(2)
    )

    def backward(micro, engine=engine):
        engine.backward(mean_square(engine, train_batch(rank, 0, micro)))

    with engine.no_sync():
        backward(0)
        with engine.no_sync(), pytest.raises(RuntimeError, match=r"step\(\) inside no_sync\(\)"):
            backward(1)
            engine.step()
        with pytest.raises(RuntimeError, match=r"step\(\) inside no_sync\(\)"):  # the outer one
            engine.step()
        with pytest.raises(ZeroDivisionError), engine.no_sync():
            raise ZeroDivisionError
        backward(2)
    backward(3)
    engine.step()
    with flat.no_sync():
        for micro in range(3):
            backward(micro, flat)
    backward(3, flat)
    flat.step()
    for p, q in zip(engine.module.parameters(), flat.module.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q))
    plain, ranks = MLP(13), ranks_of(anywhere, rank)
    for micro in range(4):
        for peer in ranks:
            (mean_square(plain, train_batch(peer, 0, micro)) / len(ranks)).backward()
    torch.optim.SGD(plain.parameters(), lr=LR).step()
    assert_close(engine, plain)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.body = nn.Linear(5, 13)
        self.heads = nn.ModuleList(nn.Linear(13, 7) for _ in range(2))
        self.chosen = 0

    def forward(self, x):
        return self.heads[self.chosen](torch.tanh(self.body(x)))


@STAGES
@pytest.mark.parametrize("offload", [False, True])
def test_a_parameter_that_no_loss_reaches_may_be_an_error(anywhere, rank, stage, offload):
    zero = {"stage": stage, "ignore_unused_parameters": False}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    engine = initialized(
        anywhere, Heads(), stage, SGD, gradient_accumulation_steps=2, zero_optimization=zero
    )
    plain, ranks = Heads(), ranks_of(anywhere, rank)
    for micro in range(2):
        engine.backward(mean_square(engine, train_batch(rank, 0, micro)))
        if micro == 0:
            engine.step()  # none is made yet
    with pytest.raises(RuntimeError, match=r"has reached the parameter 'heads\.1\.weight'"):
        engine.step()
    # Nothing was changed, and each is reached by one micro-batch on one rank.
    engine.zero_grad()
    last = 0 if anywhere is None else anywhere.size() - 1
    for micro in range(2):
        engine.module.chosen = int(micro == 0 and rank == (last if anywhere is not None else rank))
        engine.backward(mean_square(engine, train_batch(rank, 1, micro)))
        for peer in ranks:
            plain.chosen = int(micro == 0 and peer == (last if anywhere is not None else peer))
            (mean_square(plain, train_batch(peer, 1, micro)) / (2 * len(ranks))).backward()
    engine.step()
    torch.optim.SGD(plain.parameters(), lr=LR).step()
    assert_close(engine, plain)
    engine.module.chosen = 0
    for p in engine.module.heads[1].parameters():
        p.requires_grad_(False)
    for micro in range(2):
        engine.backward(mean_square(engine, train_batch(rank, 2, micro)))
        engine.step()
    assert engine.global_steps == 2


@STAGES
def test_by_default_it_is_left_alone(anywhere, rank, stage):
    for zero in ({"stage": stage}, {"stage": stage, "ignore_unused_parameters": True}):
        engine = initialized(
            anywhere, Heads(), stage, SGD, gradient_accumulation_steps=1, zero_optimization=zero
        )
        engine.backward(mean_square(engine, train_batch(rank)))
        engine.step()
        for p, q in zip(engine.heads[1].parameters(), Heads().heads[1].parameters(), strict=True):
            assert_bits(zero_ext.full_tensor(p), q.detach())
