"""The arithmetic of the kernels, against float64, plain torch or one element at a time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from kernel_data import (
    DTYPES,
    SETS,
    all_half_patterns,
    same_bits,
    same_values,
    special_floats,
    values,
)
from stored_moments import FORMS, StoredAdamW

from zero_ext import ops

LENGTHS = [0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 1083, 4097, 2**20 + 3]
SHORT_LENGTHS = [1, 7, 33, 1083, 4097]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


# accumulate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 0.25, -2.0])
def test_accumulate_with_a_power_of_two_scale_is_torch_bit_for_bit(
    instruction_set, dtype, numel, scale
):
    grad, total = values(numel, dtype), values(numel)
    expected = total + scale * grad.float()
    ops.accumulate_(grad, total, scale)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SHORT_LENGTHS)
def test_accumulate_rounds_once(instruction_set, dtype, numel):
    grad, total = values(numel, dtype), values(numel)
    scale = float(torch.tensor(1 / 3, dtype=torch.float32))
    # The exact sum is a rational of small integers; Fraction finds its nearest float32.
    expected = [exact_fma(scale, g, s) for g, s in zip(grad.tolist(), total.tolist(), strict=True)]
    ops.accumulate_(grad, total, scale)
    assert torch.equal(total, torch.tensor(expected))


def exact_fma(a: float, b: float, c: float) -> float:
    """a * b + c, as a float64 whose rounding to float32 is the single rounding of the exact value.

    Float64 holds the product exactly; two-sum finds the error of the addition.
    """
    product = a * b
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    is_even = int(math.frexp(total)[0] * 2**53) % 2 == 0
    if error != 0 and is_even:
        # Round to odd: the sticky last bit makes the second rounding right.
        total = math.nextafter(total, math.copysign(math.inf, error))
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_a_fresh_sum_is_overwritten_and_never_read(instruction_set, dtype, numel):
    grad, total = values(numel, dtype), torch.full((numel,), math.nan)
    nonfinite = torch.zeros(1, dtype=torch.int32)
    ops.accumulate_(grad, total, 0.5, fresh=True, nonfinite=nonfinite)
    assert torch.equal(total, 0.5 * grad.float())
    assert nonfinite.item() == 0


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("grad_offset", [0, 1, 3])
@pytest.mark.parametrize("sum_offset", [0, 1, 5, 15])
def test_alignment_changes_nothing_and_nothing_around_the_range_is_touched(
    instruction_set, grad_offset, sum_offset, fresh
):
    numel = 2**20 + 11  # long enough for streaming stores
    grad = values(numel, torch.bfloat16, grad_offset)
    buffer = values(numel + sum_offset + 9)
    before = buffer.clone()
    total = buffer[sum_offset : sum_offset + numel]
    expected = grad.float() + (0 if fresh else total)
    ops.accumulate_(grad, total, fresh=fresh)
    assert torch.equal(total, expected)
    assert torch.equal(buffer[:sum_offset], before[:sum_offset])
    assert torch.equal(buffer[sum_offset + numel :], before[sum_offset + numel :])


def test_small_contributions_are_not_lost():
    total = torch.zeros(33)
    for grad in [256.0] + [1.0] * 63:
        ops.accumulate_(torch.full((33,), grad, dtype=torch.bfloat16), total)
    assert torch.equal(total, torch.full((33,), 319.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_list_is_the_same_as_one_call_each(instruction_set, dtype, fresh):
    grads = [values(n, dtype) for n in LENGTHS]
    sums = [values(n) for n in LENGTHS]
    expected = [total.clone() for total in sums]
    for grad, total in zip(grads, expected, strict=True):
        ops.accumulate_(grad, total, 0.3, fresh=fresh)
    ops.accumulate_list_(grads, sums, 0.3, fresh=fresh)
    assert all(same_bits(a, b) for a, b in zip(sums, expected, strict=True))


def test_an_empty_list_is_legal():
    ops.accumulate_list_([], [])
    ops.flatten_([], torch.ones(3), [])


# accumulate_ranks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("numel", [0, 1, 7, 33, 1083, 4097, 2**20 + 3])
def test_accumulate_ranks_is_repeated_accumulate_bit_for_bit(
    instruction_set, dtype, ranks, fresh, numel
):
    if instruction_set == "baseline" and numel > 4097 and ranks > 3:
        pytest.skip("the software fma is slow, and short lengths cover it")
    grads = [values(numel, dtype) for _ in range(ranks)]
    total = values(numel)
    expected = total.clone()
    for rank, grad in enumerate(grads):
        ops.accumulate_(grad, expected, 1 / 3, fresh=fresh and rank == 0)
    ops.accumulate_ranks_(grads, total, 1 / 3, fresh=fresh)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize("fresh", [False, True])
def test_one_rank_may_contribute_from_the_sum_itself(instruction_set, place, fresh):
    grads = [values(4097) for _ in range(6)]
    total = grads[place]
    expected = torch.zeros(4097) if fresh else total.clone()
    for grad in [grad.clone() for grad in grads]:
        expected += 0.5 * grad
    ops.accumulate_ranks_(grads, total, 0.5, fresh=fresh)
    assert torch.equal(total, expected)


# cast


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_every_half_pattern_is_cast_as_torch_does(instruction_set, source, target):
    patterns = all_half_patterns(source)
    out = torch.empty(patterns.numel(), dtype=target)
    ops.cast_(patterns, out)
    assert same_values(out, patterns.to(target))


@pytest.mark.parametrize("target", DTYPES)
def test_floats_are_rounded_as_torch_does(instruction_set, target):
    source = special_floats()
    out = torch.empty(source.numel(), dtype=target)
    ops.cast_(source, out)
    assert same_values(out, source.to(target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_do_not_depend_on_flushed_subnormals(instruction_set, dtype):
    patterns = all_half_patterns(dtype)
    expected = patterns.float()
    if dtype == torch.bfloat16:  # bfloat16's subnormals are float32's
        patterns = patterns[expected.abs() >= torch.finfo(torch.float32).tiny]
        expected = patterns.float()
    out, back = torch.empty_like(expected), torch.empty_like(patterns)
    assert torch.set_flush_denormal(True)
    try:
        ops.cast_(patterns, out)
        ops.cast_(out, back)
    finally:
        torch.set_flush_denormal(False)
    assert same_values(out, expected)
    assert same_values(back, patterns)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("numel", LENGTHS)
def test_casts_of_every_length(instruction_set, source, target, offset, numel):
    data = values(numel, source, offset)
    out = torch.empty(numel + offset, dtype=target)[offset:]
    ops.cast_(data, out)
    assert torch.equal(out, data.to(target))


# flatten


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("add", [False, True])
def test_flatten_places_every_source_and_leaves_the_gaps(instruction_set, source, target, add):
    numels = [3, 0, 64, 1083, 1, 4097, 40_000]
    sources = [values(n, source) for n in numels]
    offsets, end = [], 5
    for n in numels:
        offsets.append(end)
        end += n + 3
    flat = values(end, target)
    expected = flat.clone()
    for data, at in zip(sources, offsets, strict=True):
        place = expected[at : at + data.numel()]
        place.copy_(place.float() + data.float() if add else data)
    ops.flatten_(sources, flat, offsets, add=add)
    assert same_values(flat, expected)


# non-finite values


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 511, 512, 1000, 1082])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_gradient_is_reported_wherever_it_is(instruction_set, bad, place, dtype):
    clean, dirty = values(1083, dtype), values(1083, dtype)
    dirty[place] = bad
    calls = {
        "accumulate": lambda g, flag: ops.accumulate_(g, torch.zeros(1083), nonfinite=flag),
        "fresh": lambda g, flag: ops.accumulate_(g, torch.zeros(1083), fresh=True, nonfinite=flag),
        "scale 0": lambda g, flag: ops.accumulate_(g, torch.zeros(1083), 0.0, nonfinite=flag),
        "list": lambda g, flag: ops.accumulate_list_(
            [clean, g], list(torch.zeros(2, 1083)), nonfinite=flag
        ),
        "ranks": lambda g, flag: ops.accumulate_ranks_(
            [clean, g, clean], torch.zeros(1083), nonfinite=flag
        ),
        "flatten": lambda g, flag: ops.flatten_(
            [g], torch.zeros(1083, dtype=dtype), [0], nonfinite=flag
        ),
        "flatten add": lambda g, flag: ops.flatten_(
            [g], torch.zeros(1083), [0], add=True, nonfinite=flag
        ),
    }
    for name, call in calls.items():
        reported, silent = torch.zeros(2, 1, dtype=torch.int32)
        call(dirty, reported)
        call(clean, silent)
        assert (reported.item(), silent.item()) == (1, 0), name


def test_a_sum_that_overflows_is_reported(instruction_set):
    nonfinite = torch.zeros(1, dtype=torch.int32)
    ops.accumulate_(torch.full((9,), 3e38), torch.full((9,), 3e38), nonfinite=nonfinite)
    assert nonfinite.item() == 1


def test_a_cast_that_overflows_is_reported(instruction_set):
    nonfinite = torch.zeros(1, dtype=torch.int32)
    ops.flatten_(
        [torch.full((9,), 7e4)], torch.zeros(9, dtype=torch.float16), [0], nonfinite=nonfinite
    )
    assert nonfinite.item() == 1


def test_the_report_is_never_taken_back():
    nonfinite = torch.ones(1, dtype=torch.int32)
    ops.accumulate_(torch.ones(9), torch.ones(9), nonfinite=nonfinite)
    assert nonfinite.item() == 1


def test_the_largest_finite_values_are_finite(instruction_set):
    nonfinite = torch.zeros(1, dtype=torch.int32)
    largest = torch.full((33,), torch.finfo(torch.float32).max)
    ops.accumulate_(largest, torch.zeros(33), nonfinite=nonfinite)
    ops.accumulate_(-largest, torch.zeros(33), nonfinite=nonfinite)
    assert nonfinite.item() == 0


# Adam and AdamW


def adam_state(numel: int, param_dtype: torch.dtype | None, amsgrad: bool, offset: int = 0):
    master = values(numel, offset=offset)
    param = None
    if param_dtype is not None:
        param = master.to(param_dtype, copy=True)
    state = {
        "master": master,
        "param": param,
        "exp_avg": torch.zeros(numel),
        "exp_avg_sq": torch.zeros(numel),
    }
    return state | {"max_exp_avg_sq": torch.zeros(numel) if amsgrad else None}


@pytest.mark.parametrize("numel", [1, 33, 1083])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torch_adam(instruction_set, numel, amsgrad, maximize, decoupled, weight_decay):
    """Both follow the same formula in fp32 but round it at different places: per step a few units
    of 2^-24 of the update and of the parameter. Five steps of size lr stay within 1e-6 relative to
    the parameter plus lr * 1e-4; a moment errs by a few units per step, more where terms cancel."""
    hyper = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": weight_decay}
    state = adam_state(numel, None, amsgrad)
    reference = torch.nn.Parameter(state["master"].clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([reference], **hyper, amsgrad=amsgrad, maximize=maximize, foreach=False)
    for step in range(1, 6):
        grad = values(numel)
        reference.grad = 0.25 * grad
        optimizer.step()
        ops.adamw_(
            **state,
            **hyper,
            grad=grad,
            step=step,
            grad_scale=0.25,
            maximize=maximize,
            decoupled=decoupled,
        )
    torch.testing.assert_close(state["master"], reference.data, rtol=1e-6, atol=1e-6)
    inner = optimizer.state[reference]
    for name in ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad:
        torch.testing.assert_close(state[name], inner[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("numel", [1, 7, 255, 257, 5000])
@pytest.mark.parametrize("form", FORMS)
def test_adamw_stores_its_moments_as_plain_torch_does(instruction_set, form, numel):
    """Steps, scales and a block without gradients; beside a copy to compute with."""
    master = values(numel)
    if numel == 5000:  # a shorter parameter would keep fp32 in the reference
        reference = StoredAdamW(master, form, lr=1e-2)
    else:
        reference = StoredAdamW(torch.cat([master, torch.zeros(5120 - numel)]), form, lr=1e-2)
    param, blocks = master.bfloat16(), -(-numel // 256)
    if form == "int8":
        state = {
            "exp_avg": torch.zeros(numel, dtype=torch.int8),
            "exp_avg_sq": torch.zeros(numel, dtype=torch.uint8),
            "scales": (torch.zeros(blocks), torch.zeros(blocks)),
        }
    else:
        state = {name: torch.zeros(numel).bfloat16() for name in ("exp_avg", "exp_avg_sq")}
    for step in range(1, 5):
        grad = values(numel)
        grad[256:512] = 0
        reference.step(F.pad(grad, (0, reference.value.numel() - numel)))
        ops.adamw_(master, param, grad, **state, lr=1e-2, weight_decay=1e-2, step=step)
        assert same_bits(master, reference.value[:numel])
        assert same_bits(param, master.bfloat16())
    for k, moment in enumerate((reference.first, reference.second)):
        name = ("exp_avg", "exp_avg_sq")[k]
        if form == "bf16":
            assert same_bits(state[name], moment.values[:numel])
        else:
            assert torch.equal(state[name].long(), moment.codes.flatten()[:numel])
            assert torch.equal(state["scales"][k], moment.scales[:blocks])


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_block_whose_gradient_is_not_finite_has_codes_of_zero(instruction_set, bad):
    """Its other parameters, and all other blocks, are updated as without it."""
    grad = values(600)

    def updated():
        master, codes = torch.ones(600), (torch.zeros(600).char(), torch.zeros(600).byte())
        scales = torch.zeros(3), torch.zeros(3)
        ops.adamw_(master, None, grad, *codes, scales=scales, lr=1e-2, weight_decay=0.0, step=1)
        return master, *codes, *scales

    expected = updated()
    grad[300] = bad
    master, *codes_and_scales = updated()
    assert master.isnan().nonzero().tolist() == [[300]]
    expected[0][300] = master[300]
    for codes, scales in ((1, 3), (2, 4)):
        expected[codes][256:512] = 0
        expected[scales][1] = math.nan
    for actual, value in zip((master, *codes_and_scales), expected, strict=True):
        assert torch.equal(actual.nan_to_num(7.0), value.nan_to_num(7.0))


@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_adam_with_a_compute_copy_keeps_the_masters_bits(instruction_set, param_dtype, numel):
    if instruction_set == "baseline" and numel > 4097:
        pytest.skip("the software fma is slow, and short lengths cover it")
    hyper = {"lr": 1e-2, "weight_decay": 0.1}
    alone, copied = adam_state(numel, None, False), adam_state(numel, None, False)
    copied["master"].copy_(alone["master"])
    copied["param"] = copied["master"].to(param_dtype, copy=True)
    for step in range(1, 4):
        grad = values(numel)
        ops.adamw_(**alone, **hyper, grad=grad, step=step)
        ops.adamw_(**copied, **hyper, grad=grad, step=step)
    assert same_bits(alone["master"], copied["master"])
    assert same_bits(copied["param"], copied["master"].to(param_dtype))


def test_adam_propagates_nan_through_the_maximum():
    state = adam_state(33, torch.bfloat16, True)
    state["max_exp_avg_sq"][5] = math.nan
    ops.adamw_(**state, grad=values(33), lr=1e-2, weight_decay=0.0, step=1)
    assert state["master"].isnan().nonzero().tolist() == [[5]]


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["adamw", "sgd", "adopt"])
def test_a_written_parameter_wins_over_its_master_and_the_others_keep_their_bits(
    instruction_set, param_dtype, kernel
):
    master = values(1083)
    param = master.to(param_dtype)
    written = torch.tensor([0, 7, 512, 1082])
    param[written] = torch.tensor([1.5, -2.5, -0.0, 3.0], dtype=param_dtype)
    expected = master.clone()
    expected[written] = param[written].float()
    zeros = torch.zeros(1083)
    if kernel == "adamw":
        ops.adamw_(
            master, param, zeros, zeros.clone(), zeros.clone(), lr=0.1, weight_decay=0.0, step=1
        )
    elif kernel == "sgd":
        ops.sgd_(master, param, zeros, lr=0.1)
    else:
        ops.adopt_writes_(param, master)
    assert torch.equal(master, expected)
    assert torch.equal(param, expected.to(param_dtype))


@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_adopting_without_writes_changes_no_bit(instruction_set, param_dtype, numel):
    master = values(numel)
    before = master.clone()
    ops.adopt_writes_(before.to(param_dtype), master)
    assert same_bits(master, before)


# What an update reads from device memory


def scalar(value, dtype) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype)


@pytest.mark.parametrize("kernel", ["adamw", "sgd"])
def test_a_skipped_update_writes_nothing(kernel):
    state = adam_state(1083, torch.bfloat16, False)
    state = [state["master"], state["param"], values(1083), state["exp_avg"], state["exp_avg_sq"]]
    before = [tensor.clone() for tensor in state]
    skip, steps_done = scalar(1, torch.int32), scalar(4, torch.float32)
    late = {"skip": skip, "steps_done": steps_done}
    if kernel == "adamw":
        ops.adamw_(*state, lr=0.1, weight_decay=0.1, **late)
    else:
        ops.sgd_(*state[:4], lr=0.1, momentum=0.9, **late)
    assert all(same_bits(a, b) for a, b in zip(state, before, strict=True))
    assert steps_done.item() == 4


@pytest.mark.parametrize("step", [1, 2, 17, 1000, 100_000])
def test_a_counted_update_is_the_numbered_one(step):
    """The powers of beta are formed in two ways, both within 1e-10 in float64: the constants made
    of them are the same float32 or neighbours, so the result errs by a few units of 2^-24."""
    counted, numbered = adam_state(1083, torch.bfloat16, False), {}
    counted["exp_avg_sq"] += 1.0
    numbered = {name: None if t is None else t.clone() for name, t in counted.items()}
    grad = values(1083)
    steps_done, factor = scalar(step - 1, torch.float32), scalar(0.25, torch.float32)
    hyper = {"lr": 0.1, "weight_decay": 0.1}
    ops.adamw_(**counted, grad=grad, steps_done=steps_done, grad_factor=factor, **hyper)
    ops.adamw_(**numbered, grad=grad, step=step, grad_scale=0.25, **hyper)
    for name in ["exp_avg", "exp_avg_sq"]:
        assert same_bits(counted[name], numbered[name])
    torch.testing.assert_close(counted["master"], numbered["master"], rtol=1e-6, atol=1e-7)


def test_a_counted_sgd_starts_its_momentum_at_the_first_update():
    master, grad, buffer = values(33), values(33), torch.full((33,), math.nan)
    steps_done = scalar(0, torch.float32)
    arguments = {"lr": 0.1, "momentum": 0.9, "steps_done": steps_done}
    ops.sgd_(master, None, grad, buffer, **arguments)
    assert torch.equal(buffer, grad)
    steps_done += 1
    ops.sgd_(master, None, grad, buffer, **arguments)
    torch.testing.assert_close(buffer, 1.9 * grad)


# SGD


@pytest.mark.parametrize("numel", [1, 33, 1083])
@pytest.mark.parametrize(
    "momentum,dampening,nesterov",
    [(0, 0, False), (0.9, 0, False), (0.9, 0.5, False), (0.9, 0, True)],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_sgd_is_torch_sgd(
    instruction_set, numel, momentum, dampening, nesterov, weight_decay, maximize, param_dtype
):
    """Four steps; ours fuses each multiply-add, torch may round twice: units of 2^-24 per step."""
    hyper = {"lr": 1e-2, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    hyper |= {"weight_decay": weight_decay, "maximize": maximize}
    master = values(numel)
    param = None if param_dtype is None else master.to(param_dtype)
    buffer = (
        torch.full((numel,), math.nan) if momentum else None
    )  # must not be read at the first step
    reference = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.SGD([reference], **hyper, foreach=False)
    for step in range(4):
        grad = values(numel)
        reference.grad = 0.5 * grad
        optimizer.step()
        ops.sgd_(master, param, grad, buffer, **hyper, first=step == 0, grad_scale=0.5)
    torch.testing.assert_close(master, reference.data, rtol=1e-5, atol=1e-5)
    if param is not None:
        assert same_bits(param, master.to(param_dtype))


# NaN and infinity


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_find_nonfinite_sets_the_flags_of_the_tensors_that_hold_some(instruction_set, numel, bad):
    tensors = [values(numel, offset=offset) for offset in [0, 1, 3]] + [values(7)]
    tensors[3][0] = torch.finfo(torch.float32).max
    for place in {0, numel // 2, numel - 1} & set(range(numel)):
        spoilt = [tensor.clone() for tensor in tensors]
        spoilt[1][place] = bad
        flags = torch.tensor([0, 0, 5, 0], dtype=torch.int32)
        ops.find_nonfinite_(spoilt, flags)
        assert flags.tolist() == [0, 1, 5, 0]
    flags = torch.zeros(4, dtype=torch.int32)
    ops.find_nonfinite_(tensors, flags)
    assert flags.tolist() == [0, 0, 0, 0]


# Note [One element, one result] in kernels.h


def every_kernel(numel: int, dtype: torch.dtype, offset: int = 0) -> dict[str, torch.Tensor]:
    """All results of all kernels for one seed, by name."""
    torch.manual_seed(11)

    def data(dtype=torch.float32):
        return values(numel, dtype, offset).clone() if offset == 0 else values(numel, dtype, offset)

    out = {}
    grads = [data(dtype) for _ in range(3)]
    for fresh in [False, True]:
        out[f"accumulate fresh={fresh}"] = data()
        ops.accumulate_(grads[0], out[f"accumulate fresh={fresh}"], 0.3, fresh=fresh)
        out[f"ranks fresh={fresh}"] = data()
        ops.accumulate_ranks_(grads, out[f"ranks fresh={fresh}"], 0.3, fresh=fresh)
    out["list"] = data()
    half = numel // 2
    ops.accumulate_list_(
        [grads[1][:half], grads[1][half:]], [out["list"][:half], out["list"][half:]], 0.3
    )
    for target in DTYPES:
        out[f"cast {target}"] = data(target)
        ops.cast_(grads[0], out[f"cast {target}"])
        for add in [False, True]:
            out[f"flatten {target} {add}"] = data(target)
            ops.flatten_([grads[2]], out[f"flatten {target} {add}"], [0], add=add)
    for amsgrad in [False, True]:
        for decoupled in [False, True]:
            name = f"adam {amsgrad} {decoupled}"
            master = data()
            param = master.to(dtype) if dtype != torch.float32 else None
            moments = [data(), data().abs(), data().abs()]
            ops.adamw_(
                master, param, data(), moments[0], moments[1], moments[2] if amsgrad else None,
                lr=1e-2, weight_decay=0.1, step=3, decoupled=decoupled,
            )  # fmt: skip
            out |= {f"{name} master": master, f"{name} m": moments[0], f"{name} v": moments[1]}
    master, buffer = data(), data()
    param = master.to(dtype) if dtype != torch.float32 else None
    ops.sgd_(
        master,
        param,
        data(),
        buffer,
        lr=1e-2,
        momentum=0.9,
        dampening=0.1,
        weight_decay=0.1,
        nesterov=True,
    )
    out |= {"sgd master": master, "sgd buffer": buffer}
    out["adopted"] = data()
    ops.adopt_writes_(data(dtype), out["adopted"])
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 1083, 4097, 70_001])
def test_all_instruction_sets_give_the_same_bits(dtype, numel):
    previous = torch.ops.zero_ext._instruction_set()
    previous_ahead = torch.ops.zero_ext._use_fetch_ahead("none")
    results = []
    try:
        for name, ahead in itertools.product(SETS, ("none", "sums", "all")):
            torch.ops.zero_ext._use_instruction_set(name)
            torch.ops.zero_ext._use_fetch_ahead(ahead)
            results.append(every_kernel(numel, dtype))
    finally:
        torch.ops.zero_ext._use_instruction_set(previous)
        torch.ops.zero_ext._use_fetch_ahead(previous_ahead)
    for other in results[1:]:
        assert [k for k in other if not same_bits(results[0][k], other[k])] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [40_000, 2**20 + 3])
def test_the_number_of_threads_changes_no_bit(dtype, numel, threads):
    threads(1)
    one = every_kernel(numel, dtype)
    threads(2)
    two = every_kernel(numel, dtype)
    assert [name for name in one if not same_bits(one[name], two[name])] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_range_cut_anywhere_gives_the_same_bits(instruction_set, dtype):
    grad, whole = values(1083, dtype), values(1083)
    cut = whole.clone()
    ops.accumulate_(grad, whole, 0.3)
    for part in torch.arange(1083).split([1, 6, 9, 500, 567]):
        ops.accumulate_(grad[part[0] : part[-1] + 1], cut[part[0] : part[-1] + 1], 0.3)
    assert same_bits(whole, cut)
