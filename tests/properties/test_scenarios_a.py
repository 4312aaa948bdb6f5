"""1,083 parameters of which a loss reaches 63: no bucket stays empty, nothing else is touched.

A failure that was reported against a well-known implementation: after
``p.data = p.data.contiguous()`` no hook had fired, and the gradient buckets were empty.
Each rank compares its own parts, which together are everything.
"""

import sys

import pytest
import torch
from harness import ManyLayers, assert_bits, mean_square, rank_data, reference_gradients
from reference import (
    OneProcess,
    fma_gradients,
    gradients_of,
    own_part,
    own_values,
    shown_master,
)
from setups import readable, values_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import zero_ext

BLOCKS, REACHED = 361, 21  # of three parameters each: 1,083 and 63
FEWER_BLOCKS = 73  # 219 parameters; blocks and units are as large
WIDTH = 8
STEPS = 3
LR = 1e-2
ADAMW = {"lr": LR, "weight_decay": 0.1}
FP32_EPS = torch.finfo(torch.float32).eps
# Units of about seven blocks, so that most units of a step are empty and some are half full.
BUCKET_MB = 4e-3

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
WAYS = pytest.mark.parametrize("way", ["shard", "optimizer"])
# Both ways in both dtypes only when there is time.
COMBINATIONS = pytest.mark.parametrize(
    "way, dtype",
    [
        ("shard", torch.bfloat16),
        ("optimizer", torch.float32),
        pytest.param("shard", torch.float32, marks=pytest.mark.slow),
        pytest.param("optimizer", torch.bfloat16, marks=pytest.mark.slow),
    ],
)


@pytest.fixture(params=[FEWER_BLOCKS, pytest.param(BLOCKS, marks=pytest.mark.slow)])
def blocks(request, monkeypatch) -> int:
    """How many a model of this test has. ``spread`` reaches the same share of them."""
    monkeypatch.setattr(sys.modules[__name__], "BLOCKS", request.param)
    return request.param


SIZES = pytest.mark.usefixtures("blocks")


def many_layers(dtype=torch.float32) -> nn.Module:
    """Weights transposed in memory, so that making them contiguous copies them."""
    model = ManyLayers(BLOCKS, WIDTH, dtype)
    for block in model.blocks:
        block.linear.weight.data = block.linear.weight.data.t().contiguous().t()
    return model


def prepare(way: str, model: nn.Module, stage: int, mesh, offload_policy=None, **kwargs):
    """The optimizer of ``model``, which is sharded by ``shard`` or by the optimizer alone."""
    if stage == 3 and way != "shard":
        pytest.skip("stage 3 needs the module")
    if way == "shard":
        zero_ext.shard(model, stage, mesh=mesh, bucket_mb=BUCKET_MB, offload_policy=offload_policy)
        return zero_ext.optim.AdamW(model.parameters(), **ADAMW, **kwargs)
    return zero_ext.optim.AdamW(
        model.parameters(),
        stage=stage,
        process_group=None if mesh is None else mesh.get_group(),
        bucket_mb=BUCKET_MB,
        offload_policy=offload_policy,
        **ADAMW,
        **kwargs,
    )


def one_process(dtype=torch.float32) -> OneProcess:
    return OneProcess(many_layers(dtype), lambda p: torch.optim.AdamW(p, **ADAMW))


