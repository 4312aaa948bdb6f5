"""zero_ext.fsdp on several ranks: what FSDP2's own tests ask of training, memory and methods."""

import gc
import itertools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.distributed.fsdp as torchs
import torch.nn.functional as F
from harness import ResidualBlock, assert_bits, mean_square, rank_batches, rank_data
from reference import fma_gradients, gradients_of, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Shard

import zero_ext
from zero_ext import fsdp
from zero_ext.engine.registry import find

SHAPE = (3, 7)
BF16, F32 = torch.bfloat16, torch.float32

pytestmark = [
    pytest.mark.usefixtures("no_stale_meshes"),
    pytest.mark.dist,
    pytest.mark.world(min=2),
]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(ResidualBlock(13) for _ in range(3))
        self.norm, self.last = nn.LayerNorm(13), nn.Linear(13, 5)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            self.dtypes.append(x.dtype)
        return self.last(self.norm(x))

    def describe(self, x: Tensor) -> Tensor:
        return self.first(x).sum(1)


# Ways of calling fully_shard, of FSDP2 and of zero_ext.


def by_block(library: ModuleType, model: Model, **options) -> Model:
    for block in model.blocks:
        library.fully_shard(block, **options)
    return library.fully_shard(model, **options)


def as_one(library: ModuleType, model: Model) -> Model:
    return library.fully_shard(model)


def with_ends_together(library: ModuleType, model: Model) -> Model:
    for block in model.blocks:
        library.fully_shard(block, reshard_after_forward=block is not model.blocks[1])
    library.fully_shard([model.norm, model.last], shard_placement_fn=lambda p: Shard(0))
    return library.fully_shard(model)


def nested(library: ModuleType, model: Model) -> Model:
    for block in model.blocks:
        library.fully_shard(block.inner)
        library.fully_shard(block)
    return library.fully_shard(model, reshard_after_forward=False)


def in_a_frozen_rest(library: ModuleType, model: Model) -> Model:
    """No call for the root: the rest is plain."""
    for parameter in (*model.first.parameters(), *model.norm.parameters()):
        parameter.requires_grad_(False)
    model.last.requires_grad_(False)
    for block in model.blocks:
        library.fully_shard(block)
    return model


def with_ignored(library: ModuleType, model: Model) -> Model:
    model.first.requires_grad_(False)
    return library.fully_shard(model, ignored_params=set(model.first.parameters()))


WAYS = (by_block, as_one, with_ends_together, nested, in_a_frozen_rest, with_ignored)


