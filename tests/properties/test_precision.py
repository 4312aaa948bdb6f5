"""Dtypes: fp32 masters, what gradients travel in, and what becomes of gradients that overflow.

Gradients here are small multiples of 1/4, learning rates and factors powers of two: every sum is
exact in fp32 in any order, and every expected value can be demanded to the bit.
"""

import contextlib
import re
import warnings
from collections.abc import Sequence

import pytest
import torch
from harness import MLP, Random, Team, Tied, assert_bits, gather_objects, rank_data, step_and_wait
from setups import values_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext
from zero_ext.tensor.shard_tensor import ShardTensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = {"matrix": (7, 5), "vector": (13,), "scalar": (), "tail": (1,)}
LR = 2.0**-4
# The factor of every gradient on any number of ranks: a power of two, so that it does not round.
DIVIDE = 4.0


class Weights(nn.Module):
    """The gradient of each parameter is what the call gives: ``model({"vector": gradient})``."""

    def __init__(self, dtypes: Sequence[torch.dtype] = (F32,) * 4):
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            values = rank_data(shape, 0, step=5, micro=i, dtype=dtypes[i])
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((getattr(self, name) * g).float().sum() for name, g in gradients.items())


def gradients_of(model: Weights, rank: int, step: int = 0, micro: int = 0) -> dict[str, Tensor]:
    random = Random(1 + rank + 100 * micro + 10_000 * step)
    return {
        name: (random.integers(-16, 17, p.shape) / 4).to(p.dtype)
        for name, p in model.named_parameters()
    }


def mean_gradients(team: Team, step: int = 0, micros: int = 1) -> dict[str, Tensor]:
    model, total = Weights(), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for micro in range(micros):
        for rank in range(team.world):
            for name, gradient in gradients_of(model, rank, step, micro).items():
                total[name] += gradient / DIVIDE
    return total


def shard(model: nn.Module, team: Team, stage: int = 2, divide: float = DIVIDE, **kwargs):
    mesh = None if team.group is None else DeviceMesh.from_group(team.group, "cpu")
    zero_ext.shard(model, stage=stage, mesh=mesh, bucket_mb=1e-4, **kwargs)
    model.set_gradient_divide_factor(divide)
    return model


def backward(model: nn.Module, team: Team, step: int = 0, micros: int = 1, spoil=None) -> None:
    """``micros`` backwards, the last one the boundary; ``spoil(micro, gradients)`` edits them."""
    for micro in range(micros):
        gradients = gradients_of(model, team.rank, step, micro)
        if spoil is not None:
            spoil(micro, gradients)
        with model.no_sync() if micro < micros - 1 else contextlib.nullcontext():
            model(gradients).backward()


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, ShardTensor) else value).detach().clone()


def masters(optimizer) -> dict[str, Tensor]:
    """The fp32 masters of all ranks, [numel] each."""
    handle = optimizer.zero_core.handle
    result = {}
    for i, parameter in enumerate(handle.parameters):
        local = handle.engine.master_slice(i)
        result[i] = full(handle.as_parameter(local, i, parameter))
    return result


def everything(model, optimizer) -> list[Tensor]:
    """All that a step may change: parameters, masters, optimizer state."""
    state = [full(v) for p in model.parameters() for v in optimizer.state[p].values()]
    return [*values_of(model).values(), *masters(optimizer).values(), *state]


def assert_unchanged(before: list[Tensor], after: list[Tensor]) -> None:
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        assert_bits(new, old, f"tensor {i}")


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def sgd_reference(start: dict[str, Tensor], team: Team, steps: int) -> dict[str, Tensor]:
    """fp32 values after ``steps`` of plain SGD: one rounding per step, as the product is exact."""
    values = {name: value.detach().float().clone() for name, value in start.items()}
    for step in range(steps):
        for name, gradient in mean_gradients(team, step).items():
            values[name] -= LR * gradient
    return values


@pytest.fixture
def ranks(rank, world, group) -> Team:
    """All ranks, for tests that one process cannot have."""
    return Team(rank, world, group)


