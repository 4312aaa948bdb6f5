"""Ranks that run different numbers of backwards where a device's own backend has the messages."""

import contextlib
import os
import random
import re
import time
import warnings

import pytest
import torch
from harness import (
    GATHERS_TOGETHER,
    MLP,
    assert_bits,
    gather_objects,
    mean_square,
    needs_gathers_together,
    rank_data,
)
from setups import everything, full_gradients, values_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint
from uneven_steps import DIVIDE_BY, OneProcess, PlannedError, Step, Towers, fail, loss_of

import zero_ext

pytestmark = [
    pytest.mark.dist,
    # NCCL needs a GPU for each rank, and its watchdog ends the process.
    pytest.mark.skipif(
        "lccl" not in os.environ.get("ZERO_EXT_TEST_BACKENDS", ""),
        reason="of the emulated device's backend",
    ),
]


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch):
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "2")


@pytest.fixture
def several_hosts(monkeypatch):
    """As ranks of several hosts: they see nothing of each other."""
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "0")


@pytest.fixture
def patient(monkeypatch):
    """For programs that end: the processors may be busy."""
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "60")


def wait_for_the_backend() -> None:
    """Until it has given up."""
    for _ in range(20):  # a wait raises one error, of one stream
        try:
            return torch.accelerator.synchronize()
        except RuntimeError:
            pass


def same_error(rank: int, error: BaseException | None) -> str:
    """What every rank raised, without its own number; empty where none did."""
    text = str(error or "")
    wait_for_the_backend()
    if text:
        assert text.startswith(f"zero_ext [rank {rank}")
        text = text.replace(f"zero_ext [rank {rank}", "zero_ext [rank", 1)
    of_all = gather_objects(text)
    assert len(set(of_all)) == 1, of_all
    return text


def sharded_and_one(mesh, stage: int, unit_bytes: int = 200, **options):
    """A sharded model with small units, and one process that runs all ranks' micro-batches."""
    offload = {"offload_policy": CPUOffloadPolicy()} if options.pop("offload", False) else {}
    model = zero_ext.shard(Towers(), stage, mesh=mesh, bucket_mb=unit_bytes / 2**20, **offload)
    model.set_gradient_divide_factor(DIVIDE_BY)
    return model, zero_ext.optim.SGD(model.parameters(), **options), OneProcess(**options)


SGD = {"lr": 0.25, "momentum": 0.5}


@pytest.mark.world(min=2)
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_serves_the_others(mesh, rank, world, stage, clips, offload, patient):
    """The host waits for each loss, which in stage 3 needs what the waiting ranks have."""
    model, optimizer, one = sharded_and_one(mesh, stage, offload=offload, **SGD)
    used = (0, 2)  # a tower that no rank enters: the ranks ask each other about its gradients
    served = 0
    for step in range(3):
        counts = [(r + step) % world * 2 for r in range(world)]
        batches = [
            [(rank_data((2, 7), r, step, k), used, 1.0) for k in range(count)]
            for r, count in enumerate(counts)
        ]
        served += max(counts) - counts[rank]
        for batch in batches[rank]:
            loss = loss_of(model, batch)
            assert loss.item() > 0
            loss.backward()
        for k in range(max(counts)):
            for of_rank in batches:
                if k < len(of_rank):
                    one.backward(of_rank[k])
        if clips:
            norm = optimizer.clip_grad_norm_(0.05)
            assert_bits(norm.cpu(), one.optimizer.clip_grad_norm_(0.05))
        for each in (optimizer, one.optimizer):
            each.step()
            each.zero_grad()
    assert optimizer.skipped_steps == 0
    assert_bits(everything(model, optimizer), everything(one.model, one.optimizer))
    assert zero_ext.stats(model)["served_backwards"] == served


@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_forwards_alone_are_served_where_they_come_last(mesh, rank, stage, patient):
    model, optimizer, one = sharded_and_one(mesh, stage, **SGD)
    for step in range(2):
        batches = [(rank_data((2, 7), r, step), (0, 1), 1.0) for r in range(mesh.size())]
        loss_of(model, batches[rank]).backward()
        for batch in batches:
            one.backward(batch)
        if rank == step:
            with torch.no_grad():
                assert loss_of(model, batches[rank]).item() > 0
            loss_of(model, batches[rank])  # its backward never comes
        for each in (optimizer, one.optimizer):
            each.step()
            each.zero_grad()
    assert_bits(everything(model, optimizer), everything(one.model, one.optimizer))


