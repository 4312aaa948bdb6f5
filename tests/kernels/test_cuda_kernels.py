"""The CUDA kernels beside the CPU's, through torch.ops.zero_ext. Needs a GPU and a build for it."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from kernel_data import DTYPES, all_half_patterns, same_bits, same_values, special_floats, values

from zero_ext import _C, _build_info, ops

DEVICE = "cuda"
LENGTHS = [0, 1, 7, 8, 9, 1083, 70_001, 2**20 + 3]
OFFSETS = [(0, 0), (1, 1), (4, 0), (1, 2), (3, 0)]  # of what is read first, of all the rest

if not _build_info.CUDA:
    reason = "this build has no CUDA kernels: build with ZERO_EXT_CUDA=1"
elif not torch.cuda.is_available():
    reason = "there is no GPU"
else:
    reason = ""
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(bool(reason), reason=reason),
]


def on(device: str, tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy on `device`, `offset` elements after an aligned address."""
    buffer = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
    buffer[offset:] = tensor.to(device)
    return buffer[offset:]


def scalar(value, dtype, device=DEVICE) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype, device=device)


def every_kernel(
    device: str, numel: int, dtype: torch.dtype, offsets: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """All results of all kernels for one seed, on the CPU, by name."""
    torch.manual_seed(11)
    out = {}

    def first(kind=torch.float32):
        return on(device, values(numel, kind), offsets[0])

    def rest(kind=torch.float32):
        return on(device, values(numel, kind), offsets[1])

    grads = [first(dtype) for _ in range(5)]
    for fresh in [False, True]:
        for name, call in {
            "accumulate": lambda to, fresh: ops.accumulate_(grads[0], to, 0.3, fresh=fresh),
            "ranks": lambda to, fresh: ops.accumulate_ranks_(grads, to, 0.3, fresh=fresh),
            "list": lambda to, fresh: ops.accumulate_list_(
                list(grads[1].tensor_split(70)), list(to.tensor_split(70)), 0.3, fresh=fresh
            ),
        }.items():
            key = f"{name} fresh={fresh}"
            out[key] = rest()
            call(out[key], fresh)
    for target in DTYPES:
        out[f"cast {target}"] = rest(target)
        ops.cast_(grads[0], out[f"cast {target}"])
        for add in [False, True]:
            key = f"flatten {target} add={add}"
            out[key] = rest(target)
            half = numel // 2
            ops.flatten_([grads[2][:half], grads[3][half:]], out[key], [0, half], add=add)
    for amsgrad in [False, True]:
        for decoupled in [False, True]:
            out |= updated_by_adam(device, first, rest, dtype, amsgrad, decoupled)
    for momentum in [0.0, 0.9]:
        master, grad, buffer = rest(), rest(), rest()
        param = first(dtype)
        ops.sgd_(
            master, param, grad, buffer,
            lr=1e-2, momentum=momentum, dampening=0.1, weight_decay=0.1, nesterov=momentum > 0,
        )  # fmt: skip
        name = f"sgd {momentum}"
        out |= {f"{name} master": master, f"{name} param": param, f"{name} buffer": buffer}
    out["adopted"] = rest()
    ops.adopt_writes_(first(dtype), out["adopted"])
    return {name: tensor.cpu() for name, tensor in out.items()}


def updated_by_adam(device, first, rest, dtype, amsgrad, decoupled) -> dict[str, torch.Tensor]:
    """Some parameters are written by the user; once by number, once with all on the device."""
    out = {}
    for counted in [False, True]:
        master, grad, moments = rest(), rest(), [rest(), rest().abs(), rest().abs()]
        param = first(dtype)
        param[::3] = master.to(dtype)[::3]
        number = {"step": 3}
        if counted:
            number = {
                "skip": scalar(0, torch.int32, device),
                "steps_done": scalar(16, torch.float32, device),
                "grad_factor": scalar(0.7, torch.float32, device),
            }
        ops.adamw_(
            master, param, grad, moments[0], moments[1], moments[2] if amsgrad else None,
            lr=1e-2, weight_decay=0.1, decoupled=decoupled, **number,
        )  # fmt: skip
        name = f"adam amsgrad={amsgrad} decoupled={decoupled} counted={counted}"
        out |= {f"{name} master": master, f"{name} param": param}
        out |= {f"{name} moment {i}": moment for i, moment in enumerate(moments)}
    return out


@functools.lru_cache(maxsize=len(DTYPES))  # the offsets vary in between
def expected_of_every_kernel(numel: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return every_kernel("cpu", numel, dtype, (0, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_both_devices_give_the_same_bits(numel, offsets, dtype):
    cpu = expected_of_every_kernel(numel, dtype)
    device = every_kernel(DEVICE, numel, dtype, offsets)
    assert [name for name in cpu if not same_values(cpu[name], device[name])] == []


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_every_half_pattern_and_special_floats_are_cast_alike(source, target):
    data = special_floats() if source == torch.float32 else all_half_patterns(source)
    expected = torch.empty(data.numel(), dtype=target)
    result = torch.empty(data.numel(), dtype=target, device=DEVICE)
    ops.cast_(data, expected)
    ops.cast_(data.to(DEVICE), result)
    assert same_values(result.cpu(), expected)


@pytest.mark.parametrize("count", [1, 5, 70, 1000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_find_nonfinite_sets_the_flags_of_the_tensors_that_hold_some(count, bad):
    tensors = [values(20_000 if i == 0 else 1 + i % 13).to(DEVICE)[i % 2 :] for i in range(count)]
    flags = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    ops.find_nonfinite_(tensors, flags)
    assert not flags.any()
    spoilt = [i for i in {0, count // 2, count - 1} if tensors[i].numel() > 0]
    for i in spoilt:
        tensors[i][-1] = bad
    ops.find_nonfinite_(tensors, flags)
    assert sorted(flags.nonzero().flatten().tolist()) == sorted(spoilt)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("numel", LENGTHS)
def test_squares_are_added_without_an_order(numel, offset):
    """Digits with their carries done are the sum itself: exact, whatever the grid was."""
    usual = values(numel)
    for data in [usual, usual * 10.0 ** torch.randint(-30, 18, (numel,))]:
        expected = with_carries(_C.square_digits(data))
        assert with_carries(_C.square_digits(on(DEVICE, data, offset))) == expected


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_groups_that_are_not_finite_are_counted(bad):
    data = values(70_001).clone()
    data[[0, 1, 1000, 70_000]] = bad
    expected = with_carries(_C.square_digits(data))
    assert expected[-2:] == ([0, 3] if math.isnan(bad) else [3, 0])
    assert with_carries(_C.square_digits(data.to(DEVICE))) == expected


def with_carries(digits: list[int]) -> list[int]:
    total = sum(digit << 32 * k for k, digit in enumerate(digits[:-2]))
    return [total, *digits[-2:]]


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_is_torchs_adam_in_float64(decoupled):
    """One step from the same state. Parameters of up to 256 and updates of up to 16 err by a few
    units of 2^-24 of themselves."""
    state = [values(1083), values(1083), values(1083), values(1083).abs() + 0.1]
    master, grad, exp_avg, exp_avg_sq = (tensor.to(DEVICE, copy=True) for tensor in state)
    hyper = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    ops.adamw_(master, None, grad, exp_avg, exp_avg_sq, step=7, decoupled=decoupled, **hyper)
    reference = torch.nn.Parameter(state[0].double())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([reference], foreach=False, **hyper)
    optimizer.state[reference] = {
        "step": torch.tensor(6.0),
        "exp_avg": state[2].double(),
        "exp_avg_sq": state[3].double(),
    }
    reference.grad = state[1].double()
    optimizer.step()
    torch.testing.assert_close(
        master.double().cpu(), reference.detach(), rtol=4 * 2.0**-24, atol=2e-5
    )


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtypes", [2 * [torch.bfloat16], [torch.int8, torch.uint8]], ids=str)
def test_moments_in_fewer_bits_are_the_cpu_s(dtypes, offset):
    """Three steps: two blocks and a part of one, one of them without gradients."""
    numel, bits = 600, {torch.bfloat16: torch.int16}
    names = ("exp_avg", "exp_avg_sq")
    host = {
        name: torch.zeros(numel, dtype=dtype) for name, dtype in zip(names, dtypes, strict=True)
    }
    scales = [torch.zeros(3), torch.zeros(3)] if torch.int8 in dtypes else []
    master = values(numel)
    param = master.bfloat16()
    device = {name: value.to(DEVICE) for name, value in host.items()}
    device_scales = [scale.to(DEVICE) for scale in scales]
    on_device = [on(DEVICE, master, offset), on(DEVICE, param, offset)]
    for step in range(1, 4):
        grad = values(numel)
        grad[256:512] = 0
        hyper = {"lr": 1e-2, "weight_decay": 0.1, "step": step}
        of_host, of_device = [{"scales": s} if s else {} for s in (scales, device_scales)]
        ops.adamw_(master, param, grad, **host, **hyper, **of_host)
        ops.adamw_(*on_device, on(DEVICE, grad, offset), **device, **hyper, **of_device)
    assert torch.equal(on_device[0].cpu(), master) and torch.equal(on_device[1].cpu(), param)
    assert all(map(torch.equal, (scale.cpu() for scale in device_scales), scales))
    for name, value in host.items():
        kind = bits.get(value.dtype, value.dtype)
        assert torch.equal(device[name].cpu().view(kind), value.view(kind)), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 1000, 1082])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_gradient_is_reported_wherever_it_is(bad, place, dtype):
    clean, dirty = values(1083, dtype).to(DEVICE), values(1083, dtype).to(DEVICE)
    dirty[place] = bad

    def total(numel=1083):
        return torch.zeros(numel, device=DEVICE)

    calls = {
        "accumulate": lambda g, flag: ops.accumulate_(g, total(), nonfinite=flag),
        "fresh": lambda g, flag: ops.accumulate_(g, total(), fresh=True, nonfinite=flag),
        "list": lambda g, flag: ops.accumulate_list_(
            [clean, g], [total(), total()], nonfinite=flag
        ),
        "ranks": lambda g, flag: ops.accumulate_ranks_([clean, g], total(), nonfinite=flag),
        "flatten": lambda g, flag: ops.flatten_([g], total(), [0], nonfinite=flag),
        "flatten add": lambda g, flag: ops.flatten_([g], total(), [0], add=True, nonfinite=flag),
    }
    for name, call in calls.items():
        reported, silent = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
        call(dirty, reported)
        call(clean, silent)
        assert (reported.item(), silent.item()) == (1, 0), name


@pytest.mark.parametrize("count", [64, 65, 896, 897, 3000])
def test_lists_longer_than_one_launch(count):
    """Lists travel in the launch's parameters, 64 or 896 segments at a time."""
    numels = [int(n) for n in torch.randint(0, 3000, (count,))]
    grads = [values(n, torch.bfloat16) for n in numels]
    sums = [values(n) for n in numels]
    expected = [total.clone() for total in sums]
    ops.accumulate_list_(grads, expected, 0.3)
    results = [total.to(DEVICE) for total in sums]
    ops.accumulate_list_([grad.to(DEVICE) for grad in grads], results, 0.3)
    assert all(same_bits(a.cpu(), b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("fresh", [False, True])
def test_one_rank_may_contribute_from_the_sum_itself(fresh):
    grads = [values(4097) for _ in range(6)]
    expected = grads[2].clone()
    ops.accumulate_ranks_([*grads[:2], expected, *grads[3:]], expected, 0.5, fresh=fresh)
    on_device = [grad.to(DEVICE) for grad in grads]
    ops.accumulate_ranks_(on_device, on_device[2], 0.5, fresh=fresh)
    assert same_bits(on_device[2].cpu(), expected)


def test_a_skipped_update_writes_nothing():
    state = [values(1083).to(DEVICE) for _ in range(4)]
    before = [tensor.clone() for tensor in state]
    skip, steps_done = scalar(1, torch.int32), scalar(4, torch.float32)
    late = {"skip": skip, "steps_done": steps_done}
    ops.adamw_(state[0], None, *state[1:], lr=0.1, weight_decay=0.1, **late)
    ops.sgd_(state[0], None, state[1], state[2], lr=0.1, momentum=0.9, **late)
    assert all(same_bits(a, b) for a, b in zip(state, before, strict=True))
    assert steps_done.item() == 4


def test_ops_run_on_the_current_stream():
    """The kernel of the side stream must see what was queued there before it, a long copy."""
    stream = torch.cuda.Stream()
    grad = torch.zeros(2**24, device=DEVICE)
    total = torch.zeros(2**24, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        grad.fill_(2.0)
        ops.accumulate_(grad, total, 0.5)
    stream.synchronize()
    assert torch.equal(total, torch.ones_like(total))


def test_a_whole_step_is_captured_and_replayed_as_a_graph():
    """Capture refuses every wait for the device and every allocation outside of torch's."""
    master, grads = values(70_001), [values(70_001) for _ in range(2)]

    def new(device):
        moments = [torch.zeros(70_001, device=device) for _ in range(3)]
        return [master.to(device, copy=True), *moments, scalar(0, torch.float32, device)]

    def step(state, grads, skip):
        weights, total, exp_avg, exp_avg_sq, steps_done = state
        ops.accumulate_ranks_(grads, total, 0.5, fresh=True, nonfinite=skip)
        ops.accumulate_list_([grads[0][:100]], [total[:100]])
        late = {"skip": skip, "steps_done": steps_done}
        ops.adamw_(weights, None, total, exp_avg, exp_avg_sq, lr=0.1, weight_decay=0.1, **late)
        steps_done += 1 - skip[0]

    expected = new("cpu")
    for _ in range(3):
        step(expected, grads, scalar(0, torch.int32, "cpu"))
    state, skip = new(DEVICE), scalar(0, torch.int32)
    device_grads = [grad.to(DEVICE) for grad in grads]
    step(new(DEVICE), device_grads, skip)  # loads the kernels, which a capture would refuse
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(state, device_grads, skip)
    for _ in range(3):
        graph.replay()
    assert all(same_values(a.cpu(), b) for a, b in zip(state, expected, strict=True))


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(RuntimeError, match=r"'grad' is on cpu, this call runs on cuda:0"):
        ops.accumulate_(values(8), values(8).to(DEVICE))


def needs_gib(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free device memory, there are {free / 2**30:.0f}")


LARGE = 2**31 + 8 + 3
TAIL = 5000  # crosses element 2^31


def same_tail(large: list[torch.Tensor], small: list[torch.Tensor]) -> bool:
    return all(same_bits(a[-TAIL:], b) for a, b in zip(large, small, strict=True))


def test_more_than_2_to_the_31_elements_are_accumulated():
    """An element's result is its own: the end of a long range is a short range."""
    needs_gib(20)
    grad = torch.randn(LARGE, dtype=torch.bfloat16, device=DEVICE)
    total = torch.randn(LARGE, device=DEVICE)
    tail = total[-TAIL:].clone()
    tail_of_list, tail_of_flat = tail.clone(), grad[-TAIL:].clone()
    ops.accumulate_(grad[-TAIL:].clone(), tail, 0.3)
    ops.accumulate_list_([grad[-TAIL:].clone()], [tail_of_list], 0.3)
    ops.accumulate_(grad, total, 0.3)
    assert same_tail([total], [tail])
    ops.flatten_([grad], total, [0])
    assert same_bits(total[-TAIL:], tail_of_flat.float())
    ops.accumulate_list_([grad], [total], -1.0)
    assert not total.any()
    ops.accumulate_ranks_([grad, grad], total, 0.5, fresh=True)
    ops.cast_(total, grad)
    assert same_bits(grad[-TAIL:], tail_of_flat)
    total.fill_(1.0)
    assert total.sum(dtype=torch.float64).item() == LARGE


def test_more_than_2_to_the_31_elements_are_updated():
    needs_gib(48)
    state = [torch.randn(LARGE, device=DEVICE) for _ in range(4)]
    state[3].abs_()
    param = state[0].bfloat16()
    tails = [tensor[-TAIL:].clone() for tensor in state]
    tail_param = param[-TAIL:].clone()
    hyper = {"lr": 0.1, "weight_decay": 0.1, "step": 2}
    ops.adamw_(tails[0], tail_param, *tails[1:], **hyper)
    ops.adamw_(state[0], param, *state[1:], **hyper)
    assert same_tail([*state, param], [*tails, tail_param])
