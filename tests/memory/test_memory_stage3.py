"""Stage 3's bytes: at rest, gathered at once, kept for graphs, and within a limit."""

import gc
import math

import pytest
import torch
from harness import (
    DIRECT,
    DTYPES,
    MLP,
    Blocks,
    gather_objects,
    mean_square,
    rank_batches,
    rank_data,
)
from memory_formula import HELD, ceil_to, peer_bytes, ranges_of
from reference import OneProcess
from setups import assert_same_values, lazily_free_bytes
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2)]

SEPARATE = 1e-6  # MiB: every module is a unit
MIB = 2**20
KEPT = (*HELD, "shard")


def unit_names(blocks: int = 6) -> list[list[str]]:
    modules = [*(f"blocks.{i}" for i in reversed(range(blocks))), "head"]
    return [[f"{name}.weight", f"{name}.bias"] for name in modules]


def is_on_a_device(model) -> bool:
    return next(model.parameters()).device.type != "cpu"


def keeps_shards(model) -> bool:
    """Beside masters."""
    return DIRECT or not is_on_a_device(model)


def at_rest(model, units, world, states: int = 2) -> dict[str, int]:
    """fp32: shard, which is the master, 4/N, gradient 4/N, Adam 8/N; bf16: 2, 4 more, 4, 8; on a
    device without the 2, unless other devices read them."""
    held = dict.fromkeys(KEPT, 0)
    for share, _, itemsize in ranges_of(model, units, world, 3):
        held["shard"] += share * itemsize if itemsize == 4 or keeps_shards(model) else 0
        held["master"] += share * 4 if itemsize == 2 else 0
        held["grad"] += share * 4
        held["optimizer_state"] += states * share * 4
    return held


def bytes_of(model) -> dict[str, int]:
    stats = model.stats()
    return {what: stats[f"bytes_{what}"] for what in KEPT}


def one_unit(model, world) -> int:
    """Bytes of one gathered unit of ``Blocks``."""
    share, ranges, itemsize = ranges_of(model, unit_names(1)[-1:], world, 3)[0]
    return share * ranges * itemsize


def train(model, optimizer, rank, steps: int = 3, width: int = 37, zeroes: bool = True) -> None:
    """``zeroes``: also the last step's gradients."""
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        mean_square(model, rank_data((2, width), rank, step, dtype=dtype)).backward()
        optimizer.step()
        if zeroes or step < steps - 1:
            optimizer.zero_grad()


# At rest