@pytest.mark.world(min=2)
def test_ranks_with_other_pasts_gather_the_same_ahead(mesh, rank, world, patient):
    """A pass gathers ahead what the last one entered. Frozen units are in forwards alone."""
    model, optimizer, one = sharded_and_one(mesh, 3, **SGD)
    for each in (model, one.model):
        each.stem.requires_grad_(False)
    for step, who in enumerate([range(1, world), range(world), [0], range(world), range(world)]):
        batches = [(rank_data((2, 7), r, step), (0, 1, 2)[: 1 + step % 3], 1.0) for r in who]
        for r, batch in zip(who, batches, strict=True):
            if r == rank:
                loss_of(model, batch).backward()
            one.backward(batch)
        for each in (optimizer, one.optimizer):
            each.step()
            each.zero_grad()
    assert optimizer.skipped_steps == 0
    assert_bits(everything(model, optimizer), everything(one.model, one.optimizer))


@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_that_throws_is_known_to_all_in_the_step(mesh, rank, world, stage, patient):
    # Without a search for NaN and Inf the ranks of stage 0 would send nothing in the step.
    model, optimizer, one = sharded_and_one(mesh, stage, nonfinite="step", **SGD)

    def batches(r: int):
        return [(rank_data((2, 7), r, k), (0, 1, 2), 1.0) for k in range(1 if r == 1 else 2)]

    for k, batch in enumerate(batches(rank)):
        if (rank, k) == (0, 0):
            with pytest.raises(PlannedError):
                model(batch[0], batch[1], fails=True).float().square().mean().backward()
            if stage == 3:
                break  # other ranks would gather other units
        loss_of(model, batch).backward()
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    error = same_error(rank, raised.value)
    assert "step(): the ranks have finished different backwards since the last step" in error
    assert "one threw on rank 0 after the others had its gradients. Call zero_grad(set" in error
    optimizer.zero_grad(set_to_none=True)
    for batch in batches(rank):
        loss_of(model, batch).backward()
    for k in range(2):
        for r in range(world):
            if k < len(batches(r)):
                one.backward(batches(r)[k])
    for each in (optimizer, one.optimizer):
        each.step()
        each.zero_grad()
    assert_bits(everything(model, optimizer), everything(one.model, one.optimizer))