class TestMasters:
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_an_fp32_model_is_its_own_master(self, team, stage):
        model = shard(Weights(), team, stage)
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=LR)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, team, step)
            optimizer.step()
        expected = sgd_reference(dict(Weights().named_parameters()), team, 3)
        values = values_of(model)
        for (name, parameter), master in zip(
            model.named_parameters(), masters(optimizer).values(), strict=True
        ):
            assert parameter.dtype == parameter.grad.dtype == F32
            assert_bits(values[name], expected[name], name)
            assert_bits(master, expected[name], f"master of {name}")
        assert zero_ext.stats(model)["bytes_master"] == 0

    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_half_precision_parameters_are_their_masters_rounded(self, team, stage, dtype):
        model = shard(Weights([dtype] * 4), team, stage)
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=LR)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, team, step)
            for parameter in model.parameters():
                assert parameter.dtype == dtype and parameter.grad.dtype == F32
            optimizer.step()
        expected = sgd_reference(dict(Weights([dtype] * 4).named_parameters()), team, 3)
        for (name, value), master in zip(
            values_of(model).items(), masters(optimizer).values(), strict=True
        ):
            assert_bits(master, expected[name], f"master of {name}")
            assert_bits(value, expected[name].to(dtype), name)
        assert zero_ext.stats(model)["bytes_master"] > 0

    @pytest.mark.world(max=2)  # thousands of collectives
    def test_thousands_of_updates_below_bf16s_resolution_are_not_lost(self, team):
        """Each is 1/128 of the least that a bf16 parameter of 1 can change by."""
        updates, lr = 2048, 2.0**-15

        def train(dtype, optimizer_class, sharded):
            parameter = nn.Parameter(torch.ones(9, dtype=dtype))
            kwargs = {"process_group": team.group} if sharded else {}
            optimizer = optimizer_class([parameter], lr=lr, **kwargs)
            gradient = torch.ones(9, dtype=dtype)  # of every rank: the mean is the same
            for _ in range(updates):
                optimizer.zero_grad()
                parameter.backward(gradient)
                optimizer.step()
            return parameter.detach()

        single = train(F32, torch.optim.SGD, sharded=False)
        assert_bits(single, torch.full([9], 1 - updates * lr), "one process in fp32")
        assert_bits(train(BF16, torch.optim.SGD, sharded=False), torch.ones(9).bfloat16())
        if team.world & (team.world - 1) == 0:
            assert_bits(train(BF16, zero_ext.optim.SGD, sharded=True), single.bfloat16())
        else:  # the mean of ones is 1 within one ulp
            actual = train(BF16, zero_ext.optim.SGD, sharded=True)
            torch.testing.assert_close(actual, single.bfloat16(), rtol=2**-8, atol=0)

    @pytest.mark.world(max=2)
    def test_adamw_keeps_updates_below_bf16s_resolution(self, team):
        """Each is about 1e-4, and bf16 values between 1 and 2 are 8e-3 apart."""
        updates = 1000
        start = 1 + torch.rand(40).bfloat16()

        def train(optimizer_class, dtype, **kwargs):
            parameter = nn.Parameter(start.to(dtype, copy=True))
            optimizer = optimizer_class([parameter], lr=1e-4, weight_decay=0.1, **kwargs)
            for step in range(updates):
                optimizer.zero_grad()
                parameter.backward((rank_data([40], 0, step) + 0.5).bfloat16().to(dtype))
                optimizer.step()
            return parameter.detach(), optimizer

        expected, _ = train(torch.optim.AdamW, torch.float64)
        lost, _ = train(torch.optim.AdamW, BF16)
        assert (expected - start).abs().min() > 0.02 and torch.equal(lost, start)
        actual, optimizer = train(zero_ext.optim.AdamW, BF16, process_group=team.group, stage=2)
        master = masters(optimizer)[0]
        # 1,000 roundings of a value below 2, each by up to 2**-24, as if all went one way; the
        # updates themselves add a relative 1e-6 to the distance moved.
        torch.testing.assert_close(master.double(), expected, rtol=0, atol=1000 * 2**-24)
        assert_bits(actual, master.bfloat16())

    def test_several_dtypes_in_one_model(self, team):
        dtypes = [BF16, F32, F16, BF16]
        model = shard(Weights(dtypes), team)
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=LR)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, team, step)
            optimizer.step()
        expected = sgd_reference(dict(Weights(dtypes).named_parameters()), team, 3)
        for dtype, (name, parameter), master in zip(
            dtypes, model.named_parameters(), masters(optimizer).values(), strict=True
        ):
            assert parameter.dtype == dtype
            assert_bits(master, expected[name], f"master of {name}")
            assert_bits(parameter, expected[name].to(dtype), name)
        # One norm over all of them.
        backward(model, team, step=3)
        gradients = [full(p.grad) for p in model.parameters()]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        torch.testing.assert_close(norm, torch.cat([g.flatten() for g in gradients]).norm())

    @pytest.mark.parametrize("stage", [1, 2])
    def test_the_gradient_is_summed_in_fp32_over_micro_batches(self, team, stage):
        """In bf16, 256 + 1 is 256."""
        model = shard(Weights([BF16] * 4), team, stage, divide=1.0)
        values = [256.0] + [1.0] * 63
        for micro, value in enumerate(values):
            sync = contextlib.nullcontext() if micro == len(values) - 1 else model.no_sync()
            with sync:
                model({"vector": torch.full([13], value, dtype=BF16)}).backward()
        assert_bits(full(model.vector.grad), torch.full([13], team.world * (256.0 + 63)))