@DTYPES
@pytest.mark.parametrize(
    ("bucket_mb", "units"),
    [
        (SEPARATE, [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in (2, 1, 0)]),
        (25.0, [[f"layers.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]]),
    ],
    ids=["separate", "merged"],
)
@pytest.mark.parametrize("hidden", [1, 7, 61])
def test_bytes_at_rest_are_the_formula_to_the_byte(
    mesh, rank, world, dtype, bucket_mb, units, hidden
):
    """After wrapping, after each step, and between forward and step nothing but the gradient; on a
    device without it before there is one."""
    model = zero_ext.shard(MLP(hidden, dtype=dtype), 3, mesh=mesh, bucket_mb=bucket_mb)
    expected = at_rest(model, units, world)
    without_gradient = expected | ({"grad": 0} if is_on_a_device(model) else {})
    at_first = without_gradient | {"bucket": peer_bytes(model, units, world, 3)}
    assert bytes_of(model) == at_first | {"optimizer_state": 0}
    optimizer = zero_ext.optim.AdamW(model.parameters())
    assert bytes_of(model) == at_first
    for step in range(3):
        mean_square(model, rank_data((3, 5), rank, step, dtype=dtype)).backward()
        assert bytes_of(model) | {"bucket": 0} == expected
        optimizer.step()
        assert bytes_of(model) | {"bucket": 0} == expected
        optimizer.zero_grad()
        assert bytes_of(model) | {"bucket": 0} == without_gradient
    assert model.stats()["bytes_held"] == sum(bytes_of(model).values())


def test_a_policys_dtype_has_the_bytes_of_that_dtype(mesh, rank, world):
    """fp32 parameters that are computed in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = zero_ext.shard(Blocks(), 3, mesh=mesh, bucket_mb=SEPARATE, mp_policy=policy)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    train(model, optimizer, rank, steps=1, zeroes=False)
    share = ceil_to(ceil_to(37 * 37, 32) + ceil_to(37, 32), 32 * world) // world
    held = bytes_of(model) | {"bucket": 0}
    per_element = {"master": 4, "grad": 4, "optimizer_state": 8}
    if keeps_shards(model):
        per_element["shard"] = 2
    assert held == dict.fromkeys(KEPT, 0) | {k: 7 * share * b for k, b in per_element.items()}


def test_frozen_parameters_take_a_shard_and_nothing_else(mesh, rank, world):
    model = Blocks()
    model.blocks.requires_grad_(False)
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=SEPARATE)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    train(model, optimizer, rank, zeroes=False)
    frozen, head = (
        at_rest(model, unit_names()[:-1], world),
        at_rest(model, unit_names()[-1:], world),
    )
    held = bytes_of(model) | {"bucket": 0}
    assert held == head | {"shard": frozen["shard"] + head["shard"]}


def test_all_ranks_hold_equally_much(mesh, group, rank):
    model = zero_ext.shard(MLP(13), 3, mesh=mesh, bucket_mb=SEPARATE)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    mean_square(model, rank_data((3, 5), rank)).backward()
    optimizer.step()
    held = gather_objects(bytes_of(model), group)
    assert held == [held[0]] * mesh.size()


# At most


@DTYPES
@pytest.mark.parametrize("ahead", [0, 0.5, 1, 2.5, 10])
def test_the_peak_is_rest_gathered_units_and_two_buckets(mesh, rank, world, dtype, ahead):
    """Gathered at once: the root, the block that the pass is in, and what is prefetched."""
    model = Blocks(dtype=dtype)
    unit = one_unit(model, world)
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=SEPARATE, prefetch_mb=ahead * unit / MIB)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    train(model, optimizer, rank)

    stats = model.stats()
    rest = sum(at_rest(model, unit_names(), world).values())
    two_buckets = peer_bytes(model, unit_names(), world, 3)
    two_buckets = two_buckets or 2 * (unit + unit * (world - 1) // world)
    assert stats["bytes_bucket"] == two_buckets
    gathered = min(2 + math.floor(ahead), 7) * unit
    expected = rest + gathered + two_buckets
    if is_on_a_device(model):  # where the gradients come one by one
        assert expected - at_rest(model, unit_names(), world)["grad"] <= stats["bytes_peak"]
        assert stats["bytes_peak"] <= expected
    else:
        assert stats["bytes_peak"] == expected
    assert stats["bytes_full"] == 0


class Passing(nn.Module):
    """Blocks that hand on what they were given, a position bias as T5's, written to or not."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x, bias):
            return self.linear(x + bias).tanh(), bias

    def __init__(self, width=37, blocks=6):
        super().__init__()
        self.bias = nn.Linear(width, width)
        self.blocks = nn.ModuleList([self.Block(width) for _ in range(blocks)])

    def forward(self, x):
        bias = self.bias(x)
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


def test_what_blocks_hand_on_brings_none_of_them_back(mesh, rank, world):
    peaks, gathers = [], []
    for blocks in (4, 12):
        model = Passing(blocks=blocks)
        zero_ext.shard(model, 3, mesh=mesh, bucket_mb=SEPARATE, prefetch_mb=0)
        for step in range(3):
            model(rank_data((4, 37), rank, step)).square().mean().backward()
            model.zero_grad()
        before = model.stats()["gathers"]
        model(rank_data((4, 37), rank, 4)).square().mean().backward()
        stats = model.stats()
        gathers.append((stats["gathers"] - before) / blocks)
        peaks.append(stats["bytes_peak"] - stats["bytes_held"])
    assert gathers[0] == gathers[1] == 2
    assert peaks[0] == peaks[1]


def test_an_input_that_outlives_many_forwards_collects_no_calls(mesh, rank):
    model = zero_ext.shard(Blocks(width=7, blocks=2), 3, mesh=mesh, bucket_mb=SEPARATE)
    x = rank_data((4, 7), rank).requires_grad_() * 1.0  # its node stays
    before = zero_ext._C.living_calls()
    for _ in range(5):
        model(x).square().mean().backward(inputs=list(model.parameters()), retain_graph=True)
        assert zero_ext._C.living_calls() == before


@pytest.mark.parametrize("prefetch_mb", [0, None])
def test_without_prefetch_two_units_are_gathered_at_any_time(mesh, rank, world, prefetch_mb):
    """Looked at from inside every forward and every gradient. Where all ranks read each other's
    memory that is what they do without being told."""
    model = Blocks()
    unit = one_unit(model, world)
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=SEPARATE, prefetch_mb=prefetch_mb)
    if prefetch_mb is None and model.stats()["neighbors"] < world - 1:
        return
    optimizer = zero_ext.optim.AdamW(model.parameters())
    seen = []

    def look(*_):
        seen.append(model.stats()["bytes_full"])

    for block in model.blocks:
        block.register_forward_hook(look, prepend=True)
    for parameter in model.parameters():
        parameter.register_hook(look)
    train(model, optimizer, rank)
    assert len(seen) == 3 * (6 + 14)
    # A device's allocator has what was released.
    assert set(seen) == ({unit, 2 * unit} if is_on_a_device(model) else {2 * unit})


@pytest.mark.parametrize("reshards", [True, False])
def test_what_stays_between_forward_and_backward_is_not_gathered_again(mesh, rank, world, reshards):
    """Released: all but the root and the last block; with reshard_after_forward=False nothing."""
    model = Blocks()
    unit = one_unit(model, world)
    zero_ext.shard(
        model, 3, mesh=mesh, bucket_mb=SEPARATE, prefetch_mb=0, reshard_after_forward=reshards
    )
    optimizer = zero_ext.optim.AdamW(model.parameters())
    train(model, optimizer, rank, steps=1)
    for step in range(1, 3):
        before = model.stats()["gathers"]
        loss = mean_square(model, rank_data((2, 37), rank, step))
        assert model.stats()["bytes_full"] == (2 if reshards else 7) * unit
        loss.backward()
        assert model.stats()["bytes_full"] == 0
        assert model.stats()["gathers"] - before == (7 + 5 if reshards else 7)
        optimizer.step()
        optimizer.zero_grad()


def test_evaluation_holds_as_much_as_training(mesh, rank, world):
    model = Blocks()
    unit = one_unit(model, world)
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=SEPARATE, prefetch_mb=unit / MIB)
    wrapped = model.stats()["bytes_held"]
    for step in range(3):
        with torch.no_grad():
            model(rank_data((2, 37), rank, step))
        assert model.stats()["bytes_held"] == wrapped
    assert model.stats()["bytes_peak"] == wrapped + 3 * unit
    model.reshard()  # other ranks may still be inside


@pytest.mark.parametrize(("merged", "steps"), [(1, 200), (2, 50), (3, 50)])
def test_memory_is_constant_over_many_steps(mesh, rank, world, merged, steps):
    model = Blocks()
    unit = one_unit(model, world)
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=merged * unit / MIB)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    looks = []
    for _ in range(5):
        train(model, optimizer, rank, steps=steps // 5)
        gc.collect()
        tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        looks.append((bytes_of(model), model.stats()["bytes_peak"], tensors))
    assert looks[1:] == [looks[1]] * 4


# Kept graphs


@pytest.mark.host
def test_pages_of_released_units_wait_for_the_next_pass(mesh, rank):
    model = Blocks(width=1100, blocks=3)
    full = sum(p.nbytes for p in model.parameters())
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=SEPARATE, prefetch_mb=0)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    addresses = []
    model.blocks[1].register_forward_pre_hook(
        lambda module, _: addresses.append(module.weight.data_ptr())
    )
    before = lazily_free_bytes()
    train(model, optimizer, rank, width=1100)
    assert len(set(addresses)) == 1
    assert model.stats()["bytes_full"] == 0
    unit, stats = full // 4, model.stats()
    others = stats["bytes_bucket"] + stats["bytes_grad"]  # at most
    assert unit // 2 < lazily_free_bytes() - before < 3 * unit + others
    with model.summon_full_params():
        pass
    assert lazily_free_bytes() <= before + others  # the whole model is not kept
    train(model, optimizer, rank, width=1100)
    assert lazily_free_bytes() > before
    del model, optimizer
    gc.collect()
    assert lazily_free_bytes() <= before