@pytest.mark.world(min=2)
@pytest.mark.parametrize("where", ["head", "stem", "input"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_first_backward_that_throws_waits_for_nobody(mesh, rank, world, stage, where, patient):
    """The others come to their own after this rank has used the model again."""
    # Two units: with a third the device waits for a bucket, and for these operators the host waits
    # for the emulated device. The next test has more.
    model, optimizer, one = sharded_and_one(mesh, stage, 1700, nonfinite="step", **SGD)
    assert model.stats()["units"] == 2
    batches = [(rank_data((2, 7), r), (0, 1, 2), 1.0) for r in range(world)]

    def fail(_gradient):
        raise PlannedError

    def fail_after(_module, _inputs, output):
        output.register_hook(fail)

    def failing_loss():
        x = batches[rank][0].clone().requires_grad_()
        hooked = model.towers[2].register_forward_hook(fail_after)
        if where != "head":
            hooked.remove()
        if where == "input":  # when all parameters may have their gradients
            x.register_hook(fail)
        output = model(x, (0, 1, 2), fails=where == "stem")
        hooked.remove()
        return output.float().square().mean()

    if rank == 1:
        with pytest.raises(PlannedError):
            failing_loss().backward()
        optimizer.zero_grad(set_to_none=True)
    gather_objects(rank)  # the others come now
    if rank != 1:
        with contextlib.suppress(RuntimeError):  # or in the step
            loss_of(model, batches[rank]).backward()
    optimizer.zero_grad(set_to_none=True)
    loss_of(model, batches[rank]).backward()
    for batch in batches:
        one.backward(batch)
    for each in (optimizer, one.optimizer):
        each.step()
    assert_bits(everything(model, optimizer), everything(one.model, one.optimizer))


class Scale(torch.autograd.Function):
    """A product, by operators in place: for others the host waits for the emulated device."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.empty_like(weight).copy_(x).mul_(weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return tuple(torch.empty_like(weight).copy_(gradient).mul_(t) for t in (weight, x))


class Scales(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ParameterList(torch.full((7,), 2.0) for _ in range(layers))

    def forward(self, x, reentrant: bool):
        for weight in self.layers:
            if reentrant:
                x = checkpoint(Scale.apply, x, weight, use_reentrant=True, preserve_rng_state=False)
            else:
                x = Scale.apply(x, weight)
        return x


@pytest.mark.world(min=2)
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("layers", [3, 9])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_first_backward_that_throws_waits_for_no_bucket(
    mesh, rank, world, stage, layers, reentrant, patient
):
    """Its device does: units that were reduced earlier have both of them."""
    model = zero_ext.shard(Scales(layers), stage, mesh=mesh, bucket_mb=1e-6)
    assert model.stats()["units"] == layers
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)

    def backward(fails: bool) -> None:
        x = torch.full((7,), 1.0 + rank, device=mesh.device_type, requires_grad=True)
        y = x * 1
        if fails:
            y.register_hook(fail)
        model(y, reentrant).sum().backward()

    if rank == 1:
        with pytest.raises(PlannedError):
            backward(fails=True)
        optimizer.zero_grad(set_to_none=True)
    gather_objects(rank)  # the others come now
    if rank != 1:
        with contextlib.suppress(RuntimeError):  # or in the step
            backward(fails=False)
    optimizer.zero_grad(set_to_none=True)
    backward(fails=False)
    expected = 2.0 ** (layers - 1) * (1 + world) / 2  # of each layer, averaged
    for gradient in full_gradients(model).values():
        assert_bits(gradient.cpu(), torch.full((7,), expected))


@pytest.mark.world(min=2)
@pytest.mark.parametrize("where", ["backward", "step"])
def test_a_rank_that_only_computes_waits_for_nobody(mesh, rank, where, monkeypatch):
    """For more than a quarter of the timeout, while the others wait for it."""
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "6")
    model, optimizer, _ = sharded_and_one(mesh, 2, **SGD)
    batch = rank_data((2, 7), rank), (0, 1, 2), 1.0

    def train():
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.stats()

    def compute():
        values = torch.rand(1_000_000)
        begin = time.monotonic()
        values.sin_()
        torch.accelerator.synchronize()
        for _ in range(int(2.3 / (time.monotonic() - begin))):
            values.sin_()

    train()
    gather_objects(rank)
    if rank == 1 and where == "backward":
        hook = model.stem.weight.register_post_accumulate_grad_hook(lambda _: compute())
        loss_of(model, batch).backward()
        hook.remove()
    elif rank == 1:
        loss_of(model, batch).backward()
        compute()
    elif where == "step":
        loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.stats()
    train()


@pytest.mark.world(min=2)
def test_a_backward_that_throws_on_every_rank_is_repeated(mesh, rank, patient):
    model, optimizer, one = sharded_and_one(mesh, 2, **SGD)
    batch = rank_data((2, 7), rank), (0, 1, 2), 1.0
    with pytest.raises(PlannedError):
        model(batch[0], batch[1], fails=True).float().square().mean().backward()
    loss_of(model, batch).backward()
    for r in range(mesh.size()):
        one.backward((rank_data((2, 7), r), (0, 1, 2), 1.0))
    for each in (optimizer, one.optimizer):
        each.step()
    assert_bits(everything(model, optimizer), everything(one.model, one.optimizer))


@pytest.mark.world(min=2)
def test_too_few_micro_batches_of_one_rank_are_told_by_all(mesh, rank, patient):
    model = zero_ext.shard(Towers(), 2, mesh=mesh, accumulation_steps=2)
    optimizer = zero_ext.optim.SGD(model.parameters(), **SGD)
    for k in range(1 if rank == 1 else 2):
        loss_of(model, (rank_data((2, 7), rank, k), (0, 1, 2), 1.0)).backward()
    told = "after 1 of 2 backwards" if rank == 1 else "after backwards of rank 1 that were not red"
    with pytest.raises(RuntimeError, match=told):
        optimizer.step()


@pytest.mark.world(min=2)
def test_a_forward_of_one_rank_is_served_where_all_read_or_set_parameters(mesh, rank, patient):
    """The gathers of stage 3 are among the messages of those calls."""
    model, optimizer, _ = sharded_and_one(mesh, 3, **SGD)
    batch = rank_data((2, 7), rank), (0, 1, 2), 1.0
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses += [loss_of(model, batch)] if rank == 1 else []
        values = {name: full.cpu() for name, full in zero_ext.iter_full_params(model)}
        model.load_state_dict({name: 2 * value for name, value in values.items()})
    doubled = Towers()
    doubled.load_state_dict(values)
    assert losses == [] or torch.allclose(losses[1].cpu(), loss_of(doubled, batch))
    assert losses == [] or losses[0] != losses[1]


@pytest.mark.world(min=2)
def test_a_rank_that_never_comes_to_the_step_is_named(mesh, rank):
    model, optimizer, _ = sharded_and_one(mesh, 2, **SGD)
    loss_of(model, (rank_data((2, 7), rank), (0, 1, 2), 1.0)).backward()
    if rank != 1:
        with pytest.raises(
            RuntimeError,
            match=r"step\(\) waited for the other ranks' step\(\) "
            r"\(waiting for rank 1\): timed out after 2000 ms",
        ):
            optimizer.step()
    gather_objects(rank)
    optimizer.step()


@pytest.mark.world(min=2)
@pytest.mark.parametrize("counts", [(2, 1), pytest.param((0, 2), marks=pytest.mark.slow)], ids=str)
def test_every_rank_of_several_hosts_raises_who_waits_for_what(
    mesh, rank, world, counts, capfd, several_hosts
):
    counts = [*counts, *[1] * (world - 2)]
    model = zero_ext.shard(MLP(), 2, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batches = [rank_data((3, 5), rank, k) for k in range(counts[rank])]
    with pytest.raises(RuntimeError) as raised:
        for batch in batches:
            mean_square(model, batch).backward()
        optimizer.step()
        optimizer.stats()
    error = same_error(rank, raised.value)
    most = max(counts)
    for r in range(world):
        # A rank without a backward takes part in one.
        assert re.search(rf"rank [\d, ]*\b{r}\b[\d, ]* with {max(counts[r], 1)} backward", error)
    assert re.search(
        rf"with {most} backward.* in this step: unit 'layers.* waited for its red", error
    )
    assert "with 1 backward(s) begun in this step: step() waited for the other" in error
    assert "every rank must run the same forwards and backwards of a step, see docs/un" in error
    assert error.split("]: ", 1)[1] in capfd.readouterr().err


def take_a_branch(mesh, rank: int) -> str:
    model, optimizer, _ = sharded_and_one(mesh, 3, **SGD)
    batch = rank_data((3, 7), rank), (0, 1, 2) if rank == 0 else (0,)
    with pytest.raises(RuntimeError) as raised:
        mean_square(model, batch).backward()
        optimizer.step()
        optimizer.stats()
    return same_error(rank, raised.value)


@pytest.mark.world(min=2)
def test_a_branch_that_one_rank_takes(mesh, rank):
    """In stage 3 its gathers are collectives."""
    needs_gathers_together()
    error = take_a_branch(mesh, rank)
    assert re.search(r"rank 0 gathers unit 'towers.1.* where rank \d gathers unit 'towers.0", error)
    assert "every rank must enter the same units in the same order, see docs/uneven" in error


@pytest.mark.world(min=2)
def test_a_branch_that_one_rank_of_several_hosts_takes(mesh, rank, several_hosts):
    error = take_a_branch(mesh, rank)
    assert "every rank must run the same forwards and backwards of a step, see docs/un" in error


class SameSize(nn.Module):
    """Towers of one size, in an order of the caller's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.towers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, order):
        for tower in order:
            x = torch.tanh(self.towers[tower](x))
        return x


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "orders",
    [((0, 1, 2), (1, 0, 2)), ((0, 2), (1, 2)), ((0, 0, 1, 2), (0, 1, 1, 2))],
    ids=["another order", "another unit", "another count"],
)
def test_gathers_of_several_hosts_that_were_mixed_are_known_in_the_step(
    mesh, rank, orders, several_hosts, patient
):
    """The backend takes units of one size for each other: that step's values are wrong."""
    model = zero_ext.shard(SameSize(), 3, mesh=mesh, bucket_mb=1e-6, units=nn.Linear, prefetch_mb=0)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(2, 8, device=mesh.device_type)
    for step, order in enumerate([(0, 1, 2), orders[rank], (2, 1, 0)]):
        before = values_of(model)
        model(x, order).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        raises = pytest.raises(RuntimeError) if step == 1 else contextlib.nullcontext()
        with raises as raised:
            optimizer.stats()
        if step == 1:
            error = same_error(rank, raised.value)
            assert "a step was skipped" in error
            assert "the ranks have gathered or reduced different units" in error
            assert_bits(values_of(model), before)


class Program:
    """Some steps, drawn at random."""

    def __init__(self, seed: int, world: int, stage: int):
        draw = random.Random(seed)
        # Where all ranks enter every gather, they must take the same branches.
        together = stage == 3 and GATHERS_TOGETHER
        branches = not together or draw.random() < 0.3
        throws = draw.random() < 0.4
        self.steps = [
            Step(1000 * seed + n, world, branches, throws) for n in range(draw.randint(1, 3))
        ]
        self.may_raise = any(step.failing for step in self.steps) or (
            together and (branches or not all(map(self._same_order, self.steps)))
        )

    @staticmethod
    def _same_order(step: Step) -> bool:
        """A rank's passes are those of any other one, as far as they go."""
        passes = [
            "FB" * count + "F" * forwards
            for count, forwards in zip(step.counts, step.idle_forwards, strict=True)
        ]
        return all(max(passes, key=len).startswith(each) for each in passes)

    def run(self, rank: int, model, optimizer, one: OneProcess) -> None:
        for step in self.steps:
            self._run_step(step, rank, model, optimizer)
            step.of_all(one)
            if step.clips:
                one.optimizer.clip_grad_norm_(0.05)
            one.optimizer.step()
            one.optimizer.zero_grad()

    @staticmethod
    def _run_step(step: Step, rank: int, model, optimizer) -> None:
        idle = rank_data((2, 7), rank)  # a copy to the device waits, and raises the backend's error
        for k, batch in enumerate(step.batches[rank]):
            if (rank, k) in step.failing:
                with contextlib.suppress(PlannedError):
                    model(batch[0], batch[1], fails=True).float().square().mean().backward()
            loss_of(model, batch).backward()
            if k + 1 == step.zeroed_after:
                optimizer.zero_grad()
        for _ in range(step.idle_forwards[rank]):
            model(idle)
        if step.clips:
            optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        assert optimizer.skipped_steps >= 0  # the host waits
        optimizer.zero_grad()


def run_program(seed: int, mesh, rank: int, world: int, stage: int, monkeypatch) -> str:
    program = Program(seed, world, stage)
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "2" if program.may_raise else "60")
    model, optimizer, one = sharded_and_one(mesh, stage, nonfinite="skip", **SGD)
    raised = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # skipped steps
            program.run(rank, model, optimizer, one)
    except RuntimeError as error:
        raised = error.with_traceback(None)
    where = f"seed {seed}, counts {[step.counts for step in program.steps]}"
    error = same_error(rank, raised)
    if error:
        assert program.may_raise, f"{where}: {error}"
    else:
        assert_bits(everything(model, optimizer), everything(one.model, one.optimizer), where)
    return error


@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_collectives_have_one_order_on_all_ranks(mesh, rank, world, stage, monkeypatch):
    """Of all groups. Else devices with one connection would wait for each other."""
    import lagged_device

    seeds = [seed for seed in range(100) if not Program(seed, world, stage).may_raise]
    with lagged_device.one_connection():
        for seed in seeds[:2]:
            assert run_program(seed, mesh, rank, world, stage, monkeypatch) == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_random_programs(mesh, rank, world, stage, monkeypatch):
    count = 14 if GATHERS_TOGETHER else 100  # else few wait for their timeout
    seeds = range(count * stage, count * (stage + 1))
    errors = [run_program(seed, mesh, rank, world, stage, monkeypatch) for seed in seeds]
    assert any(errors) and not all(errors)
