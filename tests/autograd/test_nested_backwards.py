"""Backwards inside backwards: every place where a user's code runs in a backward."""

import os
from dataclasses import replace

import pytest
from harness import ONE_UNIT_EACH, Team, assert_bits, gather_objects, needs_own_gathers
from nested_backwards import (
    LAYERS,
    ON_PARAMETERS,
    PLACES,
    Backward,
    Model,
    PlannedError,
    Run,
    deep,
    programs,
)
from setups import full_gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext

REPEAT = "Nothing is lost: repeat this forward and backward"
INNER_FAILED = "backward: an inner backward (run by a hook or a node of this one) threw an error"
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
# Autograd loses Python's error where another thread goes on inside the 61st backward.
THROWN = (PlannedError, SystemError)
INNER = Backward(before=(1, 2))
DEVICE = os.environ.get("ZERO_EXT_TEST_DEVICE", "cpu")
# 20 programs each; the quick tests make those of the first.
SEEDS = [1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 16)]]
Gradients = dict[str, Tensor | None]


def sharded(team: Team, stage: int, **options) -> nn.Module:
    mesh = None if team.group is None else DeviceMesh.from_group(team.group, DEVICE)
    units = {"units": {nn.Linear}} if stage == 3 else {}
    model = zero_ext.shard(Model(), stage, mesh=mesh, bucket_mb=ONE_UNIT_EACH, **units, **options)
    model.set_gradient_divide_factor(1)  # sums of integers are exact
    return model


def data_of(rank: int, number: int = 0) -> int:
    return 1000 * number + rank


def plain_gradients(programs_of_ranks) -> tuple[Gradients, bool]:
    """One process's sum over all ranks' ``(program, seed)``, and whether one threw."""
    model, threw = Model(), False
    for program, seed in programs_of_ranks:
        try:
            Run(model, seed).backward(program)
        except THROWN:
            threw = True
    return {name: p.grad for name, p in model.named_parameters()}, threw


def attempt(model: nn.Module, program: Backward, seed: int) -> str:
    """How a backward ended: "done", "planned", "inner failed" or "repeat"."""
    try:
        Run(model, seed).backward(program)
    except THROWN:
        return "planned"
    except RuntimeError as error:
        if REPEAT in str(error):
            return "repeat"
        if INNER_FAILED in str(error):
            return "inner failed"
        raise
    return "done"


def assert_same(model: nn.Module, expected: Gradients, text: str) -> None:
    for name, found in full_gradients(model).items():
        if expected[name] is None:
            assert found is None, f"{name}: {text}"
        else:
            assert found is not None, f"{name}: {text}"
            assert_bits(found, expected[name], f"{name}: {text}")


def check(
    model: nn.Module, program: Backward, team: Team, number: int = 0, divisor: int = 1
) -> list[str]:
    """A backward on all ranks has one process's bits, or raises and leaves nothing behind.

    Returns how each attempt ended.
    """
    text = f"{number}: {program}"
    expected, throws = plain_gradients((program, data_of(r, number)) for r in range(team.world))
    nothing = dict.fromkeys(expected)
    outcomes: list[str] = []
    while not outcomes or outcomes[-1] == "repeat":
        assert len(outcomes) < 3, text
        outcomes.append(attempt(model, program, data_of(team.rank, number)))
        if outcomes[-1] != "done":
            model.stats()  # on a device: once the backward has been undone
            assert_same(model, nothing, f"{outcomes} {text}")
    assert len(set(gather_objects(tuple(outcomes), team.group) if team.world > 1 else [1])) == 1, (
        text
    )
    last = outcomes[-1]
    if program.catches():
        assert last in ("done", "inner failed", "planned"), text
    else:
        assert last == ("planned" if throws else "done"), f"{outcomes} {text}"
    if last == "done":
        assert not throws, text
        average = {name: None if g is None else g / divisor for name, g in expected.items()}
        assert_same(model, average, f"{outcomes} {text}")
    model.zero_grad()
    return outcomes


def at(place: str, own: str, inner: tuple[Backward, ...], **options) -> Backward:
    """``own``: which gradients come beside those of the inner backwards."""
    before = (0,) if "before" in own or place in ON_PARAMETERS else ()
    return Backward(before, (3, 1) if "after" in own else (), place, inner, **options)


