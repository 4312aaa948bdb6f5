"""The norm of the gradients: right, and the same bits however they are cut; clipping with it."""

import fractions
import math
from itertools import pairwise

import pytest
import torch
from harness import ManyLayers, assert_bits, mean_square, rank_data
from kernel_data import values
from reference import own_part, own_values
from setups import (
    Way,
    all_ways,
    assert_same_values,
    backward,
    backward_of_all,
    full,
    full_master,
    one_process,
    shard_and_optimizer,
    small_mlp,
)
from torch import nn

import zero_ext
from zero_ext import _C
from zero_ext.engine.registry import find

LR = 0.05
LENGTHS = [0, 1, 15, 16, 17, 33, 2047, 2048, 2049, 70_001]


def exact_sum(digits: list[int]) -> fractions.Fraction:
    return sum(
        (fractions.Fraction(digit) * fractions.Fraction(2) ** (32 * k - 352)
         for k, digit in enumerate(digits[:-2])), fractions.Fraction(0)
    )  # fmt: skip


def expected_sum(data: torch.Tensor) -> fractions.Fraction:
    """Groups of 16 in float64 in the documented order; the groups' sums exactly."""
    padded = torch.zeros(-(-data.numel() // 16) * 16, dtype=torch.float64)
    padded[: data.numel()] = data.double()
    lanes = padded.view(-1, 16) ** 2
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half:]
    return sum(map(fractions.Fraction, lanes.flatten().tolist()), fractions.Fraction(0))


class TestKernel:
    @pytest.mark.parametrize("numel", LENGTHS)
    def test_groups_are_added_exactly(self, instruction_set, numel):
        data = values(numel) * 10.0 ** torch.randint(-30, 18, (numel,))
        digits = _C.square_digits(data)
        assert exact_sum(digits) == expected_sum(data)
        assert digits[-2:] == [0, 0]
        total = math.fsum((data.double() ** 2).tolist())
        # 4 roundings of a group's sum, one for each of the digits that count.
        assert _C.value_of_digits(digits) == pytest.approx(total, rel=8 * 2.0**-53, abs=0)

    @pytest.mark.parametrize(
        "extreme", [2.0**-149, -(2.0**-126), torch.finfo(torch.float32).max], ids=str
    )
    def test_the_smallest_and_the_largest_floats(self, instruction_set, extreme):
        data = torch.full([4099], extreme)
        digits = _C.square_digits(data)
        assert exact_sum(digits) == 4099 * fractions.Fraction(extreme) ** 2
        assert _C.value_of_digits(digits) == float(4099 * fractions.Fraction(extreme) ** 2)

    def test_large_and_tiny_values_together_lose_nothing(self, instruction_set):
        data = torch.full([2048], 2.0**-149)
        data[:16] = 3e38
        squares = 16 * fractions.Fraction(data[0].item()) ** 2
        tiny = 2032 * fractions.Fraction(2) ** -298
        assert exact_sum(_C.square_digits(data)) == squares + tiny

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("place", [0, 1000, 4096])
    def test_what_is_not_finite_is_counted(self, instruction_set, bad, place):
        data = values(4097).clone()
        data[place] = bad
        digits = _C.square_digits(data)
        assert digits[-2:] == ([0, 1] if math.isnan(bad) else [1, 0])
        value = _C.value_of_digits(digits)
        assert math.isnan(value) if math.isnan(bad) else value == math.inf

    def test_nan_wins_over_infinity(self):
        data = torch.tensor([math.inf] + [0.0] * 31 + [math.nan])
        assert math.isnan(_C.value_of_digits(_C.square_digits(data)))

    def test_cuts_at_multiples_of_16_and_threads_change_no_digit(self, threads):
        data = values(200_003)
        whole = _C.square_digits(data)
        threads(2)
        cuts = [0, 16, 4096, 4112, 99_984, 200_003]
        parts = [_C.square_digits(data[a:b].clone()) for a, b in pairwise(cuts)]
        total = [sum(column) for column in zip(*parts, strict=True)]
        assert _C.value_of_digits(total) == _C.value_of_digits(whole)
        assert exact_sum(total) == exact_sum(whole) == exact_sum(_C.square_digits(data))

    @pytest.mark.parametrize("share", ["of one call", "of 1,024 ranks"])
    @pytest.mark.parametrize("value", [0.24874, 1e-3, 2.7e-6, 1.0, 2.0**-149, 3e38])
    def test_the_digits_of_2_to_the_37_elements_fit(self, instruction_set, value, share):
        """As multiples of those of 2^15. Sixteen squares of 0.24874 are 0.99 of a digit's base."""
        data = torch.full([1 << 15], value)
        digits = torch.tensor(_C.square_digits(data))
        one_call = share == "of one call"
        total = digits << 22 if one_call else (digits << 12).expand(1024, -1).sum(0)
        expected = (1 << 37) * fractions.Fraction(data[0].item()) ** 2
        assert _C.value_of_digits(total.tolist()) == pytest.approx(float(expected), rel=1e-12)

    def test_digits_of_any_sign_fit(self, instruction_set):
        """Those of values of all sizes, as of 2^40 elements on 7 ranks."""
        parts = [
            values(16_384) * 10.0 ** torch.randint(-30, 18, (16_384,))
            + torch.full([16_384], 0.24874 / 2.0**rank)
            for rank in range(7)
        ]
        total = sum(torch.tensor(_C.square_digits(part)) << 23 for part in parts)
        expected = math.fsum(float((part.double() ** 2).sum()) for part in parts) * 2.0**23
        assert _C.value_of_digits(total.tolist()) == pytest.approx(expected, rel=1e-12)

    def test_one_call_takes_2_to_the_35_elements_at_most(self):
        with pytest.raises(RuntimeError, match="add_squares"):
            _C.square_digits(torch.zeros(1).expand((1 << 35) + 1))


class Shapes(nn.Module):
    """Odd sizes in two dtypes; parameters straddle ranks and lie at other places for each size."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(1083, dtype=torch.bfloat16))
        self.second = nn.Parameter(torch.ones(7, 13))
        self.third = nn.Parameter(torch.ones(4099))
        self.fourth = nn.Parameter(torch.ones((), dtype=torch.bfloat16))


def gradients_at(scale: float, seed: int) -> list[torch.Tensor]:
    return [
        scale * rank_data(p.shape, seed, micro=i) * 10.0 ** (i - 2)
        for i, p in enumerate(Shapes().parameters())
    ]


def norm_with(gradients, way: Way, group, bucket_mb: float) -> torch.Tensor:
    model = Shapes()
    optimizer = way.optimizer(model, group, zero_ext.optim.SGD, bucket_mb=bucket_mb, lr=0.5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        handle, i = find(parameter)
        handle.engine.write_gradient(i, gradient)
    norm = optimizer.clip_grad_norm_(1e30)
    expected = math.sqrt(math.fsum(g.double().square().sum().item() for g in gradients))
    assert norm.item() == pytest.approx(expected, rel=2**-24)
    return norm


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-3], ids=["one-unit", "many-units"])
@all_ways
def test_the_norm_has_the_bits_of_one_process(team, way, scale, bucket_mb):
    """Any number of ranks against one: so 1, 2, 3 and 4 ranks agree with each other."""
    gradients = gradients_at(scale, seed=3)
    norm = norm_with(gradients, way, team.group, bucket_mb)
    with one_process():
        alone = norm_with(gradients, Way("optimizer", 1), None, 25.0)
    assert_bits(norm, alone)


@all_ways
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_max_grad_norm_clips_every_step(team, way, max_norm):
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, team.group, lr=LR, max_grad_norm=max_norm)
    reference = torch.optim.AdamW(expected.parameters(), lr=LR)
    for step in range(3):
        backward(model, team.rank, step)
        backward_of_all(expected, team.world, step)
        gradients = [own_values(p.grad).clone() for p in model.parameters()]
        norm = nn.utils.clip_grad_norm_(expected.parameters(), max_norm)
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0)  # order of sums
        for parameter, before in zip(model.parameters(), gradients, strict=True):
            assert_bits(own_values(parameter.grad), before, ".grad")
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    assert_same_values(model, expected)


@shard_and_optimizer
@pytest.mark.parametrize("optimizer_class", [zero_ext.optim.SGD, zero_ext.optim.Adam])
def test_clipping_in_the_step_has_the_bits_of_clipping_before_it(team, way, optimizer_class):
    def train(fused):
        model = small_mlp(torch.bfloat16)
        limit = {"max_grad_norm": 0.02} if fused else {}
        optimizer = way.optimizer(model, team.group, optimizer_class, lr=LR, **limit)
        for step in range(3):
            backward(model, team.rank, step)
            if not fused:
                assert optimizer.clip_grad_norm_(0.02) > 0.02
            optimizer.step()
            optimizer.zero_grad()
        return [full_master(p) for p in model.parameters()]

    for fused, separate in zip(train(True), train(False), strict=True):
        assert_bits(fused, separate)


@shard_and_optimizer
def test_wrapped_optimizers_clip_as_well(team, way):
    def train(make, all_ranks):
        model = small_mlp()
        optimizer = make(model)
        for step in range(3):
            if all_ranks:
                backward_of_all(model, team.world, step)
                nn.utils.clip_grad_norm_(model.parameters(), 0.02)
            else:
                backward(model, team.rank, step)
            optimizer.step()
            optimizer.zero_grad()
        return model

    def wrapped(model):
        def make(params, **kwargs):
            return zero_ext.optim.wrap(torch.optim.RMSprop, params, **kwargs)

        return way.optimizer(model, team.group, make, lr=1e-2, max_grad_norm=0.02)

    mine = train(wrapped, all_ranks=False)
    assert_same_values(
        mine, train(lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2), all_ranks=True)
    )


def test_1083_parameters_have_one_norm(team):
    model = ManyLayers(width=5)
    optimizer = zero_ext.optim.AdamW(model.parameters(), process_group=team.group, bucket_mb=1e-2)
    used = list(range(0, 361, 17))
    mean_square(model, (rank_data([3, 5], team.rank), used)).backward()
    gradients = [full(p.grad) for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 3 * len(used)
    expected = torch.cat([g.double().flatten() for g in gradients]).norm()
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(expected.item(), rel=2**-23)


def test_gradients_that_are_not_finite_are_not_clipped(team):
    model = small_mlp()
    optimizer = zero_ext.optim.SGD(
        model.parameters(), lr=1.0, process_group=team.group, nonfinite="step", max_grad_norm=1e-3
    )
    backward(model, team.rank)
    with torch.no_grad():
        model.layers[0].weight.grad.mul_(math.inf)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradient, parameter = full(model.layers[1].bias.grad), model.layers[1].bias
    optimizer.step()
    assert not optimizer.grad_norm.isfinite()
    assert_bits(parameter, before["layers.1.bias"] - gradient)


@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
def test_a_limit_that_makes_no_sense_is_refused(team, limit):
    with pytest.raises(ValueError, match="max_grad_norm must be positive"):
        zero_ext.optim.SGD([nn.Parameter(torch.ones(3))], max_grad_norm=limit)


STOCK = [(p, foreach) for p in (2.0, 1.0, 3.0, math.inf) for foreach in (None, False)]


@pytest.mark.parametrize("norm_type, foreach", STOCK)
@shard_and_optimizer
def test_stock_norms_equal_one_processes(team, way, norm_type, foreach):
    if norm_type == math.inf and team.world > 1 and torch.__version__ < "2.13":
        pytest.skip("this torch has no infinity norm of a tensor of which a rank holds nothing")
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, team.group)
    backward(model, team.rank)
    backward_of_all(expected, team.world)
    norms = [
        full(nn.utils.get_total_norm([p.grad for p in m.parameters()], norm_type, foreach=foreach))
        for m in (model, expected)
    ]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)  # order of summation
    for m in (model, expected):
        nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type, foreach=foreach)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        part = own_part(theirs.grad, mine.grad)
        torch.testing.assert_close(own_values(mine.grad), part, rtol=1e-5, atol=1e-8)
    assert optimizer.skipped_steps == 0


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_replicated_gradient_counts_once(group, rank):
    """Stage 0: every rank holds all of it."""
    model = small_mlp()
    optimizer = zero_ext.optim.SGD(model.parameters(), stage=0, process_group=group)
    backward(model, rank)
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm()
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(expected.item(), rel=2**-23)
