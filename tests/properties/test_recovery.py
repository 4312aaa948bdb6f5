"""After an error that was caught the objects are usable and nothing is lost: failures that autograd
does not tell of, failures on one rank alone, refusals that are mended."""

import contextlib
import os
import subprocess
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from harness import (
    GATHERS_TOGETHER,
    MLP,
    assert_bits,
    gather_objects,
    mean_square,
    needs_own_gathers,
    rank_batches,
    rank_data,
    reference_gradients,
    step_and_wait,
)
from launching import run_on_ranks
from setups import full_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import zero_ext
from zero_ext.engine.registry import find

SHAPE = (3, 8)
MLP_SHAPE = (3, 5)
ON_HOST = os.environ.get("ZERO_EXT_TEST_DEVICE", "cpu") == "cpu"
at_least_two_ranks = pytest.mark.world(min=2)


def assert_same(actual: dict, expected: dict) -> None:
    """Gradients by name, up to the rounding of an average over three ranks."""
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def raise_late(_gradient):
    raise ValueError("a user's hook")


class Checkpoints(nn.Module):
    """All parameters lie in reentrant checkpoints: no hook of ours runs in the outer backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x, fails: bool = False):
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        if fails:
            x.register_hook(raise_late)  # after the second checkpoint's inner backward
        return checkpoint(self.second, x, use_reentrant=True)


def save(model, _optimizer, folder):
    zero_ext.checkpoint.save(folder / "checkpoint", model)


def forward_without_reducing(model, _optimizer, _folder):
    with model.no_sync():
        model(rank_data(SHAPE, 0))


VERBS = {
    "backward": lambda model, optimizer, folder: None,
    "forward": lambda model, optimizer, folder: model(rank_data(SHAPE, 0)),
    "no_sync": forward_without_reducing,
    "step": lambda model, optimizer, folder: optimizer.step(),
    "zero_grad": lambda model, optimizer, folder: optimizer.zero_grad(),
    "zero_grad of the model": lambda model, optimizer, folder: model.zero_grad(),
    "clip_grad_norm_": lambda model, optimizer, folder: optimizer.clip_grad_norm_(1.0),
    "torch's clip_grad_norm_": lambda model, optimizer, folder: nn.utils.clip_grad_norm_(
        model.parameters(), 1.0
    ),
    "stats": lambda model, optimizer, folder: model.stats(),
    "state_dict": lambda model, optimizer, folder: model.state_dict(),
    "optimizer's state_dict": lambda model, optimizer, folder: optimizer.state_dict(),
    "full_grad": lambda model, optimizer, folder: zero_ext.full_grad(next(model.parameters())),
    "full_params": lambda model, optimizer, folder: model.summon_full_params().__enter__(),
    "checkpoint": save,
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("then", VERBS)
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_failure_right_after_an_inner_backward_is_undone(stage, then, trained_before, tmp_path):
    """Whatever is called next, and then the next backward."""
    model = zero_ext.shard(Checkpoints(), stage)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    if trained_before:
        mean_square(model, rank_data(SHAPE, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="a user's hook"):
        model(rank_data(SHAPE, 0), fails=True).sum().backward()
    VERBS[then](model, optimizer, tmp_path)
    batches = rank_batches(SHAPE, 1)
    mean_square(model, batches[0][0]).backward()
    assert_same(full_gradients(model), reference_gradients(Checkpoints, batches, 1))


def test_such_a_failure_is_undone_where_an_optimizer_alone_was_sharded():
    """It sees no forward."""
    model = Checkpoints()
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0, stage=1)
    with pytest.raises(ValueError, match="a user's hook"):
        model(rank_data(SHAPE, 0), fails=True).sum().backward()
    batches = rank_batches(SHAPE, 1)
    mean_square(model, batches[0][0]).backward()
    assert_same(full_gradients(model), reference_gradients(Checkpoints, batches, 1))
    optimizer.step()


class TriesAnInnerBackward(torch.autograd.Function):
    """Its backward runs another one, which throws, and goes on without it."""

    @staticmethod
    def forward(ctx, x, inner):
        ctx.inner = inner
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.inner[0](x.detach())
            y.register_hook(raise_late)
            with contextlib.suppress(ValueError):
                ctx.inner[1](y).square().sum().backward()
        return grad, None


def test_an_inner_failure_that_is_caught_ends_the_outer_backward():
    """It has undone the outer one's gradients so far, which must not be lost without a word."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.stem = nn.Linear(8, 8)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.head = nn.Linear(8, 8)

        def forward(self, x, tries: bool = True):
            x = self.stem(x)
            return self.head(TriesAnInnerBackward.apply(x, self.inner) if tries else x)

    model, plain = zero_ext.shard(Model(), 1), Model()
    with pytest.raises(RuntimeError, match=r"\[rank 0\]: backward: an inner backward .* threw"):
        model(rank_data(SHAPE, 0)).sum().backward()
    for each in (model, plain):
        each(rank_data(SHAPE, 0), tries=False).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same(full_gradients(model), expected)