@STAGES
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("own", ["none", "before", "after", "before and after"])
def test_inner_backwards_at_every_place(place, own, stage, team):
    """One, two, and many, whose forwards run there or earlier; then none, and again many."""
    model = sharded(team, stage)
    for inner in (
        (INNER,),
        (INNER, replace(INNER, made_before=True)),
        (INNER, Backward(after=(3,)), *[INNER] * 3),
        (),
        (replace(INNER, made_before=True),) * 4,
    ):
        check(model, at(place, own, inner), team)
    assert check(model, at(place, own, (INNER,)), team) == ["done"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("own", ["none", "before and after"])
def test_an_optimizer_alone_sees_no_forward(place, own, team):
    model = Model()
    optimizer = zero_ext.optim.SGD(
        model.parameters(), stage=1, process_group=team.group, bucket_mb=ONE_UNIT_EACH
    )
    model.stats = lambda: zero_ext.stats(optimizer)
    for inner in ((INNER,), (INNER, replace(INNER, made_before=True)), (INNER,) * 4):
        check(model, at(place, own, inner), team, divisor=team.world)


@STAGES
@pytest.mark.parametrize("reduction", ["exchange", "collective"])
@pytest.mark.world(min=2)
def test_an_inner_backward_after_all_units_were_reduced_may_be_repeated(stage, reduction, team):
    """The error says so, and the repetition has all gradients."""
    if team.group is None:
        pytest.skip("one rank reduces nothing")
    model = sharded(team, stage, reduction=reduction)
    every = tuple(range(LAYERS))
    outer = Backward(after=every, place="on_leaf")
    assert check(model, outer, team) == ["done"]
    for inner, outcomes in (
        ((INNER, INNER), ["repeat", "done"]),
        ((), ["done"]),
        ((INNER,), ["done"]),
    ):
        assert check(model, replace(outer, inner=inner), team) == outcomes


@STAGES
@pytest.mark.parametrize("place", ["on_leaf", "of_function", "of_saved_tensor"])
def test_ranks_run_different_numbers_of_inner_backwards(place, stage, team):
    """From the first backward on: some with own gradients, and maybe without inner backwards."""
    needs_own_gathers(stage)
    model = sharded(team, stage)
    for step in range(6):
        own = step % 2
        programs_of_ranks = [
            at(place, "before" if own else "none", (INNER,) * ((rank + step) % 3 + 1 - own))
            for rank in range(team.world)
        ]
        seeds = [data_of(rank, step) for rank in range(team.world)]
        expected, _ = plain_gradients(zip(programs_of_ranks, seeds, strict=True))
        Run(model, seeds[team.rank]).backward(programs_of_ranks[team.rank])
        assert_same(model, expected, f"{step}")
        model.zero_grad()


@STAGES
@pytest.mark.parametrize("place", PLACES)
def test_an_error_at_every_place_leaves_nothing_behind(place, stage, team):
    """Of the inner or of the outer backward, caught between the two or not."""
    model = sharded(team, stage)
    throwing = replace(INNER, place="on_tensor", throws=True)
    caught = replace(throwing, caught=True)
    harmless = Backward(place="on_tensor", throws=True, caught=True)  # nothing of the model
    # An error in a callback that runs after the end of the backward comes too late.
    for own in ("none",) if place == "in_callback" else ("none", "before and after"):
        for inner, throws in (
            ((INNER, throwing), False),
            ((INNER, INNER), True),
            ((INNER, caught, INNER), False),
            ((caught,), False),
            ((harmless, INNER), False),
        ):
            check(model, at(place, own, inner, throws=throws), team)
            check(model, INNER, team)


@STAGES
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("depth", [3, 60, 61, 62, 80])
def test_a_backward_deep_inside_others(depth, own, stage, team):
    """Autograd goes on with another thread inside the 61st."""
    model = sharded(team, stage)
    throwing = replace(INNER, throws=True, place="on_leaf")
    for _ in range(2):
        if own or depth <= 61:
            check(model, deep(depth, INNER, own=own), team)
            check(model, deep(depth, throwing, own=own), team)
            continue
        with pytest.raises(RuntimeError, match="has seen nothing of the backwards around it"):
            Run(model, 1).backward(deep(depth, INNER))
        check(model, INNER, team)


@pytest.mark.parametrize("depth", [1, 80])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_inner_backwards_are_one_micro_batch(depth, stage, team):
    model = sharded(team, stage, accumulation_steps=2)
    twice = Backward(before=(1,), place="on_leaf", inner=(INNER, INNER))
    program = deep(depth, twice, own=True)
    seeds = [data_of(team.rank, number) for number in range(2)]
    before = model.stats()["backwards"]
    for seed in seeds:
        Run(model, seed).backward(program)
    assert model.stats()["backwards"] - before == 2
    expected, _ = plain_gradients(
        (program, data_of(r, n)) for n in range(2) for r in range(team.world)
    )
    assert_same(model, expected, "two micro-batches")


@STAGES
@pytest.mark.parametrize(
    "seed", [1, *[pytest.param(s, marks=pytest.mark.slow) for s in range(2, 16)]]
)
def test_generated_backwards(seed, stage, team):
    """20 programs, one after the other on one model, and the first ones again on a new one."""
    for count in (20, 5):
        model = sharded(team, stage)
        for number, program in enumerate(programs(seed, count)):
            check(model, program, team, number)
