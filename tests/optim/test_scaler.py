"""``LossScaler``: its schedule, and what it makes of gradients, steps and overflows."""

import contextlib
import copy
import itertools
import random
import re
from types import SimpleNamespace

import pytest
import torch
from harness import MLP, assert_bits, gather_objects, mean_square, rank_data, step_and_wait
from reference import OneProcess, fma_gradients
from setups import (
    all_ways,
    everything,
    full,
    full_master,
    shard_and_optimizer,
    small_mlp,
    train_batch,
    values_of,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LR = 2.0**-6


backwards = itertools.count(1)


def note(scaler: zero_ext.LossScaler, overflow: bool) -> None:
    """As the optimizer's step after one more backward."""
    verdict = SimpleNamespace(nonfinite=overflow, backwards=next(backwards))
    scaler.note_step(verdict, own=True)


BAD = [float("nan"), float("inf"), -float("inf")]


def reference_schedule(overflows, init, growth, backoff, interval, hysteresis, least):
    """The scale after each step, from the whole history anew each time."""
    scales = []
    for now in range(1, len(overflows) + 1):
        scale, spared, streak = init, hysteresis - 1, 0
        for overflow in overflows[:now]:
            if overflow:
                streak = 0
                if spared:
                    spared -= 1
                else:
                    scale = max(least, scale * backoff)
                continue
            streak += 1
            if streak % interval == 0:
                scale, spared = min(scale * growth, 2.0**100), hysteresis - 1
        scales.append(scale)
    return scales


def with_optimizer(team, model=None, way=None, stage=2, dtype=F16, **settings):
    model = model or small_mlp(dtype)
    scaler = zero_ext.LossScaler(**settings)
    if way is None:
        mesh = None if team.group is None else DeviceMesh.from_group(team.group, "cpu")
        zero_ext.shard(model, stage, mesh=mesh, bucket_mb=200 / 2**20)
        return model, zero_ext.optim.AdamW(model.parameters(), lr=LR, loss_scaler=scaler), scaler
    return model, way.optimizer(model, team.group, lr=LR, loss_scaler=scaler), scaler


class TestSchedule:
    @pytest.mark.parametrize("pattern", range(50))
    def test_50_random_overflow_patterns_give_the_references_scales(self, pattern):
        generator = random.Random(pattern)
        settings = {
            "init_scale": 2.0 ** generator.randint(0, 20),
            "growth_factor": generator.choice([2.0, 4.0, 1.5]),
            "backoff_factor": generator.choice([0.5, 0.25, 0.75]),
            "growth_interval": generator.randint(1, 5),
            "hysteresis": generator.randint(1, 3),
            "min_scale": generator.choice([1.0, 0.25]),
        }
        share = generator.choice([0.1, 0.5, 0.9])
        overflows = [generator.random() < share for _ in range(60)]
        scaler, scales = zero_ext.LossScaler("dynamic", **settings), []
        for overflow in overflows:
            note(scaler, overflow)
            scales.append(scaler.get_scale())
        assert scales == reference_schedule(overflows, *settings.values())

    @pytest.mark.parametrize("pattern", range(5))
    def test_without_hysteresis_it_is_torchs_schedule(self, pattern):
        generator = random.Random(pattern)
        scaler = zero_ext.LossScaler(init_scale=2.0**10, growth_interval=3, min_scale=2.0**-60)
        scale, streak = torch.tensor(2.0**10), torch.tensor(0, dtype=torch.int32)
        for _ in range(60):
            overflow = generator.random() < 0.3
            note(scaler, overflow)
            torch._amp_update_scale_(scale, streak, torch.tensor(float(overflow)), 2.0, 0.5, 3)
            assert scaler.get_scale() == scale.item()

    @pytest.mark.parametrize("scale", [128, 0.5])
    def test_a_static_scale_stays(self, scale):
        scaler = zero_ext.LossScaler("static", init_scale=scale)
        for overflow in (True, False) * 3:
            note(scaler, overflow)
        assert scaler.get_scale() == scale

    def test_state_goes_on_where_it_was(self):
        overflows = [False, True, True, False, False, True, False, True, False, False]
        whole, first = (
            zero_ext.LossScaler(growth_interval=2, hysteresis=2, init_scale=64) for _ in range(2)
        )
        for overflow in overflows[:5]:
            note(first, overflow)
        second = zero_ext.LossScaler("static")
        second.load_state_dict(first.state_dict())
        for overflow in overflows[5:]:
            note(second, overflow)
        for overflow in overflows:
            note(whole, overflow)
        assert second.state_dict() == whole.state_dict()

    def test_a_state_that_lacks_something_changes_nothing(self):
        scaler = zero_ext.LossScaler(init_scale=64)
        state = scaler.state_dict()
        with pytest.raises(ValueError, match="lacks good_steps"):
            scaler.load_state_dict({k: v for k, v in state.items() if k != "good_steps"})
        with pytest.raises(ValueError, match="scale must be positive"):
            scaler.load_state_dict({**state, "scale": -1.0, "growth_interval": 7})
        assert scaler.state_dict() == state

    @pytest.mark.parametrize(
        "settings, message",
        [
            ({"mode": "automatic"}, "mode must be 'dynamic' or 'static', not 'automatic'"),
            ({"init_scale": 0}, "scale must be positive"),
            ({"growth_factor": 0.5}, "growth_factor must be at least 1, not 0.5"),
            ({"backoff_factor": 2}, "backoff_factor must be above 0 and at most 1"),
            ({"growth_interval": 0}, "growth_interval must be at least 1, not 0"),
            ({"hysteresis": 1.5}, "hysteresis must be at least 1, not 1.5"),
            ({"init_scale": 2, "min_scale": 4}, "min_scale must be positive and at most the scale"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_settings_that_make_no_sense_are_named(self, settings, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            zero_ext.LossScaler(**settings)

    def test_losses_are_scaled_as_torchs_scaler_does(self):
        scaler = zero_ext.LossScaler(init_scale=2.0**16)
        theirs = torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**16)
        losses = [torch.tensor(3.0, dtype=F16), torch.tensor(0.5), torch.ones(2, dtype=F16)]
        for mine, expected in zip(scaler.scale(losses), theirs.scale(losses), strict=True):
            assert mine.dtype == expected.dtype
            assert_bits(mine, expected)
        with pytest.raises(TypeError, match="takes tensors, not float"):
            scaler.scale(1.0)


class Scaled(nn.Module):
    """Every element's gradient is the factor."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, width, dtype=F16))

    def forward(self, factor):
        return self.weight * factor


class TestGradients:
    @all_ways
    @pytest.mark.parametrize("micros", [1, 3])
    def test_unscaled_gradients_of_an_fp16_model_are_one_processes(self, team, way, micros):
        """They are added up in fp32, each divided by the scale, and shown in ``.grad``."""
        model, optimizer, scaler = with_optimizer(team, way=way, init_scale=2.0**8)
        reference = OneProcess(small_mlp(F16), lambda p: torch.optim.AdamW(p, lr=LR))

        def scaled_loss(m, batch):
            return 2.0**8 * mean_square(m, batch)

        for step in range(3):
            batches = [
                [train_batch(r, step, micro, F16) for r in range(team.world)]
                for micro in range(micros)
            ]
            # Stages of one process's order: every micro-batch is reduced.
            expected = fma_gradients(reference.model, batches, team.world * 2.0**8, scaled_loss)
            for ranks in batches:
                scale = optimizer.scale if step else scaler.scale
                scale(mean_square(model, ranks[team.rank])).backward()
            for name, parameter in model.named_parameters():
                assert_bits(full(parameter.grad), expected[name], name)
            optimizer.step()
            optimizer.zero_grad()
            reference.step(expected)
            for name, parameter in model.named_parameters():
                # One update of AdamW, a few roundings relative to it.
                torch.testing.assert_close(
                    full_master(parameter), reference.masters[name], rtol=1e-6, atol=1e-6
                )
            with torch.no_grad():
                for name, value in values_of(model).items():
                    reference.parameters[name].copy_(value)

    @pytest.mark.parametrize("stage", [1, 2, 3])
    @pytest.mark.parametrize("local", [False, True], ids=["reduced", "no_sync"])
    def test_the_scale_may_change_between_micro_batches(self, team, stage, local):
        """Powers of two: the sum is that of the unscaled gradients, to the bit."""
        values = [[3.0, -5.0], [0.25, 7.0], [11.0, 2.0]]
        scales = [2.0**4, 2.0**9, 2.0**2]
        model = Scaled(7)
        mesh = None if team.group is None else DeviceMesh.from_group(team.group, "cpu")
        zero_ext.shard(model, stage, mesh=mesh)
        model.set_gradient_divide_factor(4.0)
        scaler = zero_ext.LossScaler("static")
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=1.0, loss_scaler=scaler)
        for _ in range(2):
            for micro, scale in enumerate(scales):
                scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
                last = micro == len(scales) - 1
                with model.no_sync() if local and not last else contextlib.nullcontext():
                    factor = values[micro][team.rank % 2]
                    scaler.scale(model(factor).float().sum()).backward()
            total = sum(values[m][r % 2] for m in range(3) for r in range(team.world)) / 4
            assert_bits(full(model.weight.grad), torch.full((1, 7), total))
            optimizer.step()
            optimizer.zero_grad()

    def test_gradients_below_fp16_are_kept_by_the_scale(self, team):
        """2**-26 is not an fp16 number; times 2**16 it is."""

        def gradient(scaler):
            parameter = nn.Parameter(torch.ones(13, dtype=F16))
            optimizer = zero_ext.optim.SGD(
                [parameter], process_group=team.group, loss_scaler=scaler
            )
            optimizer.scale((parameter * 2.0**-13).float().mul(2.0**-13).sum()).backward()
            return full(parameter.grad)

        torch.testing.assert_close(gradient(None), torch.zeros(13), rtol=0, atol=0)
        kept = gradient(zero_ext.LossScaler(init_scale=2.0**16))
        torch.testing.assert_close(kept, torch.full([13], 2.0**-26), rtol=2**-23, atol=0)

    @shard_and_optimizer
    def test_clipping_needs_not_know_of_the_scale(self, team, way):
        """The factor of ``max_grad_norm``, stock clipping and no scaler at all agree."""

        def train(scaler, clip, max_grad_norm=None):
            model = small_mlp()
            optimizer = way.optimizer(
                model, team.group, lr=LR, loss_scaler=scaler, max_grad_norm=max_grad_norm
            )
            for step in range(3):
                optimizer.scale(mean_square(model, train_batch(team.rank, step))).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
            return list(values_of(model).values())

        expected = train(None, clip=True)
        for mine in (
            train(zero_ext.LossScaler(init_scale=2.0**7), clip=True),
            train(zero_ext.LossScaler(init_scale=2.0**7), clip=False, max_grad_norm=0.05),
        ):
            for a, b in zip(mine, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # order of the norm's sum


class SpoiledLinear(nn.Linear):
    """The gradient of the bias gets ``value`` in one element, if there is one."""

    value = None

    def forward(self, x):
        output = super().forward(x)
        if self.value is not None:
            output = output + Spoil.apply(self.bias[-1], self.value)
        return output


class Spoiled(MLP):
    """The first layer is spoiled when ``value`` is set."""

    def __init__(self, dtype):
        super().__init__(dtype=dtype)
        self.layers[0].__class__ = SpoiledLinear

    @property
    def value(self):
        return self.layers[0].value

    @value.setter
    def value(self, value):
        self.layers[0].value = value


class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, ctx.value), None


MICROS = 3


class TestOverflow:
    @pytest.mark.parametrize("value", BAD)
    @pytest.mark.parametrize("bad_micro", [0, MICROS - 1])
    @pytest.mark.parametrize("bad_rank", [0, -1], ids=["first-rank", "last-rank"])
    @all_ways
    def test_one_bad_element_skips_the_step_everywhere(
        self, team, way, value, bad_micro, bad_rank, recwarn
    ):
        model, optimizer, scaler = with_optimizer(
            team, Spoiled(dtype=F16), way, init_scale=2.0**6, hysteresis=1
        )
        spotless, reference, twin = with_optimizer(team, Spoiled(dtype=F16), way, init_scale=2.0**6)

        def step(model, optimizer, scaler, number, bad=False):
            for micro in range(MICROS):
                spoils = bad and micro == bad_micro and team.rank == bad_rank % team.world
                model.value = value if spoils else None
                loss = mean_square(model, train_batch(team.rank, number, micro, F16))
                scaler.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()

        step(model, optimizer, scaler, 0)
        step(spotless, reference, twin, 0)
        before = everything(model, optimizer)
        step(model, optimizer, scaler, 1, bad=True)
        for old, new in zip(before, everything(model, optimizer), strict=True):
            assert_bits(new, old)
        assert optimizer.skipped_steps == 1 and scaler.get_scale() == 2.0**5
        # The next step is as if nothing had been, but for the scale.
        twin.load_state_dict({**twin.state_dict(), "scale": 2.0**5})
        step(model, optimizer, scaler, 2)
        step(spotless, reference, twin, 2)
        for mine, theirs in zip(
            everything(model, optimizer), everything(spotless, reference), strict=True
        ):
            assert_bits(mine, theirs)
        assert not [w for w in recwarn if "NaN" in str(w.message)]
        if team.group is not None:
            assert gather_objects(scaler.state_dict(), team.group) == (
                [scaler.state_dict()] * team.world
            )

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_a_scale_that_is_too_large_backs_off_until_it_fits(self, team, stage):
        model, optimizer, scaler = with_optimizer(
            team, stage=stage, init_scale=2.0**30, hysteresis=2, growth_interval=4
        )
        scales, moved = [], []
        for step in range(30):
            before = zero_ext.full_tensor(model.layers[0].weight)
            scaler.scale(mean_square(model, train_batch(team.rank, step % 3, 0, F16))).backward()
            optimizer.step()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            moved.append(not torch.equal(before, zero_ext.full_tensor(model.layers[0].weight)))
        assert not moved[0] and any(moved) and 30 - sum(moved) == optimizer.skipped_steps
        overflows = [not m for m in moved]
        assert scales == reference_schedule(overflows, 2.0**30, 2.0, 0.5, 4, 2, 1.0)
        if team.group is not None:
            assert gather_objects(scales, team.group) == [scales] * team.world

    @pytest.mark.parametrize("scaled_first", [True, False])
    @pytest.mark.parametrize("stage", [1, 3])
    def test_an_overflow_of_another_optimizer_counts_once(self, team, stage, scaled_first):
        scaler = zero_ext.LossScaler(growth_interval=3)
        mesh = None if team.group is None else DeviceMesh.from_group(team.group, "cpu")
        model = zero_ext.shard(small_mlp(F16), stage, mesh=mesh, bucket_mb=200 / 2**20)
        optimizer = zero_ext.optim.AdamW(model.layers[0].parameters(), loss_scaler=scaler)
        others = [p for layer in model.layers[1:] for p in layer.parameters()]
        other = zero_ext.optim.SGD(others, lr=LR)
        bad = {1: [other], 2: [optimizer, other], 6: [optimizer], 9: [other]}
        scales = []
        for step in range(12):
            scaler.scale(
                mean_square(model, train_batch(team.rank, step, 0, F16)) / 2**12
            ).backward()
            for each in bad.get(step, []):
                each.param_groups[0]["params"][0].grad.fill_(float("inf"))
            for each in (optimizer, other) if scaled_first else (other, optimizer):
                each.step()
                each.zero_grad()
            scales.append(scaler.get_scale())
        overflows = [step in bad for step in range(12)]
        assert scales == reference_schedule(overflows, 2.0**16, 2.0, 0.5, 3, 1, 1.0)
        assert (optimizer.skipped_steps, other.skipped_steps) == (2, 3)

    def test_an_overflow_at_the_least_scale_is_warned_about(self, team):
        model, optimizer, scaler = with_optimizer(
            team, Spoiled(dtype=F16), init_scale=2.0, min_scale=2.0
        )
        model.value = float("inf")
        scaler.scale(mean_square(model, train_batch(team.rank, 0, 0, F16))).backward()
        with pytest.warns(UserWarning, match=r"first in 'layers\.0\.bias' on rank 0"):
            step_and_wait(optimizer)
        assert scaler.get_scale() == 2.0

    def test_a_static_scale_warns_of_every_overflow(self, team):
        model, optimizer, scaler = with_optimizer(team, Spoiled(dtype=F16), mode="static")
        model.value = float("nan")
        scaler.scale(mean_square(model, train_batch(team.rank, 0, 0, F16))).backward()
        with pytest.warns(UserWarning, match="NaN or Inf"):
            step_and_wait(optimizer)
        assert scaler.get_scale() == 2.0**16

    def test_a_closure_may_scale_its_loss(self, team):
        model, optimizer, scaler = with_optimizer(team, init_scale=2.0**6)

        def closure():
            optimizer.zero_grad()
            loss = mean_square(model, train_batch(team.rank, 0, 0, F16))
            scaler.scale(loss).backward()
            return loss

        before = model.layers[0].weight.detach().clone()
        assert optimizer.step(closure) > 0
        assert not torch.equal(before, model.layers[0].weight)


class TestChanges:
    @pytest.mark.parametrize("way", ["optimizer", "members"])
    def test_the_first_gradient_of_a_thawed_parameter_is_unscaled_too(self, team, way):
        """Of an optimizer alone, and of a sharded list whose own forward is never called."""
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 2)])
        plain = copy.deepcopy(model)
        weight = model[0].weight.requires_grad_(False)
        scaler, divisor = zero_ext.LossScaler("static", init_scale=2.0**10), team.world
        sharding = {"process_group": team.group}
        if way == "members":
            mesh = None if team.group is None else DeviceMesh.from_group(team.group, "cpu")
            zero_ext.shard(model, 2, mesh=mesh).set_gradient_divide_factor(3.0)
            sharding, divisor = {}, 3.0
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=1.0, loss_scaler=scaler, **sharding)
        weight.requires_grad_(True)
        scaler.scale(mean_square(model[0], rank_data((4, 3), team.rank))).backward()
        optimizer.step()
        for rank in range(team.world):
            mean_square(plain[0], rank_data((4, 3), rank)).backward()
        expected = plain[0].weight.detach() - plain[0].weight.grad / divisor
        torch.testing.assert_close(weight.detach(), expected)

    def test_an_optimizer_that_retires_takes_its_scale_along(self, team):
        model, first, scaler = with_optimizer(team, dtype=F32, init_scale=2.0**10)
        unscaled, _ = with_optimizer(team, dtype=F32, init_scale=1.0)[:2]
        batch = train_batch(team.rank, 0, 0, F32)

        def gradients(model, loss_of=lambda loss: loss):
            loss_of(mean_square(model, batch)).backward()
            return [full(p.grad) for p in model.parameters()]

        expected = gradients(unscaled)
        first.retire()
        second = zero_ext.optim.SGD(model.parameters(), lr=1.0)
        for actual, gradient in zip(gradients(model), expected, strict=True):
            assert_bits(actual, gradient)
        second.retire()
        third = zero_ext.optim.SGD(model.parameters(), lr=1.0, loss_scaler=scaler)
        third.zero_grad()
        for actual, gradient in zip(gradients(model, scaler.scale), expected, strict=True):
            assert_bits(actual, gradient)


class TestMisuse:
    def test_a_loss_that_was_not_scaled_is_refused(self, team):
        model, optimizer, scaler = with_optimizer(team, init_scale=2.0**6)
        mean_square(model, train_batch(team.rank, 0, 0, F16)).backward()
        with pytest.raises(
            RuntimeError, match="no loss was scaled by the optimizer's loss_scaler since"
        ):
            optimizer.step()
        optimizer.zero_grad()
        scaler.scale(mean_square(model, train_batch(team.rank, 0, 0, F16))).backward()
        optimizer.step()
        assert optimizer.skipped_steps == 0

    @pytest.mark.dist
    @pytest.mark.world(min=2)
    def test_a_rank_without_a_loss_takes_part(self, rank, world, group):
        parameter = nn.Parameter(torch.ones(7, dtype=F16))
        scaler = zero_ext.LossScaler(init_scale=2.0**6)
        optimizer = zero_ext.optim.SGD([parameter], lr=1.0, process_group=group, loss_scaler=scaler)
        for idle in itertools.islice(itertools.cycle(range(world)), 3):
            if rank != idle:
                scaler.scale(parameter.float().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        # (world - 1) / world each time, from the fp32 master.
        torch.testing.assert_close(
            full_master(parameter), torch.full([7], 1 - 3 * (world - 1) / world), rtol=0, atol=1e-6
        )

    @pytest.mark.dist
    @pytest.mark.world(min=2)
    def test_scalers_that_differ_between_ranks_are_refused(self, rank, group):
        parameter = nn.Parameter(torch.ones(7))
        scaler = zero_ext.LossScaler(init_scale=2.0 ** (3 + rank))
        with pytest.raises(ValueError, match="the loss scalers differ between ranks"):
            zero_ext.optim.SGD([parameter], process_group=group, loss_scaler=scaler)

    def test_one_scaler_per_module_and_one_optimizer_per_scaler(self, team):
        model, optimizer, scaler = with_optimizer(team, nn.Linear(3, 3))
        other = nn.Parameter(torch.ones(3))
        with pytest.raises(ValueError, match="belongs to another optimizer"):
            zero_ext.optim.SGD([other], process_group=team.group, loss_scaler=scaler)
        assert optimizer.loss_scaler is scaler and model is not None

    def test_an_optimizer_that_follows_one_with_a_scaler_has_none(self, team):
        """The engine of the module must forget the scale with the optimizer that brought it."""
        model, optimizer, _ = with_optimizer(team, nn.Linear(3, 3), init_scale=2.0**6)
        del optimizer
        zero_ext.optim.SGD(model.parameters(), lr=1.0)
        model(torch.ones(1, 3)).sum().backward()
        torch.testing.assert_close(full(model.bias.grad), torch.ones(3))

    @pytest.mark.parametrize("nonfinite", ["raise", "step"])
    def test_a_dynamic_scaler_needs_skipped_steps(self, team, nonfinite):
        parameter = nn.Parameter(torch.ones(3))
        scaler = zero_ext.LossScaler()
        with pytest.raises(ValueError, match="requires nonfinite='skip'"):
            zero_ext.optim.SGD([parameter], loss_scaler=scaler, nonfinite=nonfinite)

    def test_without_a_scaler_scale_is_the_identity(self, team):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = zero_ext.optim.SGD([parameter], process_group=team.group)
        loss = rank_data([], 0)
        assert optimizer.scale(loss) is loss


def test_autocast_with_a_scaler_of_ours_equals_torchs(team):
    """The same training with either: fp32 parameters, fp16 autocast, scales that overflow."""

    def train(stock):
        model = small_mlp()
        optimizer_kwargs = {} if stock else {"loss_scaler": zero_ext.LossScaler(init_scale=2.0**24)}
        optimizer = zero_ext.optim.AdamW(
            model.parameters(), lr=LR, process_group=team.group, **optimizer_kwargs
        )
        scaler = (
            torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**24)
            if stock
            else optimizer.loss_scaler
        )
        for step in range(16):
            with torch.autocast(torch.get_default_device().type, F16):
                loss = mean_square(model, train_batch(team.rank, step))
            scaler.scale(loss).backward()
            if stock:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], scaler.get_scale()

    (mine, my_scale), (theirs, their_scale) = train(stock=False), train(stock=True)
    assert my_scale == their_scale < 2.0**24
    for a, b in zip(mine, theirs, strict=True):
        if team.world & (team.world - 1) == 0:
            assert_bits(a, b)
        else:  # 1/3 and the scale are one factor here, two there
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