class TestMixedPrecisionPolicy:
    def policy(self, **kwargs):
        return MixedPrecisionPolicy(param_dtype=BF16, **kwargs)

    @pytest.mark.parametrize("stage", [1, 2])
    def test_masters_keep_the_models_fp32_values(self, team, stage):
        model = shard(Weights(), team, stage, mp_policy=self.policy())
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=LR)
        start = dict(Weights().named_parameters())
        for (name, parameter), master in zip(
            model.named_parameters(), masters(optimizer).values(), strict=True
        ):
            assert_bits(parameter, start[name].detach().bfloat16(), name)
            assert_bits(master, start[name], f"master of {name}")
        for step in range(3):
            optimizer.zero_grad()
            backward(model, team, step)
            optimizer.step()
        expected = sgd_reference(start, team, 3)
        for (name, parameter), master in zip(
            model.named_parameters(), masters(optimizer).values(), strict=True
        ):
            assert_bits(master, expected[name], f"master of {name}")
            assert_bits(parameter, expected[name].bfloat16(), name)

    def test_forward_runs_in_param_dtype_and_casts_its_inputs(self, team):
        seen = {}

        class Recorder(MLP):
            def forward(self, x, *, pair, count):
                seen.update(x=x.dtype, pair=[v.dtype for v in pair["both"]], count=count.dtype)
                return super().forward(x), count

        model = shard(Recorder(), team, mp_policy=self.policy())
        one = torch.ones(1)
        output, count = model(torch.ones(2, 5), pair={"both": [one, one]}, count=one.int())
        assert seen == {"x": BF16, "pair": [BF16, BF16], "count": torch.int32}
        assert output.dtype == BF16 and count.dtype == torch.int32

    def test_inputs_are_left_alone_on_request(self, team):
        class Recorder(nn.Linear):
            def forward(self, x):
                assert x.dtype == F32
                return super().forward(x.bfloat16())

        model = shard(Recorder(5, 3), team, mp_policy=self.policy(cast_forward_inputs=False))
        assert model(torch.ones(2, 5)).dtype == BF16

    @pytest.mark.parametrize("output_dtype", [F32, F16])
    def test_outputs_are_cast_and_their_gradients_arrive(self, team, output_dtype):
        model = shard(MLP(), team, mp_policy=self.policy(output_dtype=output_dtype))
        plain = MLP().bfloat16()
        x = rank_data([4, 5], 0)
        output = model(x)
        assert output.dtype == output_dtype
        assert_bits(output, plain(x.bfloat16()).to(output_dtype))
        output.float().square().mean().backward()
        plain(x.bfloat16()).to(output_dtype).float().square().mean().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_bits(full(mine.grad), theirs.grad.float() * (team.world / DIVIDE))

    def test_a_policy_without_dtypes_changes_nothing(self, team):
        model = shard(MLP(), team, mp_policy=MixedPrecisionPolicy())
        assert model(torch.ones(2, 5)).dtype == F32

    def test_buffers_keep_their_dtype(self, team):
        model = MLP()
        model.register_buffer("scale", torch.ones(3))
        shard(model, team, mp_policy=self.policy())
        assert model.scale.dtype == F32 and model.layers[0].weight.dtype == BF16


class TestReduceDtype:
    """Rank 0's gradient is 257, the others' 1; 257 is not a bf16 number, 256 is."""

    def reduced(self, team, **kwargs) -> Tensor:
        policy = MixedPrecisionPolicy(reduce_dtype=kwargs.pop("reduce_dtype", None))
        dtype = kwargs.pop("dtype", F32)
        model = shard(Weights([dtype] * 4), team, divide=1.0, mp_policy=policy, **kwargs)
        value = 257.0 if team.rank == 0 else 1.0
        model({"vector": torch.full([13], value, dtype=dtype)}).backward()
        return full(model.vector.grad)

    @pytest.mark.parametrize("reduction", ["exchange", "collective"])
    @pytest.mark.parametrize("stage", [1, 2])
    def test_fp32_gradients_travel_exactly_by_default(self, team, reduction, stage):
        total = self.reduced(team, reduction=reduction, stage=stage)
        assert_bits(total, torch.full([13], 256.0 + team.world))

    @pytest.mark.parametrize("reduction", ["exchange", "collective"])
    def test_bf16_gradients_are_summed_in_fp32_by_default(self, team, reduction):
        total = self.reduced(team, reduction=reduction, dtype=BF16)
        assert_bits(total, torch.full([13], 256.0 + team.world - 1))

    @pytest.mark.dist
    @pytest.mark.parametrize("dtype", [BF16, F16])
    def test_exchange_rounds_what_it_sends_and_sums_in_fp32(self, ranks, dtype):
        total = self.reduced(ranks, reduction="exchange", reduce_dtype=dtype)
        sent = torch.tensor(257.0).to(dtype).float()
        assert_bits(total, (sent + ranks.world - 1).expand(13))

    @pytest.mark.dist
    @pytest.mark.world(2)
    def test_collective_sums_in_reduce_dtype(self, ranks):
        """bf16(257) + 1 is 257 again, which bf16 has not: ties go to even, 256."""
        total = self.reduced(ranks, reduction="collective", reduce_dtype=BF16)
        assert_bits(total, torch.full([13], 256.0))

    @pytest.mark.parametrize("reduction", ["exchange", "collective"])
    def test_bf16_gradients_may_travel_in_fp32(self, team, reduction):
        total = self.reduced(team, reduction=reduction, dtype=BF16, reduce_dtype=F32)
        assert_bits(total, torch.full([13], 256.0 + team.world - 1))

    @pytest.mark.dist
    @pytest.mark.parametrize("reduction", ["exchange", "collective"])
    def test_an_overflow_on_the_wire_skips_the_step(self, ranks, reduction):
        """1e5 is more than fp16 can hold."""
        policy = MixedPrecisionPolicy(reduce_dtype=F16)
        model = shard(Weights(), ranks, mp_policy=policy, reduction=reduction)
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=LR)
        before = everything(model, optimizer)
        model({"vector": torch.full([13], 1e5)}).backward()
        with pytest.warns(UserWarning, match="first in 'vector' on rank 0"):
            step_and_wait(optimizer)
        assert_unchanged(before, everything(model, optimizer))

    @pytest.mark.parametrize("argument", ["param_dtype", "reduce_dtype"])
    def test_dtypes_without_kernels_are_refused(self, team, argument):
        model = Weights()
        with pytest.raises(ValueError, match=r"torch\.float64 is not one of"):
            shard(model, team, mp_policy=MixedPrecisionPolicy(**{argument: torch.float64}))