# Against one process, and against FSDP2


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of whole parameters. Collective."""
    named = model.named_parameters()
    return {n: (zero_ext.full_tensor if find(p) else whole)(p).clone() for n, p in named}


class Run(NamedTuple):
    losses: list[float]
    values: dict[str, Tensor]


def train(model: Model, optimizer_class: Callable, rank: int, *, steps: int = 2, **options) -> Run:
    """Two micro-batches a step, clipping, and a schedule."""
    optimizer = optimizer_class(trained(model), lr=0.01, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses = []
    for step, micro in itertools.product(range(steps), range(2)):
        loss = mean_square(model, rank_data(SHAPE, rank, step, micro))
        loss.backward()
        losses.append(loss.item())
        if micro == 1:
            nn.utils.clip_grad_norm_(trained(model), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return Run(losses, values_of(model))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_one_process_s_bits(way, world, rank):
    model, plain = way(fsdp, Model()), Model()
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        other.requires_grad_(ours.requires_grad)
    torch.optim.SGD(trained(model), lr=0.01)
    batches = rank_batches(SHAPE, world, micros=2)
    for micro in batches:
        mean_square(model, micro[rank]).backward()
    expected = fma_gradients(plain, batches, world)
    for name, gradient in gradients_of(model).items():
        assert_bits(gradient, expected[name], name)


@pytest.mark.parametrize("way", [by_block, with_ends_together, nested, in_a_frozen_rest])
def test_training_is_fsdp2s(way, rank):
    ours, theirs = (
        train(way(library, Model()), torch.optim.AdamW, rank, foreach=False)
        for library in (fsdp, torchs)
    )
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-6)
    for name, value in theirs.values.items():
        torch.testing.assert_close(ours.values[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_stock_optimizer_has_the_bits_of_one_of_zero_ext(optimizer_class, rank):
    """With ``shard``, units of the same modules, and ``zero_ext.optim``."""
    model = zero_ext.shard(Model(), 3, units=ResidualBlock)
    wrapped = {torch.optim.AdamW: zero_ext.optim.AdamW}
    wrap = wrapped.get(optimizer_class, lambda p, **k: zero_ext.optim.wrap(optimizer_class, p, **k))
    expected = train(model, wrap, rank)
    found = train(by_block(fsdp, Model()), optimizer_class, rank)
    assert found.losses == expected.losses
    for name, value in expected.values.items():
        assert_bits(found.values[name], value, name)


def test_each_unit_computes_in_its_own_dtype(rank):
    """The root in fp32 around bf16 blocks, whose outputs are cast back, and fp32 in these."""
    full = fsdp.MixedPrecisionPolicy(param_dtype=F32, output_dtype=BF16)
    half = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=F32)
    runs, dtypes = [], []
    for library in (fsdp, torchs):
        model = Model()
        for block in model.blocks[:2]:
            library.fully_shard(block.outer, mp_policy=full)
            library.fully_shard(block, mp_policy=half)
        library.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = mean_square(model, rank_data(SHAPE, rank))
        loss.backward()
        optimizer.step()
        runs.append(Run([loss.item()], values_of(model)))
        dtypes.append([*model.dtypes, *(p.dtype for p in runs[-1].values.values())])
    ours, theirs = runs
    assert ours.losses == theirs.losses  # the same operations in the same dtypes
    assert dtypes[0][:3] == dtypes[1][:3] == [F32, F32, F32]
    for name, value in theirs.values.items():
        # A parameter that is shown in bf16 has a rounding of 2**-9 of at most 1.
        torch.testing.assert_close(ours.values[name].float(), value, rtol=0, atol=2**-9, msg=name)


def test_replicas_are_a_mesh_of_two_dimensions(world, rank):
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    runs = [
        train(by_block(library, Model(), mesh=mesh), torch.optim.SGD, rank, steps=1)
        for library in (fsdp, torchs)
    ]
    for name, value in runs[1].values.items():
        torch.testing.assert_close(runs[0].values[name], value, rtol=0, atol=1e-6, msg=name)


# What is in memory, and when


def gathers_of(model: nn.Module, run: Callable[[], object]) -> int:
    before = model.stats()["gathers"]
    run()
    return model.stats()["gathers"] - before


def forward_and_backward(model: nn.Module, rank: int) -> None:
    mean_square(model, rank_data(SHAPE, rank)).backward()


def test_each_unit_is_released_as_its_call_says(rank):
    """The root is gathered once in each micro-batch, and a unit that is kept as well."""
    model = Model()
    for k, block in enumerate(model.blocks):
        fsdp.fully_shard(block, reshard_after_forward=k != 0)
    fsdp.fully_shard([model.norm, model.last], reshard_after_forward=False)
    fsdp.fully_shard(model)
    torch.optim.SGD(model.parameters(), lr=0.01)
    forward_and_backward(model, rank)  # the order is known from now on
    run = lambda: forward_and_backward(model, rank)  # noqa: E731
    assert gathers_of(model, run) == 3 + 2 * 2  # the root, two kept ones, two that are not
    model.set_reshard_after_forward(False)
    assert gathers_of(model, run) == 5
    model.set_reshard_after_forward(True)
    model.blocks[0].set_reshard_after_forward(False, recurse=False)
    assert gathers_of(model, run) == 2 + 3 * 2 - 1  # what ends the forward stays


def test_parameters_may_stay_between_micro_batches(rank):
    model = by_block(fsdp, Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.set_reshard_after_backward(False)
    forward_and_backward(model, rank)
    run = lambda: forward_and_backward(model, rank)  # noqa: E731
    assert gathers_of(model, run) == 2  # the blocks that are released between forward and backward
    optimizer.step()
    with pytest.raises(RuntimeError, match="released"):
        model.first.weight.sum()
    model.set_reshard_after_backward(True)
    run()
    assert gathers_of(model, run) == 2 + 3 + 2  # the root has two: before the blocks, and after


@pytest.mark.parametrize("async_op", [False, True])
def test_a_unit_is_gathered_alone(async_op, rank):
    """Until ``reshard()``, or to the end of its next forward."""
    model, expected = by_block(fsdp, Model()), Model()
    block, weight = model.blocks[1], expected.blocks[1].inner.weight
    for end in (block.reshard, lambda: model(rank_data(SHAPE, rank))):
        handle = block.unshard(async_op=async_op)
        assert isinstance(handle, torchs.UnshardHandle) == async_op
        if async_op:
            handle.wait()
        assert_bits(block.inner.weight, weight)
        with pytest.raises(RuntimeError, match="released"):
            model.blocks[0].inner.weight.sum()
        with torch.no_grad():
            end()
        with pytest.raises(RuntimeError, match="released"):
            block.inner.weight.sum()


def test_a_write_to_a_gathered_unit_is_lost_as_in_fsdp2():
    model, expected = by_block(fsdp, Model()), Model()
    model.blocks[1].unshard()
    with torch.no_grad():
        model.blocks[1].inner.weight.zero_()
    model.blocks[1].reshard()
    assert_bits(zero_ext.full_tensor(model.blocks[1].inner.weight), expected.blocks[1].inner.weight)


def test_a_model_that_is_deleted_is_freed_at_once(rank):
    def train_one() -> list[weakref.ref]:
        model = by_block(fsdp, Model(), reshard_after_forward=True)
        train(model, torch.optim.SGD, rank, steps=1)
        model.blocks[0].unshard()
        return [weakref.ref(each) for each in (model, model.blocks[0], model.first.weight)]

    gc.disable()
    try:
        assert [each() for each in train_one()] == [None, None, None]
    finally:
        gc.enable()


# Other ways to a first use


def test_a_model_on_the_meta_device_is_initialised_after_its_calls(rank):
    with torch.device("meta"):
        model = by_block(fsdp, Model())
    with pytest.raises(RuntimeError, match=r"'first.weight' of FSDPModel is on the meta device"):
        model(rank_data(SHAPE, rank))
    model.to_empty(device="cpu")
    for parameter, value in zip(model.parameters(), Model().parameters(), strict=True):
        parameter.detach().copy_(value)
    found = train(model, torch.optim.SGD, rank, steps=1)
    expected = train(by_block(fsdp, Model()), torch.optim.SGD, rank, steps=1)
    assert found.losses == expected.losses
    for name, value in expected.values.items():
        assert_bits(found.values[name], value, name)


def test_a_method_may_be_the_first_use(rank):
    x, plain = rank_data(SHAPE, rank), Model()
    model = Model()
    for each in (model.first, model):
        fsdp.fully_shard(each)
    fsdp.register_fsdp_forward_method(model, "describe")
    fsdp.register_fsdp_forward_method(nn.Linear(2, 3), "nothing")  # no FSDPModule
    output = model.describe(x)
    assert_bits(output, plain.describe(x))
    output.sum().backward()
    assert model.first.weight.grad is not None


def test_training_goes_on_from_states_that_are_loaded_before_a_step(rank):
    """By torch's functions for checkpoints, and by the optimizer's own method."""
    model = by_block(fsdp, Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    assert get_optimizer_state_dict(model, optimizer)["state"]  # which steps with zeros
    forward_and_backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()
    states = get_state_dict(model, optimizer)
    own = model.state_dict(), optimizer.state_dict()

    def load_all(m: nn.Module, o: torch.optim.Optimizer) -> None:
        set_state_dict(m, o, model_state_dict=states[0], optim_state_dict=states[1])

    def load_each(m: nn.Module, o: torch.optim.Optimizer) -> None:
        m.load_state_dict(own[0])
        o.load_state_dict(own[1])

    loaded = []
    for load in (load_all, load_each):
        again = by_block(fsdp, Model())
        loaded.append((again, torch.optim.AdamW(again.parameters(), lr=0.01)))
        load(*loaded[-1])
    for m, o in ((model, optimizer), *loaded):
        forward_and_backward(m, rank)
        o.step()
    expected = values_of(model)
    for m, _ in loaded:
        for name, value in values_of(m).items():
            assert_bits(value, expected[name], name)


def test_one_divide_factor_holds_for_all_units(world, rank):
    factor = 2.0 * world  # the default is world
    model = by_block(fsdp, Model())
    modules = [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
    modules[-1].set_gradient_divide_factor(factor)
    with pytest.raises(NotImplementedError, match=rf"factors .*Block: {factor}.*FSDPModel: None"):
        forward_and_backward(model, rank)
    for module in modules:
        module.set_gradient_divide_factor(factor)
    forward_and_backward(model, rank)
    expected = fma_gradients(Model(), rank_batches(SHAPE, world), factor)
    for name, gradient in gradients_of(model).items():
        assert_bits(gradient, expected[name], name)


@pytest.mark.parametrize("schedule_class", [ScheduleGPipe, ScheduleInterleaved1F1B])
def test_pipelines_see_stages_that_are_sharded(schedule_class, world, rank):
    """Stages on their own ranks: the schedule gathers, releases and ends them by their methods."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "dp"))
    count = 1 if schedule_class is ScheduleGPipe else 2
    torch.manual_seed(0)
    plain = [nn.Sequential(ResidualBlock(7), ResidualBlock(7)) for _ in range(count * world)]
    torch.manual_seed(0)
    modules = [nn.Sequential(ResidualBlock(7), ResidualBlock(7)) for _ in plain][rank::world]
    stages = []
    for k, module in enumerate(modules):
        for each in (*module, module):
            fsdp.fully_shard(each, mesh=mesh["dp"], reshard_after_forward=False)
        place = rank + k * world, len(plain)
        stages.append(
            PipelineStage(module, *place, torch.device("cpu"), group=mesh.get_group("pp"))
        )
    fsdp.share_comm_ctx(modules)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    schedule = schedule_class(stages if count > 1 else stages[0], world, loss_fn=F.mse_loss)
    x, target = rank_data((2 * world, 7), 0), torch.zeros(2 * world, 7)
    schedule.step(*([x] if rank == 0 else []), target=target)
    for optimizer in optimizers:
        optimizer.step()
    whole_model = nn.Sequential(*plain)
    for part in x.chunk(world):
        (F.mse_loss(whole_model(part), torch.zeros_like(part)) / world).backward()
    torch.optim.SGD(whole_model.parameters(), lr=0.1).step()
    for module, expected in zip(modules, plain[rank::world], strict=True):
        for name, value in values_of(module).items():
            # The schedule scales gradients once more than the division of the loss above does.
            torch.testing.assert_close(value, expected.get_parameter(name), rtol=0, atol=1e-6)