@pytest.mark.parametrize("units", [0, 1, 2.5, 7, None])
def test_retained_bytes_bounds_what_kept_graphs_hold(mesh, rank, world, units):
    model = Blocks()
    unit = one_unit(model, world)
    bound = None if units is None else int(units * unit)
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=SEPARATE, prefetch_mb=0, retained_bytes=bound)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    loss = mean_square(model, rank_data((2, 37), rank))
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert model.stats()["bytes_full"] == unit * min(
            7, math.floor(7 if units is None else units)
        )
    loss.backward()
    assert model.stats()["bytes_full"] == 0
    mean_square(model, rank_data((2, 37), rank)).backward(retain_graph=True)
    optimizer.step()
    assert model.stats()["bytes_full"] == 0


# A limit


def sum_of(estimate: dict[str, int]) -> int:
    return estimate["persistent"] + estimate["gathered"] + estimate["buckets"]


def test_a_model_trains_whose_shards_fit_and_whose_parameters_do_not(
    mesh, rank, world, monkeypatch
):
    """At the limit that the formula gives, to the byte; stage 2 does not fit it."""
    shape = (2, 37)
    arguments = {"bucket_mb": SEPARATE, "prefetch_mb": 0}
    blocks = 20
    estimate = zero_ext.estimate_memory(
        Blocks(blocks=blocks), world, 3, peer_memory=DIRECT, **arguments
    )
    limit = sum_of(estimate)
    whole = sum(p.numel() for p in Blocks(blocks=blocks).parameters()) * 16
    assert limit < whole
    monkeypatch.setenv("ZERO_EXT_LIMIT_BYTES", str(limit))
    model = zero_ext.shard(Blocks(blocks=blocks), 3, mesh=mesh, **arguments)
    # Small steps: rounding grows with depth and with the activations.
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-3)
    reference = OneProcess(Blocks(blocks=blocks), lambda params: torch.optim.AdamW(params, lr=1e-3))
    for step in range(3):
        batches = rank_batches(shape, world, step)
        mean_square(model, batches[0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.train(batches)
    assert model.stats()["bytes_peak"] == limit
    trained = Blocks(blocks=blocks)
    trained.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    assert_same_values(trained, reference.model)
    with pytest.raises(RuntimeError, match=rf"the limit \(ZERO_EXT_LIMIT_BYTES\) is {limit}\."):
        stage_2 = zero_ext.shard(Blocks(blocks=blocks), 2, mesh=mesh, bucket_mb=SEPARATE)
        _optimizer = zero_ext.optim.AdamW(stage_2.parameters())
        mean_square(stage_2, rank_data(shape, rank)).backward()  # a device's sums begin with it


def test_one_byte_too_little_says_what_was_asked_for_and_how_much(mesh, rank, world, monkeypatch):
    arguments = {"bucket_mb": SEPARATE, "prefetch_mb": 0}
    estimate = zero_ext.estimate_memory(Blocks(), world, 3, peer_memory=DIRECT, **arguments)
    without_gathers = estimate["persistent"] + (estimate["buckets"] if DIRECT else 0)
    if is_on_a_device(Blocks()):
        without_gathers -= estimate["grad"]
    unit = one_unit(Blocks(), world)
    limit = without_gathers + 2 * unit - 1
    monkeypatch.setenv("ZERO_EXT_LIMIT_BYTES", str(limit))
    model = zero_ext.shard(Blocks(), 3, mesh=mesh, **arguments)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    message = (
        rf"{unit} more bytes for 'full' would make {limit + 1}, "
        rf"the limit \(ZERO_EXT_LIMIT_BYTES\) is {limit}\."
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model(rank_data((2, 37), rank))
        held = model.stats()
        assert held["bytes_held"] == sum(bytes_of(model).values())
        assert held["bytes_full"] <= unit
    assert held["bytes_peak"] == without_gathers + unit
    assert optimizer.state  # held all the while
    model.reshard()  # other ranks may still be inside


@pytest.mark.parametrize("text", ["", "1e9", "-1", "2 GB"])
def test_a_limit_that_is_no_number_is_refused(mesh, monkeypatch, text):
    monkeypatch.setenv("ZERO_EXT_LIMIT_BYTES", text)
    with pytest.raises(ValueError, match=r"ZERO_EXT_LIMIT_BYTES='.*' is not a number of bytes"):
        zero_ext.shard(MLP(), 3, mesh=mesh)


# estimate_memory


@DTYPES
@pytest.mark.parametrize("bucket_units", [0, 2, 100])
@pytest.mark.parametrize("ahead", [None, 0, 1, 3])
def test_the_estimate_is_what_is_held_and_gathered(mesh, rank, world, dtype, bucket_units, ahead):
    model = Blocks(dtype=dtype)
    model.blocks[2].requires_grad_(False)
    unit = one_unit(model, world)
    arguments = {"bucket_mb": max(SEPARATE, bucket_units * unit / MIB)}
    if ahead is not None:
        arguments["prefetch_mb"] = ahead * unit / MIB
    estimate = zero_ext.estimate_memory(model, world, 3, peer_memory=DIRECT, **arguments)
    zero_ext.shard(model, 3, mesh=mesh, **arguments)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    train(model, optimizer, rank, zeroes=False)
    stats = model.stats()
    for what in ("full", "shard", "master", "grad", "optimizer_state"):
        assert stats[f"bytes_{what}"] == estimate[what], what
    assert stats["bytes_bucket"] <= estimate["buckets"]
    assert stats["bytes_peak"] <= sum_of(estimate)
    if bucket_units == 0 and ahead is not None and not is_on_a_device(model):
        assert stats["bytes_peak"] == sum_of(estimate)


def test_the_estimate_of_units_inside_units_counts_all_that_are_entered(mesh, rank, world):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.outer = nn.Linear(37, 37)
            self.inner = nn.Linear(37, 37)

        def forward(self, x):
            return torch.tanh(self.outer(self.inner(x)))

    model = nn.Sequential(Nested(), Nested(), nn.Linear(37, 37))
    arguments = {
        "bucket_mb": SEPARATE,
        "prefetch_mb": 0,
        "units": lambda name, module: name in ("0", "1", "0.inner", "1.inner"),
    }
    estimate = zero_ext.estimate_memory(model, world, 3, **arguments)
    zero_ext.shard(model, 3, mesh=mesh, **arguments)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    seen = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: seen.append(model.stats()["bytes_full"]))
    train(model, optimizer, rank)
    share, ranges, itemsize = ranges_of(model, [["2.weight", "2.bias"]], world, 3)[0]
    assert estimate["gathered"] == max(seen) == 3 * share * ranges * itemsize