MICROS = 3


def spoiler(team, bad_rank, bad_micro, value, name="vector"):
    def spoil(micro, gradients):
        if team.rank == bad_rank and micro == bad_micro:
            gradients[name].view(-1)[-1] = value

    return spoil


@pytest.fixture(params=[0, -1], ids=["first-rank", "last-rank"])
def bad_rank(request, team):
    return request.param % team.world


def train_one_step(team, stage, dtype=BF16, **kwargs):
    """A model and its optimizer after one good step, so that the moments are not zero."""
    model = shard(Weights([dtype] * 4), team, stage)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=LR, **kwargs)
    backward(model, team, 0, MICROS)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class TestNonfinite:
    @pytest.mark.parametrize("bad_micro", [0, MICROS - 1])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
    def test_one_bad_element_on_one_rank_skips_the_step_on_all(
        self, team, bad_rank, stage, value, bad_micro
    ):
        model, optimizer = train_one_step(team, stage)
        before = everything(model, optimizer)
        backward(model, team, 1, MICROS, spoiler(team, bad_rank, bad_micro, value))
        with pytest.warns(UserWarning) as caught:
            step_and_wait(optimizer)
        assert [str(w.message) for w in caught] == [
            f"zero_ext [rank {team.rank}]: gradients hold NaN or Inf, first in 'vector' on rank "
            f"{bad_rank}, micro-batch {bad_micro}; step skipped on all ranks (1 so far)."
        ]
        assert optimizer.skipped_steps == zero_ext.stats(optimizer)["skipped_steps"] == 1
        assert_unchanged(before, everything(model, optimizer))

    @pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_the_next_step_is_as_if_nothing_had_been(self, team, bad_rank, stage, dtype):
        model, optimizer = train_one_step(team, stage, dtype)
        spotless, reference = train_one_step(team, stage, dtype)
        backward(model, team, 1, MICROS, spoiler(team, bad_rank, 1, float("nan")))
        with pytest.warns(UserWarning, match="step skipped on all ranks"):
            step_and_wait(optimizer)
        for m, o in ((model, optimizer), (spotless, reference)):
            o.zero_grad()
            backward(m, team, 2, MICROS)
            with no_warnings():
                o.step()
        assert_unchanged(everything(spotless, reference), everything(model, optimizer))
        assert optimizer.skipped_steps == 1

    def test_skipped_steps_are_counted_and_micro_batches_begin_anew(self, team, bad_rank):
        model, optimizer = train_one_step(team, 2)
        for count in (1, 2, 3):
            backward(model, team, count, MICROS, spoiler(team, bad_rank, 2, float("inf")))
            # Rank 0 warns of the first, second, fourth … in a row, the others of the first.
            told = count == 1 or (count == 2 and team.rank == 0)
            expected = rf"micro-batch 2; .*\({count} so far\)"
            with pytest.warns(UserWarning, match=expected) if told else no_warnings():
                step_and_wait(optimizer)
            optimizer.zero_grad()
        assert optimizer.skipped_steps == 3

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_the_first_of_several_is_named(self, team, stage):
        """By micro-batch, then rank, then parameter."""
        model, optimizer = train_one_step(team, stage)

        def spoil(micro, gradients):
            if micro == 2:
                gradients["matrix"].fill_(float("nan"))
            elif micro == 1 and team.rank == team.world - 1:
                gradients["tail"].fill_(float("inf"))
                gradients["scalar"].fill_(float("inf"))

        backward(model, team, 1, MICROS, spoil)
        with pytest.warns(UserWarning, match=f"'scalar' on rank {team.world - 1}, micro-batch 1;"):
            step_and_wait(optimizer)

    def test_micro_batches_are_counted_from_zero_grad(self, team):
        """A step that was never made (a GradScaler's, or given up) leaves no count behind."""
        model, optimizer = train_one_step(team, 2)
        backward(model, team, 1, MICROS)
        optimizer.zero_grad()
        backward(model, team, 1, MICROS, spoiler(team, 0, 1, float("nan")))
        with pytest.warns(UserWarning, match="on rank 0, micro-batch 1;"):
            step_and_wait(optimizer)

    @pytest.mark.parametrize("reduction", ["exchange", "collective"])
    def test_both_reductions_see_it(self, team, bad_rank, reduction):
        model = shard(Weights(), team, reduction=reduction)
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=LR)
        before = everything(model, optimizer)
        backward(model, team, spoil=spoiler(team, bad_rank, 0, float("nan"), "tail"))
        with pytest.warns(UserWarning, match=f"'tail' on rank {bad_rank}, micro-batch 0;"):
            step_and_wait(optimizer)
        assert_unchanged(before, everything(model, optimizer))

    def test_wrapped_optimizers_skip_as_well(self, team, bad_rank):
        model = shard(Weights([BF16] * 4), team)
        optimizer = zero_ext.optim.wrap(torch.optim.RMSprop, model.parameters(), lr=LR)
        backward(model, team)
        optimizer.step()
        optimizer.zero_grad()
        before = everything(model, optimizer)
        backward(model, team, 1, spoil=spoiler(team, bad_rank, 0, float("nan")))
        with pytest.warns(UserWarning, match=f"first in 'vector' on rank {bad_rank}"):
            step_and_wait(optimizer)
        assert_unchanged(before, everything(model, optimizer))

    @pytest.mark.parametrize("stage", [1, 2])
    def test_raise_raises_on_every_rank_and_changes_nothing(self, team, bad_rank, stage):
        model, optimizer = train_one_step(team, stage, nonfinite="raise")
        before = everything(model, optimizer)
        backward(model, team, 1, MICROS, spoiler(team, bad_rank, 1, float("nan")))
        message = (
            f"zero_ext [rank {team.rank}]: gradients hold NaN or Inf, first in 'vector' on rank "
            f"{bad_rank}, micro-batch 1. Nothing was updated. To skip such steps, pass "
            "nonfinite='skip'."
        )
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            optimizer.step()
        assert_unchanged(before, everything(model, optimizer))
        assert optimizer.skipped_steps == 0
        optimizer.zero_grad()
        backward(model, team, 2, MICROS)
        optimizer.step()
        assert not torch.equal(before[0], model.matrix)

    def test_step_does_not_look(self, team, bad_rank):
        model, optimizer = train_one_step(team, 2, nonfinite="step")
        backward(model, team, 1, MICROS, spoiler(team, bad_rank, 1, float("nan")))
        with no_warnings():
            optimizer.step()
        assert optimizer.skipped_steps == 0
        expected = torch.zeros(13, dtype=torch.bool)
        expected[-1] = True
        assert torch.equal(model.vector.isnan(), expected)

    def test_gradients_without_a_bad_element_are_stepped_silently(self, team):
        with no_warnings():
            _, optimizer = train_one_step(team, 2)
        assert optimizer.skipped_steps == 0

    def test_a_parameter_of_another_optimizer_does_not_matter(self, team):
        model = shard(Weights(), team)
        good = zero_ext.optim.SGD([model.matrix, model.scalar], lr=LR)
        bad = zero_ext.optim.SGD([model.vector, model.tail], lr=LR)
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, team, spoil=spoiler(team, 0, 0, float("nan")))
        with no_warnings():
            good.step()
        with pytest.warns(UserWarning, match="first in 'vector'"):
            step_and_wait(bad)
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert moved == [True, False, True, False]