def spread(first: int, count: int = REACHED) -> list[int]:
    """``count`` of 361 blocks all over the model, others for each ``first``."""
    return sorted((first + 17 * k) % BLOCKS for k in range(-(-count * BLOCKS // 361)))


def batch(rank: int, step: int, used, dtype=torch.float32, micro: int = 0):
    return rank_data((2, WIDTH), rank, step, micro, dtype=dtype), used


def expected_gradients(reference: OneProcess, batches, world: int, scale: float = 1.0):
    """Only those ranks contribute that have a loss; all are divided by the number of ranks."""
    present = [[batch] for ranks in batches for batch in ranks if batch is not None]
    if scale != 1:

        def scaled_loss(model, batch):
            return scale * mean_square(model, batch)

        return fma_gradients(reference.model, present, world * scale, scaled_loss)
    if world & (world - 1):
        return fma_gradients(reference.model, present, world)
    return reference_gradients(lambda: reference.model, present, 1, 1 / world)


def train_and_compare(model, optimizer, reference, world, rank, batches_of, scaler=None):
    """Three steps beside the reference; each one's gradients by their bits, the rest untouched.

    ``batches_of(step)`` is ``batches[micro][rank]``, None where a rank has no loss.
    """
    for step in range(STEPS):
        batches = batches_of(step)
        # From the same parameters, because one ulp of a master may become one of a bf16 weight.
        copy_parameters(model, reference)
        scale = 1.0 if scaler is None else scaler.get_scale()
        gradients = expected_gradients(reference, batches, world, scale)
        before = values_of(model)

        optimizer.zero_grad()
        for ranks in batches:
            if ranks[rank] is not None:
                loss = mean_square(model, ranks[rank])
                (loss if scaler is None else scaler.scale(loss)).backward()
        check_step(model, optimizer, reference, gradients, before, scaler)


def copy_parameters(model, reference) -> None:
    with torch.no_grad(), readable(model):
        for name, parameter in model.named_parameters():
            # With its strides too: they decide the order of the sums inside a GEMM.
            reference.parameters[name].data = parameter.detach().clone()


def make_step(optimizer, scaler) -> None:
    if isinstance(scaler, torch.amp.GradScaler):
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()


def check_step(model, optimizer, reference, gradients, before, scaler=None) -> None:
    __tracebackhide__ = True
    reached = {name for name, gradient in gradients.items() if gradient is not None}
    steps = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters()}
    make_step(optimizer, scaler)
    assert_gradients(model, gradients)
    reference.step(gradients)
    after = values_of(model)
    for name, parameter in model.named_parameters():
        stepped = int(optimizer.state[parameter]["step"]) - steps[name]
        assert stepped == (name in reached), name
        if name not in reached:
            assert_bits(after[name], before[name], f"{name}, which was not reached,")
    check_masters(model, reference, reached, after)


def check_masters(model, reference, reached, values) -> None:
    __tracebackhide__ = True
    # One update of AdamW: a dozen roundings relative to it, two relative to the master.
    parameters = dict(model.named_parameters())
    for name in sorted(reached):
        parameter, master = parameters[name], shown_master(parameters[name])
        expected = own_part(reference.masters[name], master).cpu()
        own = own_values(master).cpu()
        bound = STEPS * FP32_EPS * (2 * expected.abs() + 16 * LR)
        assert ((own - expected).abs() <= bound).all(), name
        assert_bits(own_part(values[name], master), own.to(parameter.dtype), name)


def assert_gradients(model, expected) -> None:
    """The same parameters have one, with the same bits on this rank's part."""
    __tracebackhide__ = True
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (expected[name] is None), name
        if parameter.grad is not None:
            part = own_part(expected[name], parameter.grad)
            assert_bits(own_values(parameter.grad), part, f"gradient of {name}")


REPLACEMENTS = {
    "untouched": lambda data: data,
    "contiguous": lambda data: data.contiguous(),  # other strides, where the weight is transposed
    "clone": lambda data: data.clone(),
}


# A copy with other strides says most; one with the same follows when there is time.
HOW = pytest.mark.parametrize(
    "blocks, how",
    [
        (FEWER_BLOCKS, "untouched"),
        (BLOCKS, "contiguous"),
        pytest.param(BLOCKS, "untouched", marks=pytest.mark.slow),
        pytest.param(BLOCKS, "clone", marks=pytest.mark.slow),
    ],
    indirect=["blocks"],
)


def replace_data(model: nn.Module, how: str) -> None:
    with readable(model):
        for parameter in model.parameters():
            parameter.data = REPLACEMENTS[how](parameter.data)


@STAGES
@COMBINATIONS
@HOW
def test_63_of_1083_are_reduced_and_stepped_whatever_happened_to_their_data(
    anywhere, rank, world, stage, way, dtype, blocks, how
):
    """The set of 63 changes each step; the other 1,020 keep ``grad is None`` and their bits."""
    model = many_layers(dtype)
    optimizer = prepare(way, model, stage, anywhere)
    replace_data(model, how)
    assert len(list(model.parameters())) == 3 * blocks

    def batches(step):
        return [[batch(r, step, spread(5 * step), dtype) for r in range(world)]]

    train_and_compare(model, optimizer, one_process(dtype), world, rank, batches)


@SIZES
@STAGES
@WAYS
@pytest.mark.parametrize("how", ["contiguous", pytest.param("clone", marks=pytest.mark.slow)])
def test_data_may_be_replaced_between_backward_and_the_first_step(
    anywhere, rank, world, stage, way, how
):
    model, reference = many_layers(torch.bfloat16), one_process(torch.bfloat16)
    optimizer = prepare(way, model, stage, anywhere)
    used = spread(3)
    batches = [[batch(r, 0, used, torch.bfloat16) for r in range(world)]]
    gradients = expected_gradients(reference, batches, world)
    before = values_of(model)
    mean_square(model, batches[0][rank]).backward()
    replace_data(model, how)
    check_step(model, optimizer, reference, gradients, before)


@STAGES
def test_convolutions_may_change_their_memory_format(anywhere, rank, world, stage):
    """To channels_last after wrapping, as ``model.to(memory_format=...)`` does it."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.GELU(), nn.Conv2d(5, 2, 2))

    batches = [[rank_data((2, 3, 6, 6), r) for r in range(world)]]
    model = zero_ext.shard(build(), stage, mesh=anywhere, bucket_mb=1e-4)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=1.0)
    with readable(model):
        model.to(memory_format=torch.channels_last)
    before = values_of(model)
    mean_square(model, batches[0][rank]).backward()
    gradients = gradients_of(model)
    optimizer.step()

    reference = build().to(memory_format=torch.channels_last)
    expected = reference_gradients(lambda: reference, batches, world, 1 / world)
    after = values_of(model)
    for name, _ in model.named_parameters():
        # A convolution's GEMM may see other strides: a few roundings of the sums in it.
        bound = 64 * FP32_EPS * expected[name].norm()
        assert (gradients[name] - expected[name]).norm() <= bound, name
        assert_bits(after[name], before[name] - gradients[name], name)


@SIZES
@pytest.mark.dist
@pytest.mark.world(min=2)
@STAGES
@COMBINATIONS
def test_ranks_may_reach_different_sets(mesh, rank, stage, way, dtype):
    """Some blocks on all ranks, some on one; what only one reached is divided by all as well."""
    model, world = many_layers(dtype), mesh.size()
    optimizer = prepare(way, model, stage, mesh)
    replace_data(model, "contiguous")

    def batches(step):
        common = spread(7 * step, 5)
        return [
            [
                batch(r, step, sorted({*common, *spread(40 + step + 3 * r, 16)}), dtype)
                for r in range(world)
            ]
        ]

    train_and_compare(model, optimizer, one_process(dtype), world, rank, batches)


@SIZES
@pytest.mark.dist
@pytest.mark.world(min=2)
@STAGES
@WAYS
def test_a_rank_may_reach_nothing_at_all(mesh, rank, stage, way):
    """Rank 1 has no loss in step 0, rank 0 none in step 1, nobody has one in step 2."""
    model, world = many_layers(), mesh.size()
    optimizer = prepare(way, model, stage, mesh)

    def batches(step):
        idle = {0: {1}, 1: {0}, 2: set(range(world))}[step]
        return [[None if r in idle else batch(r, step, spread(step + 3 * r)) for r in range(world)]]

    train_and_compare(model, optimizer, one_process(), world, rank, batches)


@SIZES
@WAYS
def test_micro_batches_may_reach_different_sets(anywhere, rank, world, way):
    """Three of them, stage 2: the sum has the bits of one process, None where no one was."""
    model = many_layers()
    optimizer = prepare(way, model, 2, anywhere)

    def batches(step):
        return [
            [
                batch(r, step, spread(11 * step + 29 * micro + r, 7), micro=micro)
                for r in range(world)
            ]
            for micro in range(3)
        ]

    train_and_compare(model, optimizer, one_process(), world, rank, batches)


@SIZES
@pytest.mark.parametrize("way", ["shard", "optimizer"])
def test_a_parameter_that_only_a_local_micro_batch_reached_is_reduced(anywhere, rank, world, way):
    """Stage 1: reached inside no_sync alone, on one rank alone, and not by the boundary."""
    model = many_layers()
    optimizer = prepare(way, model, 1, anywhere)
    sharded = model if way == "shard" else optimizer
    first = [batch(r, 0, [r]) for r in range(world)]
    last = [batch(r, 0, [50 + r], micro=1) for r in range(world)]
    with sharded.no_sync():
        mean_square(model, first[rank]).backward()
    mean_square(model, last[rank]).backward()

    # Every block has one contribution, so the order of the sum does not matter.
    reference = one_process()
    expected = expected_gradients(reference, [first, last], world)
    assert_gradients(model, expected)


SCALE = 2.0**8  # far from overflow with any initial values


def everything(model, optimizer) -> list[torch.Tensor]:
    """Whole parameters, and this rank's part of all else."""
    parameters = list(model.parameters())
    states = [v for p in parameters for v in optimizer.state[p].values()]
    shown = [*map(shown_master, parameters), *states]
    return [*values_of(model).values(), *(own_values(tensor).clone() for tensor in shown)]


@SIZES
@STAGES
@pytest.mark.parametrize(
    "way, scaler_of",
    [
        ("shard", "torch"),
        ("optimizer", "zero_ext"),
        pytest.param("shard", "zero_ext", marks=pytest.mark.slow),
        pytest.param("optimizer", "torch", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("how", ["contiguous", pytest.param("clone", marks=pytest.mark.slow)])
def test_as_reported_fp16_with_a_dynamic_scale_and_pinned_offload(
    anywhere, rank, world, stage, way, scaler_of, how
):
    """All of it at once; and the last rank's loss overflows before the first good step."""
    model = many_layers(torch.float16)
    kwargs = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    if scaler_of == "zero_ext":
        scaler = kwargs["loss_scaler"] = zero_ext.LossScaler("dynamic", init_scale=2 * SCALE)
    else:
        scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=2 * SCALE)
    optimizer = prepare(way, model, stage, anywhere, **kwargs)
    replace_data(model, how)

    x, used = batch(rank, 9, spread(2), torch.float16)
    before = everything(model, optimizer)
    scaler.scale(mean_square(model, (x * (1000 if rank == world - 1 else 1), used))).backward()
    make_step(optimizer, scaler)
    optimizer.zero_grad()
    for old, new in zip(before, everything(model, optimizer), strict=True):
        assert_bits(new, old)
    assert scaler.get_scale() == SCALE

    def batches(step):
        return [[batch(r, step, spread(5 * step), torch.float16) for r in range(world)]]

    reference = one_process(torch.float16)
    train_and_compare(model, optimizer, reference, world, rank, batches, scaler)
    assert scaler.get_scale() == SCALE
