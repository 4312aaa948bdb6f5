"""torch.ops.zero_ext.*: schema, fake kernels, and the messages that wrong arguments get."""

from __future__ import annotations

import pytest
import torch

from zero_ext import ops

ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 1}


CODES = torch.zeros(33, dtype=torch.int8), torch.zeros(33, dtype=torch.uint8)
SCALES = {"exp_avg_scale": torch.ones(1), "exp_avg_sq_scale": torch.ones(1)}


def flag():
    return torch.zeros(1, dtype=torch.int32)


def count():
    return torch.zeros(1)


def f32(numel=33):
    return torch.randn(numel)


def bf16(numel=33):
    return torch.randn(numel).bfloat16()


SAMPLES = {
    "accumulate_": [
        ((bf16(), f32()), {}),
        ((bf16(), f32(), 0.5, True, flag()), {}),
    ],
    "accumulate_list_": [
        (([bf16(), bf16(7)], [f32(), f32(7)]), {}),
        (([bf16()], [f32()], 0.5, True, flag()), {}),
    ],
    "accumulate_ranks_": [(([bf16(), bf16()], f32(), 0.5, False, flag()), {})],
    "adamw_": [
        ((f32(), bf16(), f32(), f32(), f32().abs()), ADAM),
        ((f32(), None, f32(), f32(), f32().abs(), f32().abs()), ADAM | {"decoupled": False}),
        ((f32(), None, f32(), f32(), f32().abs()), ADAM | {"skip": flag(), "steps_done": count()}),
        ((f32(), None, f32(), bf16(), bf16().abs()), ADAM),
        ((f32(), bf16(), f32(), *CODES), ADAM | SCALES),
    ],
    "sgd_": [
        ((f32(), bf16(), f32()), {"lr": 0.1}),
        ((f32(), None, f32(), f32()), {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ],
    "cast_": [((f32(), bf16()), {}), ((bf16(), f32()), {})],
    "flatten_": [(([bf16(), bf16(7)], f32(64), [0, 40], True, flag()), {})],
    "find_nonfinite_": [(([f32(), f32(7)], torch.zeros(2, dtype=torch.int32)), {})],
    "adopt_writes_": [((bf16(), f32()), {})],
    "reduce_scatter_accumulate_": [((bf16(), f32(), "", 0.5, False), {})],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    for args, kwargs in SAMPLES[name]:
        torch.library.opcheck(getattr(torch.ops.zero_ext, name).default, args, kwargs)


def test_every_public_op_has_a_sample():
    schemas = torch._C._jit_get_all_schemas()
    public = {s.name.split("::")[1] for s in schemas if s.name.startswith("zero_ext::")}
    assert {name for name in public if not name.startswith("_")} == set(SAMPLES)


def test_ops_bump_the_version_of_what_they_write():
    grad, total = bf16(), f32()
    ops.accumulate_(grad, total)
    assert (grad._version, total._version) == (0, 1)


WRONG = {
    "'grad' has 32 elements, 'sum' has 33": lambda: ops.accumulate_(bf16(32), f32(33)),
    "'sum' has dtype BFloat16, it must be torch.float32": lambda: ops.accumulate_(bf16(), bf16()),
    "'grad' has dtype Double. Use torch.float32, torch.bfloat16 or torch.float16": lambda: (
        ops.accumulate_(f32().double(), f32())
    ),
    "is not contiguous. Pass .contiguous": lambda: ops.accumulate_(bf16(66)[::2], f32()),
    "'grad' and 'sum' share memory. Pass separate buffers": lambda: overlapping(),
    "2 tensors in 'grads', 1 in 'sums'. Pass one for each": lambda: ops.accumulate_list_(
        [bf16(), bf16()], [f32()]
    ),
    "'grads[1]' has dtype Float, 'grads[0]' has BFloat16. Call once per dtype": lambda: (
        ops.accumulate_list_([bf16(), f32()], [f32(), f32()])
    ),
    "'nonfinite' has dtype Float and 1 elements, it must be one torch.int32": lambda: (
        ops.accumulate_(bf16(), f32(), nonfinite=torch.zeros(1))
    ),
    "'steps_done' has dtype Int and 1 elements, it must be one torch.float32": lambda: ops.adamw_(
        f32(), None, f32(), f32(), f32(), lr=0.1, weight_decay=0.0, steps_done=flag()
    ),
    "'exp_avg' has 32 elements, 'master' has 33": lambda: ops.adamw_(
        f32(), None, f32(), f32(32), f32(), lr=0.1, weight_decay=0.0, step=1
    ),
    "'exp_avg' has dtype Char. Pass 'exp_avg_scale' and 'exp_avg_sq_scale'": lambda: ops.adamw_(
        f32(), None, f32(), *CODES, lr=0.1, weight_decay=0.0, step=1
    ),
    "'exp_avg_sq' must be contiguous, of dtype BFloat16": lambda: ops.adamw_(
        f32(), None, f32(), bf16(), f32(), lr=0.1, weight_decay=0.0, step=1
    ),
    "'step' is 0, the first update is number 1": lambda: ops.adamw_(
        f32(), None, f32(), f32(), f32(), lr=0.1, weight_decay=0.0, step=0
    ),
    "'momentum' is 0.9 and 'momentum_buffer' is None. Pass a buffer of 33 elements": lambda: (
        ops.sgd_(f32(), None, f32(), lr=0.1, momentum=0.9)
    ),
    "'sources[0]' with 33 elements at offset 8 does not fit into 'flat' with 40": lambda: (
        ops.flatten_([bf16()], f32(40), [8])
    ),
    "'grads' is empty. Pass one gradient per rank": lambda: ops.accumulate_ranks_([], f32()),
    "'nonfinite' has 1 elements, 'values' has 2": lambda: ops.find_nonfinite_(
        [f32(), f32()], flag()
    ),
    "'nonfinite' is Float. Pass contiguous int32 flags, one for each of 'values'": lambda: (
        ops.find_nonfinite_([f32()], f32(1))
    ),
    "'master' has dtype BFloat16, it must be torch.float32": lambda: ops.adopt_writes_(
        bf16(), bf16()
    ),
}


def test_an_update_has_exactly_one_number():
    arguments = (f32(), None, f32(), f32(), f32())
    for numbers in [{}, {"step": 1, "steps_done": count()}]:
        with pytest.raises(ValueError, match="either 'step' or 'steps_done'"):
            ops.adamw_(*arguments, lr=0.1, weight_decay=0.0, **numbers)


def overlapping():
    buffer = f32(64)
    ops.accumulate_(buffer[1:34], buffer[:33])


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named_with_their_values(message):
    with pytest.raises(RuntimeError) as error:
        WRONG[message]()
    assert str(error.value).startswith("zero_ext: ")
    assert message in str(error.value)


def test_a_refused_call_writes_nothing():
    sums = [f32(), f32(7)]
    before = [total.clone() for total in sums]
    with pytest.raises(RuntimeError, match="has 8 elements"):
        ops.accumulate_list_([bf16(), bf16(8)], sums)
    assert all(torch.equal(a, b) for a, b in zip(sums, before, strict=True))