class TestOverflow:
    """No single gradient is infinite, but their sum is."""

    HUGE = 3e38

    @pytest.mark.parametrize("stage", [1, 2])
    def test_over_micro_batches(self, team, stage):
        model = shard(Weights(), team, stage, divide=1.0)
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=LR)
        before = everything(model, optimizer)

        def spoil(micro, gradients):
            gradients["vector"].fill_(self.HUGE if team.rank == 0 else 0.0)

        backward(model, team, 0, 2, spoil)
        with pytest.warns(UserWarning, match="NaN or Inf, first in 'vector' on rank 0"):
            step_and_wait(optimizer)
        assert_unchanged(before, everything(model, optimizer))

    @pytest.mark.dist
    @pytest.mark.world(min=2)
    @pytest.mark.parametrize("reduction", ["exchange", "collective"])
    @pytest.mark.parametrize("stage", [1, 2])
    def test_over_ranks(self, ranks, stage, reduction):
        model = shard(Weights(), ranks, stage, divide=1.0, reduction=reduction)
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=LR)
        before = everything(model, optimizer)
        model({"vector": torch.full([13], self.HUGE), "tail": torch.ones(1)}).backward()
        # Seen by the ranks that hold the sum; no micro-batch of a single rank is to blame.
        with pytest.warns(UserWarning, match=r"first in 'vector' on rank \d; step skipped"):
            step_and_wait(optimizer)
        assert_unchanged(before, everything(model, optimizer))

    def test_of_fp16_gradients_is_none(self, team):
        """65504 twice: too much for fp16, nothing for the fp32 sum."""
        model = shard(Weights([F16] * 4), team, divide=1.0)
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=2.0**-20)
        for _ in range(2):
            model({"vector": torch.full([13], 65504.0, dtype=F16)}).backward()
        assert_bits(full(model.vector.grad), torch.full([13], 2 * team.world * 65504.0))
        with no_warnings():
            optimizer.step()


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", [F32, F16], ids=["of fp32", "of fp16"])
class TestCollectivesInFp16:
    """The sum of all ranks in fp16 has room wherever their mean has."""

    def shard(self, ranks, stage, dtype, divide):
        policy = MixedPrecisionPolicy(reduce_dtype=F16)
        model = Weights([dtype] * 4)
        return shard(model, ranks, stage, divide, reduction="collective", mp_policy=policy)

    def test_large_values(self, ranks, stage, dtype):
        model = self.shard(ranks, stage, dtype, divide=float(ranks.world))
        given = {
            "vector": torch.full([13], 65504.0),
            "matrix": torch.full([7, 5], 40_000.0 - 1_000 * ranks.rank),
            "tail": torch.tensor([-50_000.0 if ranks.rank == 0 else -64.0]),
        }
        model({name: value.to(dtype) for name, value in given.items()}).backward()
        for name, value in given.items():
            expected = torch.stack(gather_objects(value.double().cpu())).mean(0)
            actual = full(getattr(model, name).grad).double().cpu()
            torch.testing.assert_close(actual, expected, rtol=ranks.world * 2.0**-11, atol=0)

    def test_small_values_have_the_same_bits(self, ranks, stage, dtype):
        model = self.shard(ranks, stage, dtype, divide=DIVIDE)
        for micros in (1, 3):
            backward(model, ranks, micros=micros)
            for name, expected in mean_gradients(ranks, micros=micros).items():
                assert_bits(full(getattr(model, name).grad), expected, name)
            model.zero_grad()