def test_no_memory_for_a_second_micro_batch_leaves_the_first(monkeypatch):
    """Each unit copies its sum before it is added to; half of the copies fit."""
    numel = 64 * 64
    limit = 4 * (4 * numel + 4 * numel) + 2 * 4 * numel  # parameters, sums, two copies
    monkeypatch.setenv("ZERO_EXT_LIMIT_BYTES", str(limit))
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    model = zero_ext.shard(nn.Sequential(*layers), 1, bucket_mb=4 * numel / 2**20)
    assert model.stats()["units"] == 4
    batch = rank_data((2, 64), 0)
    mean_square(model, batch).backward()
    first = full_gradients(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ZERO_EXT_LIMIT_BYTES"):
            mean_square(model, batch).backward()
        assert_same(full_gradients(model), first)
    # What was copied then is no copy of what the sums are now.
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    edited = full_gradients(model)
    monkeypatch.undo()
    layers[0].register_forward_hook(lambda *_: _[-1].register_hook(raise_late) and None)
    with pytest.raises((RuntimeError, ValueError)):
        mean_square(model, batch).backward()
    assert_same(full_gradients(model), edited)


@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 2])
def test_backwards_of_several_threads_are_added_up(stage):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])

    model, plain = zero_ext.shard(make(), stage), make()
    errors = []

    def run(each, k):
        try:
            for _ in range(10):
                each(torch.full((2, 16), float(k + 1))).sum().backward()
        except Exception as error:
            errors.append(error)

    for each in (model, plain):
        threads = [threading.Thread(target=run, args=(each, k)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad, rtol=1e-4, atol=1e-4)


READER_BESIDE_TRAINING = """
import threading, torch, zero_ext
from torch import nn
torch.set_num_threads(1)
model = zero_ext.shard(nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]), 1)
for p in model.parameters():  # a gradient that Python has seen is let go with the GIL
    p.register_post_accumulate_grad_hook(lambda p: (p.grad, None)[1])
stop = False
def read():
    while not stop:
        with model.summon_full_params():
            pass
thread = threading.Thread(target=read, daemon=True)
thread.start()
for _ in range(100):
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()
stop = True
thread.join()
print("READ AND TRAINED")
"""


def test_a_thread_that_reads_does_not_block_one_that_trains(tmp_path):
    (tmp_path / "script.py").write_text(READER_BESIDE_TRAINING)
    result = run_on_ranks(
        1, str(tmp_path / "script.py"), cwd=Path(__file__).parents[2], timeout_s=60
    )
    assert "READ AND TRAINED" in result.stdout, result.stderr[-3000:]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_that_is_thawed_by_an_inference_can_be_trained(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(False)
    zero_ext.shard(model, stage)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    model[1].requires_grad_(True)
    with torch.inference_mode():
        model(rank_data(SHAPE, 0))
    assert not any(p.is_inference() for p in model.parameters())
    before = zero_ext.full_tensor(model[1].weight).clone()
    mean_square(model, rank_data(SHAPE, 0)).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert not torch.equal(zero_ext.full_tensor(model[1].weight), before)


# Several ranks


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micros_before", [0, 1])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_backward_that_threw_late_on_one_rank_is_in_no_step(
    stage, micros_before, optimizers, mesh, rank, world
):
    """The other ranks had all of it: their sums have a micro-batch that this rank's lack."""
    model = zero_ext.shard(MLP(), stage, mesh=mesh)
    parameters = list(model.parameters())
    optimizer = zero_ext.optim.SGD(parameters[optimizers - 1 :], lr=0.5)
    second = zero_ext.optim.SGD(parameters[:1], lr=0.5) if optimizers == 2 else None
    before = [zero_ext.full_tensor(p).clone() for p in model.parameters()]
    batches = rank_batches(MLP_SHAPE, world, micros=micros_before + 1)

    def one(micro, fails=False):
        batch = batches[micro][rank].clone().requires_grad_()
        loss = mean_square(model, batch * 1)
        if fails and rank == 0:
            batch.register_hook(raise_late)
        loss.backward()

    for micro in range(micros_before):
        one(micro)
    if rank == 0:
        with pytest.raises(ValueError, match="a user's hook"):
            one(micros_before, fails=True)
    else:
        one(micros_before)
    mine, other = (0, 1) if rank == 0 else (1, 0)
    numbers = f"finished {micros_before + mine}, rank {other} {micros_before + other}"
    told = rf" .* {numbers}\." if ON_HOST else ""
    with pytest.raises(RuntimeError, match=f"finished different backwards{told}"):
        optimizer.step()
        optimizer.zero_grad()
        _ = optimizer.skipped_steps  # a device tells later
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert_bits(zero_ext.full_tensor(parameter), value)
    optimizer.zero_grad()
    if second is not None:
        second.zero_grad()
    for micro in range(micros_before + 1):
        one(micro)
    assert_same(full_gradients(model), reference_gradients(MLP, batches, world, 1 / world))
    optimizer.step()


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_as_many_backwards_that_are_not_the_same_are_in_no_step(stage, mesh, rank, world):
    """In each micro-batch another rank's threw late: every rank has finished all but one."""
    model = zero_ext.shard(MLP(), stage, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    before = [zero_ext.full_tensor(p).clone() for p in model.parameters()]
    for micro, ranks in enumerate(rank_batches(MLP_SHAPE, world, micros=world)):
        batch = ranks[rank].clone().requires_grad_()
        loss = mean_square(model, batch * 1)
        if micro == rank:
            batch.register_hook(raise_late)
        with pytest.raises(ValueError) if micro == rank else contextlib.nullcontext():
            loss.backward()
        gather_objects(rank)
    told = rf" has finished {world - 1}, rank \d {world - 1} others\." if ON_HOST else ""
    with pytest.raises(RuntimeError, match=f"finished different backwards.*{told}"):
        optimizer.step()
        optimizer.zero_grad()
        _ = optimizer.skipped_steps  # a device tells later
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert_bits(zero_ext.full_tensor(parameter), value)
    optimizer.zero_grad()
    batches = rank_batches(MLP_SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    assert_same(full_gradients(model), reference_gradients(MLP, batches, world, 1 / world))
    optimizer.step()


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("way", ["module", "each"])
def test_sums_may_be_dropped_in_any_way_after_ranks_fell_out_of_step(
    stage, way, group, rank, world
):
    """A backward threw late on one rank; then zeroed without a word to the optimizer."""
    model = MLP()
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5, stage=stage, process_group=group)
    batches = rank_batches(MLP_SHAPE, world)
    for attempt in range(2):
        batch = batches[0][rank].clone().requires_grad_()
        loss = mean_square(model, batch * 1)
        if rank == 0 and attempt == 0:
            batch.register_hook(raise_late)
            with pytest.raises(ValueError, match="a user's hook"):
                loss.backward()
        else:
            loss.backward()
        if attempt == 0 and way == "module":
            model.zero_grad()
        elif attempt == 0:
            for parameter in model.parameters():
                parameter.grad = None
    assert_same(full_gradients(model), reference_gradients(MLP, batches, world, 1 / world))
    step_and_wait(optimizer)
    assert optimizer.skipped_steps == 0


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("clips", [False, True])
def test_a_step_of_one_of_two_optimizers_may_pass_a_rank_by(stage, clips, mesh, rank, world):
    """Each step has a backward of its own, which some ranks lack."""
    needs_own_gathers(stage)
    model = zero_ext.shard(MLP(), stage, mesh=mesh)
    first, *others = model.parameters()
    optimizers = [zero_ext.optim.SGD([first], lr=0.0), zero_ext.optim.SGD(others, lr=0.0)]
    for step in range(6):
        batches = rank_batches(MLP_SHAPE, world, step)
        # All ranks, then all but the last, then the last alone.
        ranks = [range(world), range(world - 1), [world - 1]][step // 2]
        if rank in ranks:
            mean_square(model, batches[0][rank]).backward()
        optimizer = optimizers[step % 2]
        if clips:
            optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        expected = reference_gradients(MLP, [[batches[0][r] for r in ranks]], len(ranks), 1 / world)
        assert_same(full_gradients(model), expected)
        for each in optimizers:
            each.zero_grad()
    assert model.stats()["steps"] == 6


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_nan_of_a_backward_that_was_undone_is_forgotten(stage, mesh, rank, world):
    """Of several units, so that some were reduced when it threw."""
    model = zero_ext.shard(MLP(), stage, mesh=mesh, bucket_mb=1e-6)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    batches = rank_batches(MLP_SHAPE, world)
    spoilt = batches[0][rank].clone().requires_grad_()
    spoilt.register_hook(raise_late)
    with pytest.raises(ValueError, match="a user's hook"):
        (mean_square(model, spoilt * 1) * float("nan")).backward()
    mean_square(model, batches[0][rank]).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_and_wait(optimizer)
    assert optimizer.skipped_steps == 0


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_whose_loss_reached_nothing_can_clip(stage, mesh, rank, world):
    needs_own_gathers(stage)
    model = zero_ext.shard(MLP(), stage, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batches = rank_batches(MLP_SHAPE, world, step)
        if rank == step % world:
            mean_square(model, batches[0][rank]).backward()
        norm = optimizer.clip_grad_norm_(1e9)
        squares = sum(g.double().square().sum() for g in full_gradients(model).values())
        torch.testing.assert_close(norm.double(), squares.sqrt(), rtol=1e-6, atol=0.0)
        assert norm > 0
        optimizer.step()
        optimizer.zero_grad()
    assert model.stats()["steps"] == 3


class Unreadable(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.real_device
def test_a_step_that_refused_on_one_rank_can_be_mended(mesh, rank, world):
    model = zero_ext.shard(MLP(), 2, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    batches = rank_batches(MLP_SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    if rank == 0:
        parameter = next(model.parameters())
        good = parameter.grad
        parameter.grad = torch.Tensor._make_wrapper_subclass(
            Unreadable, parameter.shape, device=parameter.device
        )
        with pytest.raises(TypeError, match=r"\.grad was set to a Unreadable"):
            optimizer.step()
        parameter.grad = good
    optimizer.step()
    assert model.stats()["backwards"] == 1 and model.stats()["steps"] == 1


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
def test_a_step_that_timed_out_without_a_backward_keeps_the_gradients(
    mesh, rank, world, monkeypatch
):
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "1")
    model = zero_ext.shard(MLP(), 2, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    batches = rank_batches(MLP_SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    optimizer.step()
    before = [p.grad.to_local().clone() for p in model.parameters()]
    gather_objects(rank)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"step\(\) waited for the other ranks' step\(\)"):
            optimizer.step()
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert_bits(parameter.grad.to_local(), gradient)
        optimizer.zero_grad()
    gather_objects(rank)


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.parametrize("stage", [2, 3])
def test_autograd_grad_over_parameters_is_no_backward(stage, mesh, rank, world):
    """Where ranks read each other's memory, one may ask alone."""
    model = zero_ext.shard(MLP(), stage, mesh=mesh, bucket_mb=1e-4)
    alone = stage < 3 or model.stats()["neighbors"] == world - 1
    if rank == 0 or not alone:
        with model.summon_full_params(writeback=False) if stage == 3 else torch.enable_grad():
            parameters = list(model.parameters())
            loss = mean_square(model, rank_data(MLP_SHAPE, rank))
            gradients = torch.autograd.grad(loss, parameters)
        plain = MLP()
        mean_square(plain, rank_data(MLP_SHAPE, rank)).backward()
        for gradient, p in zip(gradients, plain.parameters(), strict=True):
            assert_bits(gradient, p.grad)
    assert model.stats()["backwards"] == 0 and model.stats()["reductions"] == 0


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
def test_a_forked_child_takes_no_messages_of_its_parent(mesh, rank, world):
    """As a DataLoader's worker that runs the model would."""
    model = zero_ext.shard(MLP(), 3, mesh=mesh, bucket_mb=1e-4)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                model(rank_data(MLP_SHAPE, rank))
            os.write(writing, b"nothing was raised")
        except BaseException as error:
            os.write(writing, str(error).split("\n")[0].encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert (
        "a forked child cannot exchange messages in its parent's place"
        in os.read(reading, 4096).decode()
    )
    gather_objects(rank)
    batches = rank_batches(MLP_SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    assert_same(full_gradients(model), reference_gradients(MLP, batches, world, 1 / world))
    optimizer.step()


class Interrupted(nn.Module):
    """A forward that ends with what is no Exception."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(5))  # of the root's own unit
        self.blocks = nn.ModuleList([MLP(), MLP()])
        self.stops = False

    def forward(self, x):
        x = self.blocks[0](x) * self.scale
        if self.stops:
            raise KeyboardInterrupt
        return self.blocks[1](x)


class Interrupting(MLP):
    def forward(self, x):
        super().forward(x)
        raise KeyboardInterrupt


class GoesOn(Interrupted):
    """One whose forward catches it."""

    def __init__(self):
        super().__init__()
        self.stopped = nn.ModuleList([Interrupting()])

    def forward(self, x):
        if self.stops:
            with contextlib.suppress(KeyboardInterrupt):
                self.stopped[0](x)
            self.stops = False
        return super().forward(x)


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.parametrize("then", ["forward", "step", "forward of another thread"])
def test_a_forward_that_was_interrupted_is_over(then, mesh, rank, world):
    model = zero_ext.shard(Interrupted(), 3, mesh=mesh, bucket_mb=1e-4)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    mean_square(model, rank_data(MLP_SHAPE, rank, 5)).backward()
    model.stops = True
    with pytest.raises(KeyboardInterrupt):
        model(rank_data(MLP_SHAPE, rank))
    model.stops = False
    if then == "step":
        optimizer.step()
    optimizer.zero_grad()
    batches = rank_batches(MLP_SHAPE, world)
    if then == "forward of another thread" and not GATHERS_TOGETHER:
        with ThreadPoolExecutor(1) as another:
            another.submit(model, rank_data(MLP_SHAPE, rank)).result()
    mean_square(model, batches[0][rank]).backward()
    expected = reference_gradients(Interrupted, batches, world, 1 / world)
    assert_same(full_gradients(model), expected)
    optimizer.step()
    assert find(model.scale)[0].engine.gathered_units() == []


@pytest.mark.dist
@at_least_two_ranks
def test_a_forward_goes_on_after_one_inside_was_interrupted(mesh, rank, world):
    model = zero_ext.shard(GoesOn(), 3, mesh=mesh, bucket_mb=1e-4)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    batches = rank_batches(MLP_SHAPE, world)
    model.stops = True
    mean_square(model, batches[0][rank]).backward()
    expected = reference_gradients(GoesOn, batches, world, 1 / world)
    assert_same(full_gradients(model), expected)
    optimizer.step()
    assert find(model.scale)[0].engine.gathered_units() == []


# Errors of one rank, of which the others hear (Note [Epochs] in csrc/shared_host_transport.h)


def assert_stepped_once(model, batches, world) -> None:
    """By SGD with a rate of 0.5, from ``MLP``'s first values."""
    __tracebackhide__ = True
    gradients = reference_gradients(MLP, batches, world, 1 / world)
    for name, before in MLP().named_parameters():
        expected = before.detach() - 0.5 * gradients[name]
        actual = zero_ext.full_tensor(model.get_parameter(name))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, msg=name)


def shard_among_neighbors(stage: int, mesh, bucket_mb: float = 1e-4) -> nn.Module:
    model = zero_ext.shard(MLP(), stage, mesh=mesh, bucket_mb=bucket_mb)
    if model.stats()["neighbors"] < mesh.size() - 1:
        pytest.skip("what one rank is past the others see in shared memory alone")
    return model


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("gradient", [1, -1], ids=["second", "last"])
def test_a_backward_that_threw_on_one_rank_ends_on_all_at_once(stage, gradient, mesh, rank, world):
    model = shard_among_neighbors(stage, mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batches = rank_batches(MLP_SHAPE, world)
    failing = list(reversed(list(model.parameters())))[gradient]

    def throw_when_all_are_here(_gradient) -> None:
        gather_objects(rank)
        if rank == 0:
            raise ValueError("a user's hook")

    handle = failing.register_hook(throw_when_all_are_here)
    for _ in range(2):
        told = "a user's hook" if rank == 0 else "went on without this"
        with pytest.raises((ValueError, RuntimeError), match=told):
            mean_square(model, batches[0][rank]).backward()
    handle.remove()
    mean_square(model, batches[0][rank]).backward()
    assert_same(full_gradients(model), reference_gradients(MLP, batches, world, 1 / world))
    optimizer.step()
    assert model.stats()["steps"] == 1


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_threw_when_it_had_sent_all_keeps_no_other_waiting(
    stage, mesh, rank, world, monkeypatch
):
    """Whatever it does then: it takes none of the messages that the others have sent to it."""
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "20")
    model = shard_among_neighbors(stage, mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batches = rank_batches(MLP_SHAPE, world)
    batch = batches[0][rank].clone().requires_grad_()
    loss = mean_square(model, batch * 1)
    if rank == 0:
        batch.register_hook(raise_late)
        with pytest.raises(ValueError, match="a user's hook"):
            loss.backward()
    else:
        loss.backward()
    gather_objects(rank)  # gloo's: rank 0 serves nobody inside it
    optimizer.zero_grad()
    mean_square(model, batches[0][rank]).backward()
    assert_same(full_gradients(model), reference_gradients(MLP, batches, world, 1 / world))
    optimizer.step()
    assert model.stats()["steps"] == 1


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_whose_backwards_all_threw_repeat_them_together(stage, mesh, rank, world):
    """However long one takes: a fast one that repeats it is not told that this rank goes on."""
    model = zero_ext.shard(MLP(), stage, mesh=mesh, bucket_mb=1e-4)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batches = rank_batches(MLP_SHAPE, world)
    failing = list(reversed(list(model.parameters())))[1]
    for attempt in range(4):
        handle = failing.register_hook(raise_late)
        time.sleep(0.05 if rank == attempt % world else 0)
        with pytest.raises(ValueError, match="a user's hook"):
            mean_square(model, batches[0][rank]).backward()
        handle.remove()
        mean_square(model, batches[0][rank]).backward()
    expected = reference_gradients(MLP, batches, world, 1 / world)
    assert_same(full_gradients(model), {name: 4 * g for name, g in expected.items()})
    optimizer.step()


SHORT_TIMEOUT = r"timed out after 600 ms|went on without"


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
@pytest.mark.parametrize(
    "stage, bucket_mb, late",
    [
        (2, 1e-4, "never began"),
        (3, 25.0, "never began"),
        (1, 25.0, "threw before the first gradient"),
        (3, 1e-4, "threw before the first gradient"),
        pytest.param(1, 25.0, "never began", marks=pytest.mark.slow),
        pytest.param(2, 1e-4, "threw before the first gradient", marks=pytest.mark.slow),
        pytest.param(3, 25.0, "threw before the first gradient", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_gave_up_waiting_meet_in_the_next_backward(
    stage, bucket_mb, late, mesh, rank, world, monkeypatch
):
    """Rank 0 was not in the backwards that the others have waited for."""
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "0.6")
    model = shard_among_neighbors(stage, mesh, bucket_mb)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batches = rank_batches(MLP_SHAPE, world)
    for _ in range(2):
        if rank != 0:
            with pytest.raises(RuntimeError, match=SHORT_TIMEOUT):
                mean_square(model, batches[0][rank]).backward()
        elif late != "never began":
            out = model(batches[0][rank])
            out.register_hook(raise_late)
            with pytest.raises(ValueError, match="a user's hook"):
                out.square().mean().backward()
        gather_objects(rank)
    mean_square(model, batches[0][rank]).backward()
    assert_same(full_gradients(model), reference_gradients(MLP, batches, world, 1 / world))
    optimizer.step()


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
@pytest.mark.parametrize(
    "stage, bucket_mb", [(1, 25.0), (2, 1e-4), (3, 25.0)], ids=["1", "2, many units", "3"]
)
def test_a_rank_that_the_others_gave_up_in_the_middle_of_a_backward_repeats_it_with_them(
    stage, bucket_mb, mesh, rank, world, monkeypatch
):
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "0.6")
    model = shard_among_neighbors(stage, mesh, bucket_mb)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batches = rank_batches(MLP_SHAPE, world)
    second = list(reversed(list(model.parameters())))[1]
    handle = second.register_hook(lambda _gradient: time.sleep(1.0 if rank == 0 else 0))
    told = "given up waiting for this rank|went on without" if rank == 0 else SHORT_TIMEOUT
    with pytest.raises(RuntimeError, match=told):
        mean_square(model, batches[0][rank]).backward()
    handle.remove()
    gather_objects(rank)
    mean_square(model, batches[0][rank]).backward()
    assert_same(full_gradients(model), reference_gradients(MLP, batches, world, 1 / world))
    optimizer.step()


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_some_ranks_gave_up_waiting_for_can_be_repeated(
    stage, mesh, rank, world, monkeypatch
):
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "0.6")
    model = shard_among_neighbors(stage, mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batches = rank_batches(MLP_SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    for _ in range(2):
        if rank != 0:
            with pytest.raises(RuntimeError, match=r"step\(\) waited for .*(timed out|without)"):
                optimizer.step()
        gather_objects(rank)
    optimizer.step()
    assert_stepped_once(model, batches, world)


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_was_stopped_past_its_timeout_takes_what_has_come_meanwhile(
    stage, mesh, rank, world, monkeypatch
):
    """By a debugger, say: else it refused a step that the others, who had its message, make."""
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "1.5")
    model = shard_among_neighbors(stage, mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batches = rank_batches(MLP_SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    gather_objects(rank)
    if rank == world - 1:
        stop = f"sleep 0.2; kill -STOP {os.getpid()}; sleep 1.7; kill -CONT {os.getpid()}"
        stopping = subprocess.Popen(["sh", "-c", stop])
    else:
        time.sleep(0.8)
    optimizer.step()
    if rank == world - 1:
        stopping.wait()
    assert_stepped_once(model, batches, world)


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("throws", [False, True])
def test_errors_of_a_group_that_a_timeout_has_closed_say_who_and_where(
    stage, throws, mesh, rank, world, monkeypatch
):
    """Of the process group's connections, which ranks of one host do without."""
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "1")
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "0")
    model = zero_ext.shard(MLP(), stage, mesh=mesh)
    for attempt in range(3):
        match = rf"^zero_ext \[rank {rank}, unit 'layers.*\(.* rank \d\): "
        if attempt > 0:
            match += r"(.|\n)*closed for good, as after a timeout: start all ranks again"
        batch = rank_data(MLP_SHAPE, rank).requires_grad_()
        if rank != 0 or attempt > 0:
            with pytest.raises(RuntimeError, match=match):
                mean_square(model, batch).backward()
        elif throws:  # else rank 0 comes too late
            batch.register_hook(raise_late)
            with pytest.raises(ValueError, match="a user's hook"):
                mean_square(model, batch).backward()
        gather_objects(rank)


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
def test_ranks_in_different_calls_are_told_which(mesh, rank, world):
    model = shard_among_neighbors(2, mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5, max_grad_norm=1.0)
    batches = rank_batches(MLP_SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"this rank is in step\(\), rank 1 in clip_grad"):
            optimizer.step()
    else:
        with pytest.raises(RuntimeError, match=r"is in clip_grad_norm_\(\), rank 0 in step\(\)"):
            optimizer.clip_grad_norm_(1.0)
    assert model.stats()["steps"] == 0
    optimizer.step()
    assert model.stats()["steps"] == 1


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
def test_messages_name_ranks_as_the_launcher_does(rank, world):
    """Not as a group without rank 0 counts them: a log's name is that of the rank."""
    group = dist.new_group(list(range(1, world)))
    if rank == 0:
        return
    model = zero_ext.shard(MLP(), 2, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5, nonfinite="raise")
    last = world - 1
    spoilt = rank_data(MLP_SHAPE, rank) * (float("nan") if rank == last else 1.0)
    mean_square(model, spoilt).backward()
    with pytest.raises(RuntimeError, match=rf"\[rank {rank}\].* on rank {last}"):
        optimizer.step()
    if world == 2:
        return
    optimizer.zero_grad()
    mean_square(model, rank_data(MLP_SHAPE, rank)).backward()
    optimizer.param_groups[0]["lr"] = 0.5 * (rank == last)
    with pytest.raises(ValueError, match=rf"\[rank {rank}\].*on rank 1 .*on rank {last}"):
        optimizer.step()
    told = rf"\[rank {rank}\]: .*(, rank {last} in clip|, rank 1 in step\(\))"
    with pytest.raises(RuntimeError, match=told):
        optimizer.clip_grad_norm_(1.0) if rank == last else optimizer.step()


# Settings of one rank


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("what", ["lr", "numpy's lr", "betas", "divide factor", "max_grad_norm"])
def test_settings_that_differ_between_ranks_update_nothing(stage, what, mesh, rank, world):
    """A schedule that follows a rank's own loss, for example."""
    model = zero_ext.shard(MLP(), stage, mesh=mesh)
    clips = {"max_grad_norm": 1.0} if what == "max_grad_norm" else {}
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.5, **clips)
    batches = rank_batches(MLP_SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    before = [zero_ext.full_tensor(p).clone() for p in model.parameters()]

    def set_to(right: bool) -> None:
        group = optimizer.param_groups[0]
        if what == "lr":
            group["lr"] = 0.5 if right else 0.25
        elif what == "numpy's lr":
            group["lr"] = numpy.float32(0.5 if right else 0.25)
        elif what == "betas":
            group["betas"] = (0.9, 0.999) if right else (0.9, 0.99)
        elif what == "divide factor":
            model.set_gradient_divide_factor(1.0 if right else 2.0)
        else:
            optimizer.max_grad_norm = 1.0 if right else 2.0

    set_to(rank != world - 1)
    told = {
        "lr": rf"'lr=0.5 of group 0' on rank 0, 'lr=0.25 of group 0' on rank {world - 1}",
        "numpy's lr": "'lr=0.5 of group 0' on rank 0, 'lr=0.25 of group 0' on rank",
        "betas": r"'betas=\(0.9, 0.999\) of group 0' on rank 0, 'betas=\(0.9, 0.99\)",
        "divide factor": "'gradient divide factor=1.0' on rank 0, ",
        "max_grad_norm": "'max_grad_norm=1.0' on rank 0, 'max_grad_norm=2.0'",
    }
    on_host_told = told[what] if ON_HOST else r"settings \(lr, weight_decay, …\) differ"
    with pytest.raises((ValueError, RuntimeError), match=on_host_told):
        optimizer.step()
        optimizer.zero_grad()
        _ = optimizer.skipped_steps  # a device tells later
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert_bits(zero_ext.full_tensor(parameter), value)
    set_to(True)
    optimizer.zero_grad()
    mean_square(model, batches[0][rank]).backward()
    optimizer.step()
    assert any(
        not torch.equal(zero_ext.full_tensor(parameter), value)
        for parameter, value in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.dist
@at_least_two_ranks
@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_to_different_norms_clips_nothing(stage, mesh, rank, world):
    model = zero_ext.shard(MLP(), stage, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batches = rank_batches(MLP_SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    mine = 1e-3 if rank == 0 else 1e-4
    told = rf"max_norm is {mine} here and something else on another rank"
    with pytest.raises(RuntimeError, match=told):
        optimizer.clip_grad_norm_(mine)
    assert_same(full_gradients(model), reference_gradients(MLP, batches, world, 1 / world))
    optimizer.clip_grad_norm_(1e-3)
    optimizer.step()


def test_numbers_that_look_different_but_are_not_are_no_difference(anywhere):
    """NaN is not equal to itself, and strings have another hash in every process."""
    model = zero_ext.shard(MLP(), 1, mesh=anywhere)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    optimizer.param_groups[0]["weight_decay"] = float("nan")
    optimizer.param_groups[0]["foreach"] = "as torch likes"
    mean_square(model, rank_data(MLP_SHAPE, 0)).backward()
    optimizer.step()
    assert all(p.isnan().all() for p in map(zero_ext.full_tensor, model.parameters()))
