"""AdamW with states in bf16 and int8, against one process of plain torch."""

import copy

import pytest
import torch
from harness import Team, gather_objects, rank_data
from hypothesis import given
from hypothesis import strategies as st
from setups import SMALL_BUCKET_MB, Way, full, full_master
from stored_moments import FORMS, StoredAdamW, multiples
from torch import Tensor, nn

import zero_ext
from zero_ext import checkpoint
from zero_ext.optim.blocks import dequantized, quantize_

# Straddling ranges, shorter than a block, one more and one less, in blocks from 4,096 on.
SIZES = [7, 4096, 13, 255, 257, 1083, 70000, 1, 5000]
STEPS = 4
LR = 1e-2


class Vectors(nn.Module):
    """The gradient of parameter i is ``rank_data`` itself."""

    def __init__(self):
        super().__init__()
        values = [rank_data((size,), 0, step=77, micro=i) for i, size in enumerate(SIZES)]
        self.vectors = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self, rank: int, step: int):
        data = [rank_data((size,), rank, step, i) for i, size in enumerate(SIZES)]
        return sum((p * x).sum() for p, x in zip(self.vectors, data, strict=True))


def mean_gradient(i: int, step: int, world: int):
    scale, total = torch.tensor(1 / world).double(), torch.zeros(SIZES[i])
    for rank in range(world):
        total = (total.double() + scale * rank_data((SIZES[i],), rank, step, i).double()).float()
    return total


def expected_after(form: str, world: int, steps: int = STEPS) -> list[StoredAdamW]:
    alone = [StoredAdamW(p, form, lr=LR) for p in Vectors().vectors]
    for step in range(steps):
        for i, each in enumerate(alone):
            each.step(mean_gradient(i, step, world))
    return alone


def make(form: str, stage: int, team: Team, **kwargs):
    model = Vectors()
    optimizer = Way("shard", stage).optimizer(model, team.group, lr=LR, state_dtype=form, **kwargs)
    return model, optimizer