class TestEdits:
    """What the user makes of the gradient before the step is what counts."""

    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_repaired_gradient_is_stepped(self, team, bad_rank, stage):
        # In fp32, because autograd refuses to be given fp32 gradients of bf16 parameters.
        model, optimizer = train_one_step(team, stage, F32)
        spotless, reference = train_one_step(team, stage, F32)
        backward(model, team, 1, MICROS, spoiler(team, bad_rank, 1, float("nan")))
        backward(spotless, team, 1, MICROS)
        expected = full(spotless.vector.grad)
        expected[-1] = 0.0
        spotless.vector.grad = expected
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0.0)
        with no_warnings():
            optimizer.step()
            reference.step()
        assert_unchanged(everything(spotless, reference), everything(model, optimizer))

    @pytest.mark.parametrize("whole", [True, False], ids=["plain", "sharded"])
    def test_a_replaced_gradient_is_stepped(self, team, bad_rank, whole):
        model, optimizer = train_one_step(team, 2, F32)
        backward(model, team, 1, MICROS, spoiler(team, bad_rank, 1, float("nan")))
        gradient = model.vector.grad
        model.vector.grad = torch.ones(13) if whole else torch.nan_to_num(gradient, nan=1.0)
        with no_warnings():
            optimizer.step()
        assert optimizer.skipped_steps == 0

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda p: p.grad.mul_(float("nan")),
            lambda p: torch._foreach_mul_([p.grad], float("inf")),
            lambda p: (p.grad.to_local() if isinstance(p.grad, ShardTensor) else p.grad).fill_(
                float("nan")
            ),
            lambda p: setattr(p, "grad", torch.full([13], float("nan"), dtype=p.dtype)),
        ],
        ids=["in-place", "foreach", "local part", "replaced"],
    )
    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_nan_that_the_user_wrote_skips_the_step(self, team, stage, spoil):
        model, optimizer = train_one_step(team, stage)
        before = everything(model, optimizer)
        backward(model, team, 1, MICROS)
        spoil(model.vector)
        with pytest.warns(UserWarning, match=r"NaN or Inf, first in 'vector' on rank \d; step"):
            step_and_wait(optimizer)
        assert_unchanged(before, everything(model, optimizer))
        optimizer.zero_grad()
        backward(model, team, 2, MICROS)
        with no_warnings():
            optimizer.step()

    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_nan_in_place_of_a_dropped_gradient_skips_the_step(self, team, stage):
        model, optimizer = train_one_step(team, stage)
        before = everything(model, optimizer)
        backward(model, team, 1, MICROS)
        optimizer.zero_grad()
        model.vector.grad = torch.full([13], float("nan"), dtype=model.vector.dtype)
        with pytest.warns(UserWarning, match=r"NaN or Inf, first in 'vector' on rank \d; step"):
            step_and_wait(optimizer)
        assert_unchanged(before, everything(model, optimizer))

    def test_clipping_leaves_a_bad_gradient_to_the_step(self, team, bad_rank):
        model, optimizer = train_one_step(team, 2)
        before = everything(model, optimizer)
        backward(model, team, 1, MICROS, spoiler(team, bad_rank, 1, float("nan")))
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).isnan()
        with pytest.warns(UserWarning, match=f"first in 'vector' on rank {bad_rank}"):
            step_and_wait(optimizer)
        assert_unchanged(before, everything(model, optimizer))


