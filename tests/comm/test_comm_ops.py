"""torch.ops.zero_ext.reduce_scatter_accumulate_ against a loop of plain torch, rank by rank."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import assert_bits, gather_objects, rank_data
from torch.testing._internal.optests import opcheck

from zero_ext.ops import reduce_scatter_accumulate_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Whole vectors and tails of every instruction set, and less than one vector.
NUMELS = [1, 7, 64, 1003]


def expected_sum(buckets, rank, numel, start, scale):
    """``start`` plus this rank's part of every bucket. A power-of-two scale has no rounding."""
    total = start.clone()
    for bucket in buckets:
        total += scale * bucket[rank * numel : (rank + 1) * numel].float()
    return total


def all_buckets(world, numel, dtype, step=0):
    return [rank_data([world * numel], rank, step, dtype=dtype) for rank in range(world)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("fresh", [True, False])
def test_sum_has_the_bits_of_adding_in_rank_order(team, dtype, numel, fresh):
    rank, world, group = team
    buckets = all_buckets(world, numel, dtype)
    acc = torch.full([numel], float("nan")) if fresh else rank_data([numel], rank, step=9)
    start = torch.zeros(numel) if fresh else acc.clone()
    sent = buckets[rank].clone()
    reduce_scatter_accumulate_(sent, acc, group, scale=0.25, fresh=fresh)
    assert_bits(acc, expected_sum(buckets, rank, numel, start, 0.25), "acc")
    assert_bits(sent, buckets[rank], "bucket")


def test_micro_batches_add_up_in_micro_batch_and_rank_order(team):
    rank, world, group = team
    acc, expected = torch.empty(33), torch.zeros(33)
    for step in range(5):
        buckets = all_buckets(world, 33, torch.bfloat16, step)
        reduce_scatter_accumulate_(buckets[rank], acc, group, scale=0.5, fresh=step == 0)
        expected = expected_sum(buckets, rank, 33, expected, 0.5)
    assert_bits(acc, expected, "acc")


def test_any_scale_is_one_fused_multiply_add_per_rank(team):
    rank, world, group = team
    scale = torch.tensor(1 / 3)
    buckets = all_buckets(world, 257, torch.float32)
    acc, expected = torch.empty(257), torch.zeros(257)
    reduce_scatter_accumulate_(buckets[rank], acc, group, scale=1 / 3, fresh=True)
    for bucket in buckets:  # the product of two floats is exact in double
        part = bucket[rank * 257 : (rank + 1) * 257].double()
        expected = (expected.double() + scale.double() * part).float()
    assert_bits(acc, expected, "acc")


def test_a_bucket_of_any_shape_is_read_flat(team):
    rank, world, group = team
    bucket = rank_data([world * 5, 4], rank)
    acc = torch.zeros(5, 4)
    reduce_scatter_accumulate_(bucket, acc, group)
    whole = [rank_data([world * 5, 4], r).flatten() for r in range(world)]
    assert_bits(acc.flatten(), expected_sum(whole, rank, 20, torch.zeros(20), 1.0), "acc")


def test_nothing_to_reduce_is_legal(team):
    _, _, group = team
    reduce_scatter_accumulate_(torch.empty(0), torch.empty(0), group, fresh=True)


def test_nan_and_infinity_travel(team):
    rank, world, group = team
    bucket = torch.ones(world * 3)
    if rank == world - 1:
        bucket.view(world, 3)[:] = torch.tensor([float("nan"), float("inf"), 1.0])
    acc = torch.zeros(3)
    reduce_scatter_accumulate_(bucket, acc, group)
    assert_bits(acc, torch.tensor([float("nan"), float("inf"), float(world)]), "acc")


def test_writing_acc_counts_as_an_in_place_write(team):
    _, world, group = team
    acc = torch.zeros(3)
    version = acc._version
    reduce_scatter_accumulate_(torch.ones(world * 3), acc, group)
    assert acc._version == version + 1


def test_opcheck(team):
    rank, world, group = team
    name = "" if group is None else group.group_name
    args = (rank_data([world * 9], rank), torch.zeros(9), name, 0.5, False)
    opcheck(torch.ops.zero_ext.reduce_scatter_accumulate_.default, args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda world: {"bucket": torch.ones(world * 4 + 1)},
            r"\[rank {rank}.*\]: 'bucket' has {more} elements, 'acc' has 4 on each of {world} "
            r"ranks: it must have {right}\. Pad",
        ),
        (lambda world: {"bucket": torch.ones(world * 4).double()}, "'bucket' has dtype Double"),
        (lambda world: {"acc": torch.ones(4).bfloat16()}, "'acc' has dtype BFloat16, it must be"),
        (lambda world: {"bucket": torch.ones(world * 4, 2)[:, 0]}, "'bucket'.*is not contiguous"),
        (lambda world: {"acc": torch.ones(4, 2)[:, 0]}, "'acc'.*is not contiguous. Pass"),
        (lambda world: {"bucket": (b := torch.ones(world * 4)), "acc": b[:4]}, "share memory"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(team, change, message):
    rank, world, group = team
    arguments = {"bucket": torch.ones(world * 4), "acc": torch.zeros(4), **change(world)}
    before = arguments["acc"].clone()
    message = message.format(rank=rank, world=world, right=world * 4, more=world * 4 + 1)
    with pytest.raises(RuntimeError, match=message):
        reduce_scatter_accumulate_(**arguments, group=group)
    assert_bits(arguments["acc"], before, "acc")
    acc = torch.zeros(4)
    reduce_scatter_accumulate_(torch.ones(world * 4), acc, group)
    assert_bits(acc, torch.full([4], float(world)), "acc of the next call")


def test_fake_tensors_are_checked_like_real_ones(team):
    _, world, group = team
    with (
        torch._subclasses.FakeTensorMode(),
        pytest.raises(RuntimeError, match=f"'bucket' must have {world} times as many elements"),
    ):
        reduce_scatter_accumulate_(torch.ones(world * 4 + 1), torch.zeros(4), group)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_ranks_that_disagree_about_the_size_raise(world, rank):
    """A rank that receives more than it asked for would be ended by gloo itself."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    numel = 4 if rank == 0 else 6
    with pytest.raises(RuntimeError, match=rf"of {numel} elements per rank \(") as e:
        reduce_scatter_accumulate_(torch.ones(world * numel), torch.zeros(numel), group)
    # The first timeout closes the group's connections: other ranks may see that before their own.
    remedies = ["Every rank must run the same", "This connection is closed for good"]
    told = [[text in error for text in remedies] for error in gather_objects(str(e.value))]
    assert all(map(any, told)) and any(same for same, _ in told), told


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_an_absent_rank_is_named_and_acc_kept(world, rank):
    """The last rank waits elsewhere for longer than the group waits."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    reduce_scatter_accumulate_(torch.ones(world), torch.zeros(1), group)  # connects the ranks
    dist.barrier()
    if rank < world - 1:
        acc = torch.ones(4)
        started = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            reduce_scatter_accumulate_(torch.ones(world * 4), acc, group)
        assert time.monotonic() - started < 8
        message = str(caught.value)
        assert message.startswith(
            f"zero_ext [rank {rank} of process group '{group.group_name}']: "
            "reduce_scatter_accumulate_ of 4 elements per rank ("
        )
        assert "waiting for rank" in message or "sending to rank" in message
        assert "The timeout is that of the process group, or ZERO_EXT_TIMEOUT_S." in message
        assert "Exception raised from" not in message  # the C++ stack
        assert_bits(acc, torch.ones(4), "acc")
        if world == 2:
            assert f"rank {world - 1})" in message
    dist.barrier()
