"""Ranks that zero gradients which other ranks lack, over a device's own backend."""

import contextlib

import pytest
import torch
from harness import assert_bits, needs_gathers_together, rank_data
from setups import everything
from test_uneven_on_a_backend import SGD, pytestmark, same_error, sharded_and_one
from uneven_steps import PlannedError, fail, loss_of

__all__ = ["pytestmark"]  # of all tests here

USED = (0, 1, 2)
BEFORE_ALL = ("loss", "forward")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "20")


def throw(model, x, where: str) -> None:
    """A forward and backward that throw, in ``where``."""
    x = x.clone().requires_grad_()
    hook = model.head.register_forward_pre_hook(fail) if where == "forward" else None
    with contextlib.suppress(PlannedError):
        loss = model(x, USED, fails=where == "stem").float().square().mean()
        if where == "loss":  # before the first gradient
            loss.register_hook(fail)
        if where == "input":  # when all parameters may have their gradients
            x.register_hook(fail)
        loss.backward()
    if hook is not None:
        hook.remove()


def steps_of_one(one, world: int, count: int) -> None:
    for k in range(count):
        for r in range(world):
            one.backward((rank_data((2, 7), r, k), USED, 1.0))
        one.optimizer.step()
        one.optimizer.zero_grad()


def run_step(model, optimizer, rank: int, k: int) -> str:
    """Returns what every rank raised."""
    raised = None
    try:
        loss_of(model, (rank_data((2, 7), rank, k), USED, 1.0)).backward()
        optimizer.step()
        torch.accelerator.synchronize()
    except RuntimeError as error:
        raised = error
    optimizer.zero_grad(set_to_none=True)
    return same_error(rank, raised)


@pytest.mark.world(min=2)
@pytest.mark.parametrize("zeroes", [True, False], ids=["zeroed", "kept"])
@pytest.mark.parametrize("where", ["loss", "forward", "stem", "input"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_a_backward_that_one_rank_lacks(mesh, rank, world, stage, where, zeroes):
    """One rank throws, and zeroes or not. The others run their backward, and zero its gradients."""
    model, optimizer, one = sharded_and_one(mesh, stage, nonfinite="step", **SGD)
    thrower = world - 1
    if rank == thrower:
        throw(model, rank_data((2, 7), rank, 5), where)
    else:
        loss_of(model, (rank_data((2, 7), rank, 5), USED, 1.0)).backward()
    if rank != thrower or zeroes:
        optimizer.zero_grad()
    error = run_step(model, optimizer, rank, 0)
    if where in BEFORE_ALL:
        others = ", ".join(str(r) for r in range(thrower))
        assert "step(): the ranks have finished different backwards since the last step" in error
        assert f"rank {others} called zero_grad() after a backward that another rank had" in error
    assert not error or run_step(model, optimizer, rank, 0) == ""
    assert run_step(model, optimizer, rank, 1) == ""
    steps_of_one(one, world, 2)
    assert_bits(everything(model, optimizer), everything(one.model, one.optimizer))


@pytest.mark.world(min=2)
@pytest.mark.parametrize("counts", [(1, 0), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("stage", [0, 2])
def test_zeroing_between_backwards_that_ranks_run_alone(mesh, rank, world, stage, counts):
    """Rank 0 has run other backwards than the others when all ranks zero."""
    model, optimizer, one = sharded_and_one(mesh, stage, nonfinite="step", **SGD)
    for k in range(counts[min(rank, 1)]):
        loss_of(model, (rank_data((2, 7), rank, 5, k), USED, 1.0)).backward()
    optimizer.zero_grad()
    error = run_step(model, optimizer, rank, 0)
    assert "step(): the ranks have finished different backwards since the last step" in error
    assert run_step(model, optimizer, rank, 0) == ""
    steps_of_one(one, world, 1)
    assert_bits(everything(model, optimizer), everything(one.model, one.optimizer))


@pytest.mark.world(min=2)
@pytest.mark.parametrize("where", ["loss", "forward", "stem", "input"])
def test_stage_3_needs_the_gathers_of_every_backward(mesh, rank, world, where, monkeypatch):
    """A rank that threw before them enters other units there: an error that stays."""
    needs_gathers_together()
    if where in BEFORE_ALL:
        monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "4")  # of gathers that no other rank enters
    model, optimizer, one = sharded_and_one(mesh, 3, nonfinite="step", **SGD)
    if rank == world - 1:
        throw(model, rank_data((2, 7), rank, 5), where)
    else:
        with contextlib.suppress(RuntimeError):
            loss_of(model, (rank_data((2, 7), rank, 5), USED, 1.0)).backward()
    optimizer.zero_grad()
    for _ in range(2 if where in BEFORE_ALL else 0):
        with contextlib.suppress(RuntimeError):  # also the backend's
            loss_of(model, (rank_data((2, 7), rank, 0), USED, 1.0)).backward()
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert "every rank must enter the same units" in same_error(rank, raised.value)
    if where not in BEFORE_ALL:
        assert run_step(model, optimizer, rank, 0) == ""
        steps_of_one(one, world, 1)
        assert_bits(everything(model, optimizer), everything(one.model, one.optimizer))