class TestGradScaler:
    """Stock torch.amp.GradScaler, on the CPU, against itself in one process."""

    def scaler(self):
        return torch.amp.GradScaler(
            torch.get_default_device().type, init_scale=2.0**10, growth_interval=2
        )

    def step(self, model, optimizer, scaler, loss) -> None:
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    @pytest.mark.parametrize("dtype", [F32, F16], ids=str)
    @pytest.mark.parametrize("stage", [1, 2])
    def test_scaled_training_is_unscaled_training(self, team, stage, dtype):
        """Powers of two leave every bit as it is; the scale grows every second step."""
        model = shard(Weights([dtype] * 4), team, stage)
        optimizer, scaler = zero_ext.optim.SGD(model.parameters(), lr=LR), self.scaler()
        scales = []
        for step in range(4):
            loss = model(gradients_of(model, team.rank, step))
            self.step(model, optimizer, scaler, loss)
            scales.append(scaler.get_scale())
        assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**12]
        expected = sgd_reference(dict(Weights([dtype] * 4).named_parameters()), team, 4)
        for (name, value), master in zip(
            values_of(model).items(), masters(optimizer).values(), strict=True
        ):
            assert_bits(master, expected[name], f"master of {name}")
            assert_bits(value, expected[name].to(dtype), name)

    @pytest.mark.parametrize("stage", [1, 2])
    def test_an_overflow_on_one_rank_halves_every_scale(self, team, bad_rank, stage):
        model = shard(Weights([F16] * 4), team, stage)
        optimizer, scaler = zero_ext.optim.SGD(model.parameters(), lr=LR), self.scaler()
        before = everything(model, optimizer)
        gradients = gradients_of(model, team.rank)
        spoiler(team, bad_rank, 0, float("inf"))(0, gradients)
        with no_warnings():  # the scaler makes no step: ours has nothing to skip
            self.step(model, optimizer, scaler, model(gradients))
        assert scaler.get_scale() == 2.0**9 and optimizer.skipped_steps == 0
        assert_unchanged(before, everything(model, optimizer))
        if team.group is not None:
            assert set(gather_objects(scaler.get_scale(), team.group)) == {2.0**9}
        self.step(model, optimizer, scaler, model(gradients_of(model, team.rank)))
        expected = sgd_reference(dict(Weights([F16] * 4).named_parameters()), team, 1)
        assert_bits(model.vector, expected["vector"].half())

    def test_clipping_between_unscale_and_step(self, team):
        model = shard(Weights(), team)
        optimizer, scaler = zero_ext.optim.SGD(model.parameters(), lr=LR), self.scaler()
        scaler.scale(model(gradients_of(model, team.rank))).backward()
        scaler.unscale_(optimizer)
        expected = torch.cat([g.flatten() for g in mean_gradients(team).values()]).norm()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.testing.assert_close(norm, expected)
        scaler.step(optimizer)
        scaler.update()
        moved = [
            (p - start).detach() / LR
            for p, start in zip(model.parameters(), Weights().parameters(), strict=True)
        ]
        # Differences of values of about 1, divided by LR: 16 times their rounding.
        torch.testing.assert_close(
            torch.cat([m.flatten() for m in moved]).norm(), torch.tensor(1.0), rtol=1e-5, atol=0
        )

    def test_with_autocast(self, team):
        """bf16 autocast of an fp32 model: gradients are fp32, and the same as without a scaler."""

        def train(scaled):
            model = shard(MLP(), team)
            optimizer = zero_ext.optim.SGD(model.parameters(), lr=LR)
            scaler = torch.amp.GradScaler(
                torch.get_default_device().type, init_scale=2.0**10, enabled=scaled
            )
            for step in range(3):
                optimizer.zero_grad()
                with torch.autocast(torch.get_default_device().type, BF16):
                    loss = model(rank_data([4, 5], team.rank, step)).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return [p.detach().clone() for p in model.parameters()]

        for scaled, unscaled in zip(train(True), train(False), strict=True):
            assert_bits(scaled, unscaled)


class Shared(nn.Module):
    """One parameter under two names, which one backward uses with two factors, and another."""

    def __init__(self, dtype=BF16):
        super().__init__()
        self.first = nn.Parameter(torch.ones(13, dtype=dtype))
        self.second = self.first
        self.other = nn.Parameter(torch.ones(7, dtype=dtype))

    def forward(self, large: float, small: float) -> Tensor:
        return (
            (self.first * large).float().sum()
            + (self.second * small).float().sum()
            + (self.other * small).float().sum()
        )