def train(model, optimizer, rank: int, steps=range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(rank, step).backward()
        optimizer.step()


def states_of(model, optimizer) -> list[Tensor]:
    """Parameters, counts and moments, whole, as copies. Collective."""
    found = []
    for p in model.parameters():
        state = optimizer.state[p]
        found += [full_master(p)] + [full(state[name]).clone() for name in sorted(state)]
    return found


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def assert_equals_one_process(model, optimizer, alone) -> None:
    for i, (parameter, each) in enumerate(zip(model.vectors, alone, strict=True)):
        state = optimizer.state[parameter]
        assert torch.equal(full_master(parameter).cpu(), each.value), f"parameter {i}"
        for name, moment in (("exp_avg", each.first), ("exp_avg_sq", each.second)):
            assert torch.equal(full(state[name]).float().cpu(), moment.read()), f"{name} of {i}"


@pytest.mark.parametrize("form", FORMS)
def test_bits_are_one_process_s_on_any_number_of_ranks_in_every_stage(team: Team, form):
    alone = expected_after(form, team.world)
    for stage in range(4):
        model, optimizer = make(form, stage, team)
        train(model, optimizer, team.rank)
        assert_equals_one_process(model, optimizer, alone)


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_state_goes_on_with_the_same_bits(team: Team, form):
    """Into another stage, through a checkpoint, and on one rank."""
    model, optimizer = make(form, 2, team)
    train(model, optimizer, team.rank, range(2))
    expected = expected_after(form, team.world)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [full_master(p) for p in model.vectors]

    def loaded(stage: int, team: Team, state: dict):
        other, its_optimizer = make(form, stage, team)
        for p, value in zip(other.vectors, weights, strict=True):
            zero_ext.set_full_param(p, value)
        its_optimizer.load_state_dict(state)
        return other, its_optimizer

    other, its_optimizer = loaded(3, team, saved)
    train(other, its_optimizer, team.rank, range(2, STEPS))
    assert_equals_one_process(other, its_optimizer, expected)

    states = {
        i: {name: full(value) for name, value in state.items()}
        for i, state in saved["state"].items()
    }
    whole = {"state": states, "param_groups": saved["param_groups"]}
    other, its_optimizer = loaded(1, Team(0, 1, None), whole)
    assert_same(states_of(other, its_optimizer), states_of(model, optimizer))
    for state in whole["state"].values():
        assert state["exp_avg"].dtype == (torch.float32 if form == "int8" else torch.bfloat16)

    train(model, optimizer, team.rank, range(2, STEPS))
    assert_equals_one_process(model, optimizer, expected)


def test_a_checkpoint_has_every_bit(team: Team, request, tmp_path):
    folder = tmp_path if team.group is None else request.getfixturevalue("shared_path")
    for form, stage in (("int8", 3), ("bf16", 1)):
        model, optimizer = make(form, stage, team)
        train(model, optimizer, team.rank, range(2))
        path = folder / form
        checkpoint.save(path, model, optimizer)
        other, its_optimizer = make(form, 2, team)
        checkpoint.load(path, other, its_optimizer)
        assert_same(states_of(other, its_optimizer), states_of(model, optimizer))
        train(other, its_optimizer, team.rank, range(2, STEPS))
        assert_equals_one_process(other, its_optimizer, expected_after(form, team.world))


@pytest.mark.parametrize("form", FORMS)
def test_a_skipped_step_touches_nothing_and_a_frozen_parameter_has_no_state(team: Team, form):
    model, optimizer = make(form, 1, team)
    train(model, optimizer, team.rank, range(1))
    before = states_of(model, optimizer)
    optimizer.zero_grad()
    (model(team.rank, 1) * (torch.nan if team.rank == 0 else 1)).backward()
    with pytest.warns(UserWarning, match="skipped"):
        optimizer.step()
        assert optimizer.skipped_steps == 1  # which a device tells later
    assert_same(states_of(model, optimizer), before)

    model = Vectors()
    for i in (1, 6):
        model.vectors[i].requires_grad_(False)
    optimizer = Way("shard", 2).optimizer(model, team.group, lr=LR, state_dtype=form)
    train(model, optimizer, team.rank, range(1))
    for i in (1, 6):
        assert not optimizer.state[model.vectors[i]]
        model.vectors[i].requires_grad_(True)
    train(model, optimizer, team.rank, range(1, 2))
    moved = StoredAdamW(Vectors().vectors[6], form, lr=LR)
    moved.step(mean_gradient(6, 1, team.world))
    assert torch.equal(full_master(model.vectors[6]).cpu(), moved.value)
    first = full(optimizer.state[model.vectors[6]]["exp_avg"]).float().cpu()
    assert torch.equal(first, moved.first.read())


@pytest.mark.parametrize("form", FORMS)
def test_states_that_were_offloaded_between_two_steps_have_their_bits(form):
    """What was written to a shown state before is offloaded with it."""
    model, optimizer = make(form, 2, Team(0, 1, None))
    train(model, optimizer, 0, range(2))
    for p in model.vectors:
        optimizer.state[p]["exp_avg"].mul_(1)
    zero_ext.offload_states(model)
    zero_ext.reload_states(model)
    train(model, optimizer, 0, range(2, STEPS))
    assert_equals_one_process(model, optimizer, expected_after(form, 1))


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_held_are_those_of_the_estimate(team: Team, form):
    for stage in (0, 2):
        _, optimizer = make(form, stage, team)
        held = [zero_ext.stats(optimizer)["bytes_optimizer_state"]]
        held = held if team.group is None else gather_objects(held[0], team.group)
        estimate = zero_ext.estimate_memory(
            Vectors(), team.world, stage, bucket_mb=SMALL_BUCKET_MB, state_dtype=form
        )
        assert max(held) == estimate["optimizer_state"]
    large = nn.Linear(512, 512, bias=False)
    optimizer = zero_ext.optim.AdamW(large.parameters(), state_dtype="int8", process_group=None)
    if team.world == 1:
        assert optimizer.stats()["bytes_optimizer_state"] == 2 * large.weight.numel() * 260 // 256


def test_each_group_has_its_settings_and_a_state_is_another_optimizer_s():
    """state_dict() interchanges with torch.optim.AdamW's, both ways."""
    model = Vectors()
    groups = [
        {"params": [p for p in model.vectors if p.numel() < 300], "lr": 0.5},
        {"params": [p for p in model.vectors if p.numel() >= 300], "weight_decay": 0.5},
    ]
    optimizer = zero_ext.optim.AdamW(groups, lr=LR, state_dtype="int8")
    alone = [
        StoredAdamW(p, "int8", **({"lr": 0.5} if n < 300 else {"lr": LR, "decay": 0.5}))
        for p, n in zip(Vectors().vectors, SIZES, strict=True)
    ]
    for step in range(2):
        optimizer.zero_grad()
        model(0, step).backward()
        optimizer.step()
        for i, each in enumerate(alone):
            each.step(mean_gradient(i, step, 1))
    assert_equals_one_process(model, optimizer, alone)

    plain = Vectors()
    torchs = torch.optim.AdamW(
        [
            {"params": [p for p in plain.vectors if p.numel() < 300]},
            {"params": [p for p in plain.vectors if p.numel() >= 300]},
        ]
    )
    torchs.load_state_dict(optimizer.state_dict())
    for ours, theirs in zip(model.vectors, plain.vectors, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(torchs.state[theirs][name], full(optimizer.state[ours][name]))
    before = [optimizer.state[p]["exp_avg"].clone() for p in model.vectors]
    optimizer.load_state_dict(torchs.state_dict())
    assert_same([optimizer.state[p]["exp_avg"] for p in model.vectors], before)


def test_what_is_written_to_a_shown_state_is_the_state():
    model, optimizer = make("int8", 1, Team(0, 1, None))
    train(model, optimizer, 0, range(1))
    large = model.vectors[6]
    optimizer.state[large]["exp_avg"].zero_()
    zero_ext.set_full_state(optimizer, large, "exp_avg_sq", 4.0)
    optimizer.zero_grad()
    large.grad = torch.zeros_like(large)
    optimizer.step()
    assert not optimizer.state[large]["exp_avg"].any()
    torch.testing.assert_close(
        optimizer.state[large]["exp_avg_sq"], torch.full((SIZES[6],), 4 * 0.999)
    )
    optimizer.state[large].clear()
    large.grad = torch.ones_like(large)
    optimizer.step()
    assert optimizer.state[large]["step"] == 1


def test_other_forms_and_amsgrad_are_rejected():
    with pytest.raises(ValueError, match="state_dtype must be 'fp32', 'bf16' or 'int8', not 'fp8'"):
        zero_ext.optim.AdamW(Vectors().parameters(), state_dtype="fp8")
    with pytest.raises(ValueError, match="state_dtype must be"):
        zero_ext.estimate_memory(Vectors(), 1, 1, state_dtype="fp8")
    for form in FORMS:
        with pytest.raises(ValueError, match="amsgrad=True needs state_dtype='fp32'"):
            zero_ext.optim.Adam(Vectors().parameters(), amsgrad=True, state_dtype=form)
    model = Vectors()
    optimizer = zero_ext.optim.Adam(list(model.vectors)[:2], lr=LR, state_dtype="int8")
    with pytest.raises(ValueError, match="amsgrad=True needs"):
        optimizer.add_param_group({"params": [model.vectors[2]], "amsgrad": True})
    (model.vectors[0].sum() + model.vectors[1].sum()).backward()
    optimizer.step()
    assert optimizer.state_dtype == "int8"


finite = st.floats(-(2.0**124), 2.0**124, width=32, allow_subnormal=False)


@given(st.lists(finite, min_size=1, max_size=600), st.booleans(), st.integers(-60, 0))
def test_what_is_read_from_blocks_and_written_again_has_the_same_bits(given_values, signed, power):
    values = torch.tensor(given_values) * 2.0**power
    values = values if signed else values.abs()
    codes = torch.zeros(values.numel(), dtype=torch.int8 if signed else torch.uint8)
    scales = torch.zeros(-(-values.numel() // 256))
    quantize_(values, codes, scales)
    again = codes.clone(), scales.clone()
    read = dequantized(codes, scales)
    quantize_(read, *again)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    for block, back, scale in zip(values.split(256), read.split(256), scales, strict=True):
        largest = block.abs().max()
        if largest >= 2.0**-96:
            assert scale.abs() == largest and (back.abs() == largest).any()
            # Half a cell of the largest decade, and none is beyond the next multiple.
            assert (back - block).abs().max() <= largest * 15 / 16 / 64 / (
                2 if signed else 4
            ) * 1.01
        else:
            assert not back.any()


@pytest.mark.parametrize("signed", [True, False])
def test_the_multiples_are_those_of_the_published_map(signed):
    levels = multiples(signed)
    codes = torch.arange(-128, 128).to(torch.int8) if signed else torch.arange(256).to(torch.uint8)
    expected = torch.cat([-levels[1:].flip(0), levels[:-1]]) if signed else levels
    assert torch.equal(dequantized(codes, torch.ones(1)).double().cpu(), expected)


def test_rounding_to_bf16_has_no_bias():
    """A second moment whose changes are smaller than half a place of bf16 still follows them."""
    parameter = nn.Parameter(torch.zeros(2000))
    optimizer = zero_ext.optim.AdamW([parameter], lr=0.0, state_dtype="bf16")
    first = torch.rand(2000) + 1
    groups = optimizer.state_dict()["param_groups"]
    state = {"step": 1, "exp_avg": torch.ones(2000), "exp_avg_sq": first}
    optimizer.load_state_dict({"state": {0: state}, "param_groups": groups})
    for _ in range(300):
        parameter.grad = torch.zeros(2000)
        optimizer.step()
    second = optimizer.state[parameter]["exp_avg_sq"].float()
    assert abs((second / first).mean().item() / 0.999**300 - 1) < 0.003
