"""plan.units_by_size: each parameter in one unit, in reverse order, of one dtype and size."""

from itertools import pairwise

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from zero_ext.engine.plan import units_by_size
from zero_ext.engine.units import UnitPlan

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

parameters = st.lists(
    st.tuples(st.integers(0, 50) | st.just(0), st.sampled_from([F32, BF16, F16])), max_size=30
)
bucket_sizes = st.sampled_from([1e-6, 1, 100, 333.5, 1e9])


def cut(parameters, bucket_bytes):
    tensors = [nn.Parameter(torch.empty(numel, dtype=dtype)) for numel, dtype in parameters]
    return units_by_size(dict(enumerate(tensors)), [None] * len(tensors), bucket_bytes)


def bytes_of(unit, parameters):
    return sum(parameters[i][0] * parameters[i][1].itemsize for i in unit.members)


def test_units_fill_from_the_last_parameter_to_the_first():
    assert cut([(10, F32)] * 5, 80) == [
        UnitPlan([3, 4], F32),
        UnitPlan([1, 2], F32),
        UnitPlan([0], F32),
    ]


def test_a_parameter_larger_than_a_bucket_is_a_unit_of_its_own():
    assert [plan.members for plan in cut([(1, F32), (1000, F32), (1, F32)], 8)] == [[2], [1], [0]]


def test_small_ones_at_the_end_of_a_full_unit_come_last_together():
    """Norms that a block registers last are used before its weights."""
    block = [(1000, F32), (1000, F32), (2, F32), (3, F32)]
    assert [plan.members for plan in cut(block * 3, 4000)] == [
        [9], [8], [5], [4], [1], [0], [2, 3, 6, 7, 10, 11]
    ]  # fmt: skip
    assert [plan.members for plan in cut(block * 3, 8)] == [[i] for i in reversed(range(12))]
    # In the middle they are where they were, and at the model's beginning unless others are apart.
    mixed = [(2, F32), (500, F32), (2, F32), (500, F32)]
    assert [plan.members for plan in cut(mixed, 4008)] == [[1, 2, 3], [0]]
    assert [plan.members for plan in cut(mixed[:2], 2000)] == [[1], [0]]
    assert [plan.members for plan in cut(mixed[:3], 2000)] == [[1], [0, 2]]


def test_small_ones_are_cut_to_the_size_of_a_bucket_too():
    block = [(1000, F32), (10, F32)]
    plans = cut(block * 200, 4000)
    assert [bytes_of(plan, block * 200) for plan in plans[:200]] == [4000] * 200
    assert [bytes_of(plan, block * 200) for plan in plans[200:]] == [4000, 4000]


def test_everything_fits_into_one_unit_of_a_large_bucket():
    assert cut([(10, BF16)] * 7, 1e9) == [UnitPlan(list(range(7)), BF16)]


def test_dtypes_are_counted_in_their_own_bytes():
    assert [len(plan.members) for plan in cut([(10, BF16)] * 8, 80)] == [4, 4]
    assert [len(plan.members) for plan in cut([(10, F32)] * 8, 80)] == [2, 2, 2, 2]


def test_interleaved_dtypes_do_not_cut_each_others_units():
    plans = cut([(1, F32), (1, BF16)] * 3, 1e9)
    assert {plan.dtype: plan.members for plan in plans} == {F32: [0, 2, 4], BF16: [1, 3, 5]}


def test_no_parameters_make_no_units():
    assert cut([], 100) == []


@given(parameters, bucket_sizes)
@example([(0, F32)] * 3, 1)
def test_every_parameter_is_in_exactly_one_unit(parameters, bucket_bytes):
    members = [i for plan in cut(parameters, bucket_bytes) for i in plan.members]
    assert sorted(members) == list(range(len(parameters)))


@given(parameters, bucket_sizes)
def test_members_are_in_registration_order_and_of_the_units_dtype(parameters, bucket_bytes):
    for plan in cut(parameters, bucket_bytes):
        assert plan.members == sorted(plan.members)
        assert all(parameters[i][1] == plan.dtype for i in plan.members)


@given(parameters, bucket_sizes)
def test_only_a_single_parameter_makes_a_unit_too_large(parameters, bucket_bytes):
    for plan in cut(parameters, bucket_bytes):
        sizes = [n for n in (parameters[i][0] for i in plan.members) if n > 0]
        assert bytes_of(plan, parameters) <= bucket_bytes or len(sizes) <= 1


def without_small(parameters, bucket_bytes):
    return [(n, d) for n, d in parameters if n * d.itemsize * 64 > bucket_bytes]


@given(parameters, bucket_sizes)
def test_units_of_one_dtype_come_in_reverse_registration_order(parameters, bucket_bytes):
    parameters = without_small(parameters, bucket_bytes)
    for dtype in (F32, BF16, F16):
        plans = [plan for plan in cut(parameters, bucket_bytes) if plan.dtype == dtype]
        assert [i for plan in reversed(plans) for i in plan.members] == [
            i for i, (_, d) in enumerate(parameters) if d == dtype
        ]


@given(parameters, bucket_sizes)
def test_no_unit_could_have_taken_the_first_parameter_of_the_next(parameters, bucket_bytes):
    """Units are not smaller than they have to be, or there would be more messages."""
    parameters = without_small(parameters, bucket_bytes)
    for dtype in (F32, BF16, F16):
        plans = [plan for plan in cut(parameters, bucket_bytes) if plan.dtype == dtype]
        for unit, following in pairwise(plans):
            numel, _ = parameters[following.members[-1]]
            assert bytes_of(unit, parameters) + numel * dtype.itemsize > bucket_bytes


def test_kinds_are_in_the_order_in_which_they_become_complete():
    """The fp32 gradients of a tied embedding come last, other dtypes by their places."""
    half, fp32 = torch.bfloat16, torch.float32
    parameters = {i: nn.Parameter(torch.ones(7)) for i in range(5)}
    plans = units_by_size(parameters, [half, half, fp32, half, None], 1e6, several_uses={0})
    found = [(plan.members, plan.dtype, plan.gradient_is_fp32) for plan in plans]
    expected = [([4], fp32, False), ([1, 3], half, False), ([2], fp32, False), ([0], half, True)]
    assert found == expected
