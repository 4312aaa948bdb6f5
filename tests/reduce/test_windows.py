"""All ranks' parts of a range are received in windows, so that staging does not grow with ranks."""

import warnings

import pytest
import torch
from harness import (
    DIRECT,
    MLP,
    ONE_UNIT_EACH,
    assert_bits,
    mean_square,
    needs_one_dimension,
    rank_batches,
    rank_data,
    step_and_wait,
)
from memory_formula import peer_bytes, ranges_of
from reference import fma_gradients, gradients_of
from setups import values_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import zero_ext
from zero_ext.engine import options

SHAPE = (3, 5)
NAMES = [f"layers.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
ONE_UNIT = 25.0
# Stages without ranges, and fewer ranges than ranks, need windows on three ranks or more.


def units_of(stage: int, bucket_mb: float) -> list[list[str]]:
    """Small units are parameters, in stage 3 modules."""
    size = len(NAMES) if bucket_mb == ONE_UNIT else 2 if stage == 3 else 1
    return [NAMES[i : i + size] for i in range(0, len(NAMES), size)]


def several_ranks(test):
    return pytest.mark.dist(pytest.mark.world(min=2)(test))


@pytest.fixture(autouse=True)
def no_least_window(monkeypatch):
    monkeypatch.setattr(options, "window_bytes", 0)


def settings_of(mesh, replicas_of, world) -> list[tuple]:
    """(stage, mesh, ranks of a replica) of each case."""
    alone = replicas_of(1)
    cases = [(0, mesh, world), (2, alone, 1), (3, alone, 1), (2, mesh, world)]
    return [*cases, (1, replicas_of(2), 2)] if world % 2 == 0 and world > 2 else cases


@several_ranks
def test_windows_change_no_bit_and_no_bucket_exceeds_the_estimate(
    mesh, replicas_of, rank, world, device
):
    """Over two micro-batches, of which the second is added to a sum; in one unit and in many."""
    needs_one_dimension()
    for stage, over, shards in settings_of(mesh, replicas_of, world):
        for bucket_mb, dtype in [(ONE_UNIT, torch.float32), (ONE_UNIT_EACH, torch.bfloat16)]:
            model = MLP(61, dtype=dtype)
            zero_ext.shard(model, stage, mesh=over, bucket_mb=bucket_mb, reduction="exchange")
            batches = rank_batches(SHAPE, world, micros=2, dtype=dtype)
            for ranks in batches:
                mean_square(model, ranks[rank]).backward()
            expected = fma_gradients(MLP(61, dtype=dtype), batches, world)
            for name, gradient in gradients_of(model).items():
                assert_bits(gradient, expected[name], f"stage {stage}, {shards} shards: {name}")
            held = model.stats()["bytes_bucket"]
            estimate = zero_ext.estimate_memory(
                model,
                world,
                stage,
                shards=shards,
                bucket_mb=bucket_mb,
                reduction="exchange",
                peer_memory=DIRECT,
            )
            assert held <= estimate["buckets"]
            if DIRECT:
                units = units_of(stage, bucket_mb)
                assert held == peer_bytes(model, units, world, stage, shards)
            elif bucket_mb == ONE_UNIT:  # which uses one of the two buckets
                share, ranges, itemsize = ranges_of(model, [NAMES], shards, stage)[0]
                assert held == estimate["buckets"] / 2 <= 2 * share * ranges * itemsize


@several_ranks
def test_windows_change_no_bit_of_offloaded_sums(mesh, rank, world):
    """This rank's own part of a window is copied to the host, too: two ranks need two windows."""
    needs_one_dimension()
    batches = rank_batches(SHAPE, world, micros=2)
    model = MLP(61)
    zero_ext.shard(model, 0, mesh=mesh, offload_policy=CPUOffloadPolicy(), reduction="exchange")
    for ranks in batches:
        mean_square(model, ranks[rank]).backward()
    expected = fma_gradients(MLP(61), batches, world)
    for name, gradient in gradients_of(model).items():
        assert_bits(gradient, expected[name], name)


@several_ranks
@pytest.mark.host
def test_a_backward_that_threw_between_windows_is_undone_and_repeated(mesh, rank, world):
    """On all ranks, or on one when it had started all reductions: then the others hear of it."""
    needs_one_dimension()
    model = zero_ext.shard(MLP(61), 0, mesh=mesh, bucket_mb=ONE_UNIT_EACH)
    if model.stats()["neighbors"] < world - 1:
        pytest.skip("what one rank is past the others see in shared memory alone")
    batches = rank_batches(SHAPE, world, micros=2)
    mean_square(model, batches[0][rank]).backward()
    before = gradients_of(model)

    def throw(_gradient):
        raise ValueError("a user's hook")

    handle = model.layers[0].bias.register_hook(throw)  # the last gradient: others are added
    with pytest.raises(ValueError, match="a user's hook"):
        mean_square(model, batches[1][rank]).backward()
    handle.remove()
    for name, gradient in gradients_of(model).items():
        assert_bits(gradient, before[name], name)

    if world == 2:
        return  # one window is enough, which a rank that throws so late has sent
    batch = batches[1][rank].clone().requires_grad_()
    loss = mean_square(model, batch * 1)
    if rank == 0:
        batch.register_hook(throw)
    told = "a user's hook" if rank == 0 else "went on without this"
    with pytest.raises((ValueError, RuntimeError), match=told):
        loss.backward()
    mean_square(model, batches[1][rank]).backward()
    expected = fma_gradients(MLP(61), batches, world)
    for name, gradient in gradients_of(model).items():
        assert_bits(gradient, expected[name], name)


@several_ranks
def test_a_nan_in_any_window_skips_the_step(mesh, rank, world):
    needs_one_dimension()
    model = zero_ext.shard(MLP(61), 0, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    before = values_of(model)
    for parameter in (model.layers[0].weight, model.layers[2].bias):
        element = parameter.numel() - 1

        def spoil(gradient, element=element):
            spoilt = gradient.clone()
            spoilt.view(-1)[element] = torch.nan
            return spoilt

        handle = parameter.register_hook(spoil)
        mean_square(model, rank_data(SHAPE, rank)).backward()
        with warnings.catch_warnings(action="ignore"):
            step_and_wait(optimizer)
        handle.remove()
        optimizer.zero_grad()
    for name, value in values_of(model).items():
        assert_bits(value, before[name], name)
    mean_square(model, rank_data(SHAPE, rank)).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 2


def test_no_estimate_grows_with_the_ranks():
    """Neither without ranges, nor over replicas, nor with ranges; by hand for collectives."""
    model = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16, device="cpu")
    message = 2 * 1024**2
    for stage, shards in [(0, None), (1, 1), (2, 2), (3, 1), (3, None)]:
        for world in (2, 8, 64, 1024):
            buckets, local = (
                zero_ext.estimate_memory(
                    model, world, stage, shards=shards, local_accumulation=accumulates
                )["buckets"]
                for accumulates in (False, True)
            )
            assert 2 * message < buckets <= 2 * 2 * message * 1.05, (stage, world)
            if stage < 2:  # which accumulate in fp32
                assert local == pytest.approx(2 * buckets, rel=0.05)
            else:
                assert local == buckets
    for stage, shards, copies in [(0, None, 1), (2, None, 1 + 1 / 64), (2, 4, 1 + 1 / 4)]:
        collective = zero_ext.estimate_memory(
            model, 64, stage, shards=shards, reduction="collective"
        )
        assert collective["buckets"] == pytest.approx(2 * copies * 2 * message, rel=1e-2)
    on_gpu = zero_ext.estimate_memory(model, 64, 2, device="cuda")
    assert on_gpu == zero_ext.estimate_memory(model, 64, 2, device="cuda", reduction="collective")
    with pytest.raises(ValueError, match="reduction must be 'exchange' or 'collective', not 'sum'"):
        zero_ext.estimate_memory(model, 8, 2, reduction="sum")


def test_small_units_need_one_window(monkeypatch):
    """Windows are not so short that messages of many ranks cost more than their bytes."""
    monkeypatch.undo()
    model = nn.Linear(8, 8, bias=False, device="cpu")
    buckets = zero_ext.estimate_memory(model, 1024, 0)["buckets"]
    assert buckets == 2 * 1024 * 8 * 8 * 4