class TestUses:
    """In bf16, 256 + 1 is 256."""

    @pytest.mark.parametrize("local", [False, True], ids=["reduced", "no_sync"])
    @pytest.mark.parametrize("reduction", ["exchange", "collective"])
    @pytest.mark.parametrize("stage", [1, 2])
    def test_uses_of_a_tied_parameter_are_summed_in_fp32(self, team, stage, reduction, local):
        model = shard(Shared(), team, stage, divide=1.0, reduction=reduction)
        micros = 2
        for micro in range(micros):
            with model.no_sync() if local and micro == 0 else contextlib.nullcontext():
                model(256.0, 1.0 + 2 * team.rank).backward()
        total = micros * sum(256.0 + 1 + 2 * r for r in range(team.world))
        assert_bits(full(model.first.grad), torch.full([13], total))

    def test_of_an_fp32_model_that_computes_in_bf16(self, team):
        policy = MixedPrecisionPolicy(param_dtype=BF16)
        model = shard(Shared(F32), team, divide=1.0, mp_policy=policy)
        assert model.first.dtype == BF16
        model.first.register_hook(lambda gradient: seen.append(gradient.dtype))
        seen = []
        model(256.0, 1.0).backward()
        assert_bits(full(model.first.grad), torch.full([13], 257.0 * team.world))
        assert seen == [F32]

    def test_others_travel_in_their_own_dtype(self, team):
        model = shard(Shared(), team)
        assert model.first.grad_dtype == F32 and model.other.grad_dtype == BF16
        units = model.stats()["units"]
        assert units == 2, "an fp32 bucket for the tied parameter alone"

    def test_an_optimizer_alone_does_as_grad_dtype_says(self, team):
        """Without the module nobody knows of the uses; PyTorch's own switch tells us."""
        model = Shared()
        model.first.grad_dtype = F32
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=LR, process_group=team.group)
        model(256.0, 1.0).backward()
        torch.testing.assert_close(full(model.first.grad), torch.full([13], 257.0))
        start = masters(optimizer)[0]
        optimizer.step()
        assert_bits(masters(optimizer)[0], start - LR * full(model.first.grad))

    def test_tied_embedding_and_head_equal_the_sum_of_separate_ones(self, team):
        tokens = rank_data([6], team.rank).argsort()
        model, untied = Tied(dtype=BF16), Tied(dtype=BF16)
        untied.head.weight = nn.Parameter(untied.embedding.weight.detach().clone())
        shard(model, team, divide=1.0)
        shard(untied, team, divide=1.0)
        for m in (model, untied):
            m(tokens).float().square().sum().backward()
        separate = full(untied.embedding.weight.grad) + full(untied.head.weight.grad)
        # fp32 sums in another order: of the two uses, or of the ranks, first.
        torch.testing.assert_close(
            full(model.embedding.weight.grad), separate, rtol=2**-22, atol=2**-20
        )


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parameters_compute_in_the_dtype_of_the_others(mesh, rank, stage):
    model = MLP()
    model.layers[0].requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    zero_ext.shard(model, stage, mesh=mesh, mp_policy=policy)
    output = model(rank_data((3, 5), rank))
    output.float().sum().backward()
    assert output.dtype == BF16 and {p.dtype for p in model.parameters()} == {BF16}
    model.layers[0].requires_grad_(True)
    model(rank_data((3, 5), rank)).float().sum().backward()
    assert model.layers[0].weight.grad is not None


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_without_a_backward_steps_what_was_thawed(mesh, rank, world, stage):
    """No forward of it has seen that autograd has other nodes since the parameters are in bf16."""
    model, plain = MLP(), MLP().to(BF16)
    model.layers[0].requires_grad_(False)
    zero_ext.shard(model, stage, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    model.layers[0].requires_grad_(True)
    if rank == 0:
        model(rank_data((3, 5), 0)).float().square().mean().backward()
    optimizer.step()
    plain(rank_data((3, 5), 0).to(BF16)).float().square().mean().backward()
    for name, start in MLP().named_parameters():
        expected = start - 0.5 * plain.get_parameter(name).grad.float() / world
        found = zero_ext.full_tensor(model.get_parameter(name))
        torch.testing.assert_close(found, expected.detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.host
def test_the_average_of_a_thawed_gradient_is_in_fp32(mesh, rank, world):
    model = MLP()
    model.layers[0].requires_grad_(False)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0, process_group=mesh.get_group())
    model.layers[0].requires_grad_(True)
    data = [rank_data((3, 5), r) for r in range(world)]
    torch.set_default_dtype(BF16)
    try:
        model(data[rank]).square().mean().backward()
        mine = model.layers[0].weight.grad.clone()
        optimizer.step()
    finally:
        torch.set_default_dtype(F32)
    expected = sum(g.double() for g in gather_objects(mine)) / world
    actual = zero_ext.full_grad(model.layers[0].weight).double()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
