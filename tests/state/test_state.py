"""Reading and writing whole parameters, gradients and optimizer states."""

import copy
import time

import pytest
import torch
from harness import Odd, assert_bits, mean_square, rank_data, step_and_wait
from setups import (
    Way,
    all_ways,
    assert_same_values,
    backward,
    backward_of_all,
    readable,
    shard_and_optimizer,
    small_mlp,
    train_batch,
    values_of,
)
from torch import nn

import zero_ext

LR = 0.05
BF16, F16 = torch.bfloat16, torch.float16


def values_for(model, seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 values, the same on every rank, that no half-precision dtype holds exactly."""
    return {
        name: rank_data(p.shape, 70 + seed, micro=i)
        for i, (name, p) in enumerate(model.named_parameters())
    }


def spoil_other_ranks(value: torch.Tensor, team) -> torch.Tensor:
    """What only rank 0 knows: the others bring something else of the same shape."""
    return value if team.rank == 0 else torch.full_like(value, torch.nan)


def of_rank_0(value, team):
    """The other ranks bring nothing."""
    return value if team.rank == 0 else None


def trained(team, way, dtype=torch.float32, model=None, **kwargs):
    model = small_mlp(dtype) if model is None else model
    optimizer = way.optimizer(model, team.group, lr=LR, **kwargs)
    backward(model, team.rank)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16], ids=str)
@all_ways
class TestParameters:
    def test_a_written_value_is_read_with_all_its_bits(self, team, way, dtype):
        model, _ = trained(team, way, dtype)
        values = values_for(model)
        for name, value in values.items():
            parameter = model.get_parameter(name)
            zero_ext.set_full_param(parameter, spoil_other_ranks(value, team))
            assert_bits(zero_ext.full_tensor(parameter), value)
        for name, value in values_of(model).items():
            assert_bits(value, values[name].to(dtype), name)

    def test_training_goes_on_from_a_written_value(self, team, way, dtype):
        """SGD with a power of two: ``value - lr · gradient`` in fp32, one rounding."""
        model = small_mlp(dtype)
        optimizer = way.optimizer(model, team.group, zero_ext.optim.SGD, lr=2.0**-4)
        values = values_for(model)
        for name, parameter in model.named_parameters():
            zero_ext.set_full_param(parameter, values[name])
        backward(model, team.rank)
        gradients = {n: zero_ext.full_grad(p) for n, p in model.named_parameters()}
        optimizer.step()
        after = values_of(model)
        for name, parameter in model.named_parameters():
            expected = values[name] - 2.0**-4 * gradients[name]
            assert_bits(zero_ext.full_tensor(parameter), expected, name)
            assert_bits(after[name], expected.to(dtype), name)

    def test_what_the_user_wrote_is_read(self, team, way, dtype):
        """In-place, through .data, and by replacing .data; other elements keep their bits."""
        model, _ = trained(team, way, dtype)
        first, second, third = (layer.weight for layer in model.layers)
        before = zero_ext.full_tensor(first)
        before[0, 0] = 3.0

        def check():
            assert_bits(zero_ext.full_tensor(first), before)
            assert_bits(zero_ext.full_tensor(second), torch.ones(second.shape))
            assert_bits(zero_ext.full_tensor(third), torch.full(third.shape, 5.0))

        with readable(model):
            with torch.no_grad():
                first[0, 0] = 3.0
                second.data.copy_(torch.ones_like(second))
            third.data = torch.full_like(third, 5.0)
            check()
        check()

    def test_the_result_is_a_copy(self, team, way, dtype):
        model, _ = trained(team, way, dtype)
        parameter = model.layers[0].bias
        before = values_of(model)["layers.0.bias"]
        zero_ext.full_tensor(parameter).zero_()
        assert_bits(values_of(model)["layers.0.bias"], before)
        assert zero_ext.full_tensor(parameter).abs().sum() > 0


@shard_and_optimizer
def test_odd_parameters_are_read_and_written(team, way):
    """0-dim, zero-size, transposed, channels_last, frozen, never used."""
    model = Odd(BF16)
    optimizer = way.optimizer(model, team.group, lr=LR)
    mean_square(model, rank_data([2, 3, 4, 4], team.rank, dtype=BF16)).backward()
    values = values_for(model)
    for name, parameter in model.named_parameters():
        zero_ext.set_full_param(parameter, values[name])
        expected = values[name] if parameter.requires_grad else values[name].to(BF16).float()
        assert_bits(zero_ext.full_tensor(parameter), expected, name)
        gradient = zero_ext.full_grad(parameter)
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None:
            assert gradient.shape == parameter.shape and gradient.dtype == torch.float32
    for name in ("conv.weight", "transposed"):
        parameter = model.get_parameter(name)
        zero_ext.set_full_grad(parameter, values[name])
        assert_bits(zero_ext.full_grad(parameter), values[name], name)
        zero_ext.set_full_state(optimizer, parameter, "exp_avg", values[name])
        assert_bits(zero_ext.full_state(optimizer, parameter, "exp_avg"), values[name], name)
    with pytest.raises(ValueError, match="the parameter is frozen"):
        zero_ext.set_full_grad(model.frozen, values["frozen"])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_that_are_not_sharded_are_read_too(stage):
    model = small_mlp()
    model.whole = nn.Parameter(torch.arange(7), requires_grad=False)
    model.precise = nn.Parameter(torch.full((3,), 1 / 3).double(), requires_grad=False)
    model.ignored = nn.Parameter(torch.ones(13))
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero_ext.shard(model, stage, ignored_params=[model.ignored])
    for name, parameter in model.named_parameters():
        value = zero_ext.full_tensor(parameter)
        exact = values[name] if parameter.dtype != BF16 else values[name].float()
        assert_bits(value, exact, name)
        assert value.data_ptr() != parameter.data_ptr()
    for parameter in (model.whole, model.ignored):
        with pytest.raises(ValueError, match=r"is not sharded: .* or one of ignored_params"):
            zero_ext.set_full_param(parameter, torch.ones(parameter.shape))


@all_ways
def test_gradients_are_one_processes(team, way):
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, team.group, lr=LR)
    assert all(zero_ext.full_grad(p) is None for p in model.parameters())
    backward(model, team.rank)
    backward_of_all(expected, team.world)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        # 3 ranks average with another rounding.
        torch.testing.assert_close(zero_ext.full_grad(mine), theirs.grad, rtol=1e-6, atol=1e-7)
    optimizer.zero_grad()
    assert all(zero_ext.full_grad(p) is None for p in model.parameters())


@all_ways
def test_written_gradients_are_stepped_with_and_added_to(team, way):
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, team.group, lr=LR)
    reference = torch.optim.AdamW(expected.parameters(), lr=LR)
    for step in range(2):
        backward(model, team.rank, step)
        for name, value in values_for(model, step).items():
            if name == "layers.0.bias":
                zero_ext.set_full_grad(model.get_parameter(name), None)
            else:
                zero_ext.set_full_grad(model.get_parameter(name), spoil_other_ranks(value, team))
                expected.get_parameter(name).grad = value.clone()
        assert model.layers[0].bias.grad is None
        if step:
            backward(model, team.rank, step)
            backward_of_all(expected, team.world, step)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    assert_same_values(model, expected)


@all_ways
def test_ranks_other_than_0_need_no_values(team, way):
    model, optimizer = trained(team, way)
    values = values_for(model)
    for name, parameter in model.named_parameters():
        value = of_rank_0(values[name], team)
        zero_ext.set_full_param(parameter, value)
        zero_ext.set_full_grad(parameter, value)
        zero_ext.set_full_state(optimizer, parameter, "exp_avg", value)
        zero_ext.set_full_state(optimizer, parameter, "step", of_rank_0(5, team))
        assert_bits(zero_ext.full_tensor(parameter), values[name], name)
        assert_bits(zero_ext.full_grad(parameter), values[name], name)
        assert_bits(zero_ext.full_state(optimizer, parameter, "exp_avg"), values[name], name)
        assert zero_ext.full_state(optimizer, parameter, "step") == 5
        zero_ext.set_full_grad(parameter, None if team.rank == 0 else values[name])
        assert parameter.grad is None


@all_ways
def test_sharded_values_are_written(team, way):
    model, optimizer = trained(team, way)
    for parameter in model.parameters():
        gradient = zero_ext.full_grad(parameter)
        zero_ext.set_full_param(parameter, parameter.grad)
        zero_ext.set_full_state(optimizer, parameter, "exp_avg", parameter.grad)
        assert_bits(zero_ext.full_tensor(parameter), gradient)
        assert_bits(zero_ext.full_state(optimizer, parameter, "exp_avg"), gradient)


def test_a_written_nan_skips_the_step(team):
    model = small_mlp()
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=LR, process_group=team.group)
    gradient = torch.zeros(model.layers[0].bias.shape)
    gradient[-1] = torch.nan
    zero_ext.set_full_grad(model.layers[0].bias, gradient)
    with pytest.warns(UserWarning, match="NaN or Inf, first in"):
        step_and_wait(optimizer)


@all_ways
def test_states_are_one_processes_and_can_be_carried_over(team, way):
    """Moments and step of a plain optimizer are written; both then train alike."""
    expected = small_mlp()
    reference = torch.optim.AdamW(expected.parameters(), lr=LR)
    for step in range(2):
        backward_of_all(expected, team.world, step)
        reference.step()
        reference.zero_grad()
    model = copy.deepcopy(expected)
    optimizer = way.optimizer(model, team.group, lr=LR)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        for name, value in reference.state[theirs].items():
            zero_ext.set_full_state(optimizer, mine, name, spoil_other_ranks(value, team))
            assert_bits(zero_ext.full_state(optimizer, mine, name), value.detach(), name)
    for step in range(2, 4):
        backward(model, team.rank, step)
        optimizer.step()
        optimizer.zero_grad()
        backward_of_all(expected, team.world, step)
        reference.step()
        reference.zero_grad()
    assert_same_values(model, expected)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        for name, value in reference.state[theirs].items():
            state = zero_ext.full_state(optimizer, mine, name).to(value.device)
            torch.testing.assert_close(state, value, rtol=1e-4, atol=1e-7)


@shard_and_optimizer
def test_states_of_wrapped_optimizers(team, way):
    def make(params, **kwargs):
        return zero_ext.optim.wrap(torch.optim.RMSprop, params, **kwargs)

    model = small_mlp()
    optimizer = way.optimizer(model, team.group, make, lr=LR)
    weight = model.layers[0].weight
    with pytest.raises(ValueError, match=r"no state 'square_avg'; it has none \(yet\)"):
        zero_ext.full_state(optimizer, weight, "square_avg")
    backward(model, team.rank)
    optimizer.step()
    gradient = zero_ext.full_grad(weight)
    assert_bits(zero_ext.full_state(optimizer, weight, "step"), torch.tensor(1.0))
    torch.testing.assert_close(
        zero_ext.full_state(optimizer, weight, "square_avg"), 0.01 * gradient**2
    )
    zero_ext.set_full_state(optimizer, weight, "square_avg", 4.0)
    assert_bits(zero_ext.full_state(optimizer, weight, "square_avg"), torch.full([7, 5], 4.0))


class TestRefusals:
    def test_foreign_parameters(self, team):
        foreign = nn.Parameter(torch.ones(3))
        optimizer = zero_ext.optim.SGD([nn.Parameter(torch.ones(3))], process_group=team.group)
        for call in (
            lambda: zero_ext.full_tensor(foreign),
            lambda: zero_ext.full_grad(foreign),
            lambda: zero_ext.set_full_param(foreign, torch.ones(3)),
            lambda: zero_ext.set_full_grad(foreign, torch.ones(3)),
            lambda: zero_ext.full_state(optimizer, foreign, "momentum_buffer"),
            lambda: zero_ext.set_full_state(optimizer, foreign, "momentum_buffer", 0.0),
        ):
            with pytest.raises(ValueError, match=r"of shape \(3,\) is not a parameter that zero_"):
                call()
        with pytest.raises(ValueError, match="this str is not a parameter"):
            zero_ext.full_tensor("layers.0.weight")

    def test_other_shapes_change_nothing(self, team):
        parameter = nn.Parameter(torch.ones(7, 2))
        optimizer = zero_ext.optim.AdamW([parameter], process_group=team.group)
        parameter.sum().backward()
        wrong = torch.zeros(2, 7)
        for call in (
            lambda: zero_ext.set_full_param(parameter, wrong),
            lambda: zero_ext.set_full_grad(parameter, wrong),
            lambda: zero_ext.set_full_state(optimizer, parameter, "exp_avg", wrong),
        ):
            with pytest.raises(ValueError, match=r"shape \(2, 7\), it must have \(7, 2\)"):
                call()
        with pytest.raises(TypeError, match="takes a tensor, not float"):
            zero_ext.set_full_param(parameter, 1.0)
        assert_bits(zero_ext.full_tensor(parameter), torch.ones(7, 2))
        torch.testing.assert_close(zero_ext.full_grad(parameter), torch.ones(7, 2))

    @pytest.mark.dist
    @pytest.mark.world(min=2)
    @pytest.mark.parametrize("culprit", [0, 1])
    def test_what_one_rank_refuses_no_rank_takes(self, rank, group, culprit):
        parameter, other = nn.Parameter(torch.ones(7, 2)), nn.Parameter(torch.ones(3))
        optimizer = zero_ext.optim.AdamW([parameter, other], process_group=group)
        name = "momentum" if rank == culprit else "exp_avg"
        refused = pytest.raises((TypeError, ValueError), match=r"takes a tensor|must have|no state")
        if rank != culprit:
            refused = pytest.raises(RuntimeError, match=rf"rank {culprit}: ")
        for wrong in (torch.zeros(2, 7), "text"):
            value = wrong if rank == culprit else torch.zeros(7, 2)
            with refused:
                zero_ext.set_full_param(parameter, value)
            with refused:
                zero_ext.set_full_grad(parameter, value)
            with refused:
                zero_ext.set_full_state(optimizer, parameter, "exp_avg", value)
        with refused:
            zero_ext.set_full_state(optimizer, parameter, name, 0.0)
        assert_bits(zero_ext.full_tensor(parameter), torch.ones(7, 2))
        assert parameter.grad is None
        zero_ext.set_full_param(other, torch.full([3], 9.0))
        assert_bits(zero_ext.full_tensor(other), torch.full([3], 9.0))

    def test_rank_0_must_have_a_value(self, team):
        parameter = nn.Parameter(torch.ones(7))
        optimizer = zero_ext.optim.AdamW([parameter], process_group=team.group)
        for call in (
            lambda: zero_ext.set_full_param(parameter, None),
            lambda: zero_ext.set_full_state(optimizer, parameter, "exp_avg", None),
        ):
            error = TypeError if team.rank == 0 else RuntimeError
            with pytest.raises(error, match="takes a tensor, not NoneType"):
                call()

    @pytest.mark.dist
    @pytest.mark.world(min=2)
    def test_what_is_sharded_on_rank_0_is_so_on_all(self, rank, group):
        parameter = nn.Parameter(torch.ones(7))
        _optimizer = zero_ext.optim.AdamW([parameter], process_group=group)
        parameter.sum().backward()
        error = TypeError if rank == 1 else RuntimeError
        for value in (None, torch.ones(7)):
            with pytest.raises(error, match="the value is sharded on rank 0, and here a"):
                zero_ext.set_full_param(parameter, value if rank == 1 else parameter.grad)
        zero_ext.set_full_param(parameter, torch.zeros(7) if rank == 0 else parameter.grad)
        assert_bits(zero_ext.full_tensor(parameter), torch.zeros(7))

    def test_names_that_do_not_exist(self, team):
        parameter = nn.Parameter(torch.ones(7))
        optimizer = zero_ext.optim.AdamW([parameter], process_group=team.group)
        with pytest.raises(ValueError, match="no state 'momentum'; it has 'step', 'exp_avg', 'exp"):
            zero_ext.full_state(optimizer, parameter, "momentum")

    def test_another_optimizers_parameter(self, team):
        parameter = nn.Parameter(torch.ones(7))
        optimizers = [
            zero_ext.optim.AdamW([p], process_group=team.group)
            for p in (parameter, nn.Parameter(torch.ones(5)))
        ]
        with pytest.raises(ValueError, match=r"AdamW does not step the parameter of shape \(7,\)"):
            zero_ext.full_state(optimizers[1], parameter, "exp_avg")
        with pytest.raises(ValueError, match="is not an optimizer of zero_ext"):
            zero_ext.full_state(torch.optim.AdamW([parameter]), parameter, "exp_avg")


class TestStage3:
    """What only sharded parameters have: released and gathered units, sharded frozen ones."""

    WAY = Way("shard", 3)

    def with_frozen(self, team):
        model = small_mlp(BF16)
        model.layers[1].requires_grad_(False)
        return model, self.WAY.optimizer(model, team.group, lr=LR)

    @pytest.mark.parametrize("when", ["released", "unshard", "between"])
    def test_all_are_read_and_written_whatever_is_in_memory(self, team, when):
        model, optimizer = self.with_frozen(team)
        backward(model, team.rank)
        optimizer.step()
        values = values_for(model)
        loss = None
        if when == "unshard":
            model.unshard()
        elif when == "between":  # some units wait for the backward
            loss = mean_square(model, train_batch(team.rank, 1, 0, BF16))
        for name, parameter in model.named_parameters():
            before = parameter._version
            zero_ext.set_full_param(parameter, spoil_other_ranks(values[name], team))
            assert parameter._version > before
            bits = values[name] if parameter.requires_grad else values[name].to(BF16).float()
            assert_bits(zero_ext.full_tensor(parameter), bits, name)
        if when == "unshard":
            for name, parameter in model.named_parameters():
                assert_bits(parameter, values[name].to(BF16), name)
            model.reshard()
        elif when == "between":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            optimizer.zero_grad()
        for name, value in values_of(model).items():
            assert_bits(value, values[name].to(BF16), name)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert_bits(zero_ext.full_tensor(parameter), values[name], name)

    def test_what_will_be_forgotten_is_shown_but_reaches_no_master(self, team):
        model, _ = self.with_frozen(team)
        before = [zero_ext.full_tensor(p) for p in model.parameters()]
        with torch.no_grad(), model.summon_full_params(writeback=False):
            for parameter in model.parameters():
                parameter.add_(1)
                assert_bits(zero_ext.full_tensor(parameter), parameter.float())
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert_bits(zero_ext.full_tensor(parameter), value)

    @pytest.mark.dist
    @pytest.mark.world(min=2)
    def test_a_rank_that_is_behind_computes_with_the_old_value(self, rank, world, group):
        model = small_mlp()
        optimizer = self.WAY.optimizer(model, group, lr=LR)
        for step in range(2):  # from now on there are offers in reserve
            backward(model, rank, step)
            optimizer.step()
        with torch.no_grad():
            x = train_batch(0)
            expected = model(x)
            if rank == world - 1:
                time.sleep(0.3)
            assert_bits(model(x), expected)
            for parameter in model.parameters():
                zero_ext.set_full_param(parameter, torch.zeros(parameter.shape))
            assert_bits(model(x), torch.zeros(expected.shape))
