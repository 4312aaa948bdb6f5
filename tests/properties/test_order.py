"""When things happen: the order of reductions, how many there are, and that no Python runs."""

import gc
import sys

import pytest
import torch
from harness import (
    BETWEEN_HOSTS,
    MLP,
    ONE_UNIT_EACH,
    Branching,
    assert_bits,
    assert_two_buckets,
    gather_objects,
    mean_square,
    rank_batches,
    rank_data,
    reference_gradients,
    watch_reductions,
)
from reference import gradients_of
from torch import nn

import zero_ext
from zero_ext.engine.registry import find

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
REDUCTIONS = pytest.mark.parametrize("reduction", ["exchange", "collective"])


class Backwards(nn.Module):
    """Layers that run in the reverse of the order in which they are registered.

    So the gradients arrive in registration order, and reductions go out in its reverse.
    """

    def __init__(self, layers: int = 5, width: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


class Forwards(Backwards):
    """Layers that run in registration order, as usual."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def units_of(model: nn.Module) -> list[int]:
    return [find(p)[0].engine.unit_of(find(p)[1]) for p in model.parameters()]


def test_units_are_numbered_in_reverse_registration_order(anywhere):
    model = zero_ext.shard(Forwards(), 2, mesh=anywhere, bucket_mb=ONE_UNIT_EACH)
    assert units_of(model) == [4, 3, 2, 1, 0]


@STAGES
def test_a_unit_is_reduced_as_soon_as_it_is_its_turn(anywhere, rank, stage):
    """The k-th gradient finds the k earlier units on their way: communication overlaps."""
    model = zero_ext.shard(Forwards(), stage, mesh=anywhere, bucket_mb=ONE_UNIT_EACH)
    started = watch_reductions(model)
    mean_square(model, rank_data((2, 6), rank)).backward()
    assert started == [0, 1, 2, 3, 4]
    assert model.stats()["reductions"] == 5


@STAGES
def test_a_unit_waits_for_its_turn(anywhere, rank, stage):
    """All but the first unit are ready before it: nothing starts until it has its gradient."""
    model = zero_ext.shard(Backwards(), stage, mesh=anywhere, bucket_mb=ONE_UNIT_EACH)
    started = watch_reductions(model)
    mean_square(model, rank_data((2, 6), rank)).backward()
    assert started == [0, 0, 0, 0, 0]
    assert model.stats()["reductions"] == 5


def since_the_last(started: list[int], units: int, backward: int) -> list[int]:
    """The same, counted in this backward alone; empties the list."""
    counts = [count - units * backward for count in started]
    started.clear()
    return counts


def expected_gradients(make, batches, world: int) -> dict[str, torch.Tensor]:
    return reference_gradients(make, batches, world, 1 / world)


def assert_gradients(model: nn.Module, expected, world: int) -> None:
    for name, gradient in gradients_of(model).items():
        if world in (1, 2, 4):
            assert_bits(gradient, expected[name], name)
        else:  # the scale is no power of two
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def check_steps(model: nn.Module, make, rank: int, world: int, stage: int, starts) -> None:
    """Steps whose gradients have one process's bits. ``starts[step]``: see ``since_the_last``."""
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    started = watch_reductions(model)
    for step, expected in enumerate(starts):
        batches = rank_batches((2, 6), world, step)
        mean_square(model, batches[0][rank]).backward()
        assert since_the_last(started, 5, step) == expected
        assert_gradients(model, expected_gradients(make, batches, world), world)
        optimizer.step()
        optimizer.zero_grad()
        assert_two_buckets(model, make(), world, stage)


@pytest.mark.dist
@pytest.mark.world(min=2)
@STAGES
def test_turns_follow_the_first_step(mesh, rank, world, stage):
    """What was complete out of turn in it is reduced at once in the next; always two buckets."""
    model = zero_ext.shard(Backwards(), stage, mesh=mesh, bucket_mb=ONE_UNIT_EACH)
    in_turn = [0, 1, 2, 3, 4]
    check_steps(model, Backwards, rank, world, stage, [[0] * 5, in_turn, in_turn])


@pytest.mark.dist
@pytest.mark.world(min=2)
@STAGES
def test_turns_are_rank_0s_where_ranks_differ(mesh, rank, world, stage):
    kind = Backwards if rank == 0 else Forwards
    model = zero_ext.shard(kind(), stage, mesh=mesh, bucket_mb=ONE_UNIT_EACH)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    started = watch_reductions(model)
    for step in range(3):
        x = rank_data((2, 6), rank, step)
        mean_square(model, x).backward()
        in_turn = (rank == 0) == (step > 0)
        expected = [0, 1, 2, 3, 4] if in_turn else [0, 0, 0, 0, 0]
        assert since_the_last(started, 5, step) == expected
        total = 0
        for r in range(world):
            plain = Backwards() if r == 0 else Forwards()
            (mean_square(plain, rank_data((2, 6), r, step)) / world).backward()
            total = total + torch.stack([p.grad for p in plain.parameters()])
        found = torch.stack(list(gradients_of(model).values()))
        torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-7)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_turns_are_learned_again_when_units_come(mesh, rank, world):
    """A unfrozen layer makes a unit behind the others, but runs among them."""
    model = Backwards()
    model.layers[2].requires_grad_(False)
    zero_ext.shard(model, 2, mesh=mesh, bucket_mb=ONE_UNIT_EACH)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    first = 12 if BETWEEN_HOSTS else 8  # there an unfreezing is a backward of its own
    for step in range(5):
        if step == 2:
            model.layers[2].requires_grad_(True)
        batches = rank_batches((2, 6), world, step)
        if step == 2:
            model(batches[0][rank])  # where it is adopted
            started = watch_reductions(model)
        mean_square(model, batches[0][rank]).backward()
        expected = expected_gradients(Backwards, batches, world)
        if step < 2:
            expected["layers.2.weight"] = None
            assert gradients_of(model)["layers.2.weight"] is None
        else:
            assert_gradients(model, expected, world)
            seen.append([count - (first + 5 * (step - 2)) for count in started])
            started.clear()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] != seen[1]
    assert seen[1] == seen[2] == [0, 1, 2, 3, 4]


class NormsLast(nn.Module):
    """Blocks that register last what they use first, as many transformers do."""

    WIDTH = 320

    class Block(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.first = nn.Linear(width, width, bias=False)
            self.second = nn.Linear(width, width, bias=False)
            self.norm = nn.LayerNorm(width, bias=False)

        def forward(self, x):
            return x + self.second(torch.tanh(self.first(self.norm(x))))

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block(self.WIDTH) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.dist
@pytest.mark.world(min=2)
@STAGES
@REDUCTIONS
def test_a_norm_keeps_no_block_waiting(mesh, rank, world, stage, reduction):
    """Each weight is a unit, the norms together are one, which takes no bucket meanwhile."""
    weight_mb = NormsLast.WIDTH**2 * 4 / 2**20
    model = zero_ext.shard(NormsLast(), stage, mesh=mesh, bucket_mb=weight_mb, reduction=reduction)
    assert model.stats()["units"] == 9
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.01)
    started = watch_reductions(model)
    for step in range(2):
        batches = rank_batches((2, NormsLast.WIDTH), world, step)
        mean_square(model, batches[0][rank]).backward()
        # second, first, norm of each block, the last one first.
        expected = [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8]
        assert since_the_last(started, 9, step) == expected
        if step == 0:
            expected = expected_gradients(NormsLast, batches, world)
            for name, gradient in gradients_of(model).items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        if reduction == "exchange":
            assert_two_buckets(model, NormsLast(), world, stage, weight_mb)


def test_a_nan_that_is_held_is_told(anywhere, rank):
    """What waits without a bucket: several gradients, and their NaN."""
    model = zero_ext.shard(NormsLast(), 2, mesh=anywhere, bucket_mb=NormsLast.WIDTH**2 * 4 / 2**20)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.01)
    loss = mean_square(model, rank_data((2, NormsLast.WIDTH), rank))
    bad = float("nan") if rank == 0 else 1.0
    (loss + model.blocks[2].norm.weight.sum() * bad).backward()
    with pytest.warns(
        UserWarning, match=r"NaN or Inf, first in 'blocks\.2\.norm\.weight' on rank 0"
    ):
        optimizer.step()
        assert optimizer.skipped_steps == 1


@STAGES
@pytest.mark.parametrize("used", [["left"], ["right"], ["left", "right"], []])
def test_every_unit_is_reduced_exactly_once_whatever_is_used(anywhere, rank, stage, used):
    """Six units, of the branches as well, in each backward that reduces."""
    model = zero_ext.shard(Branching(), stage, mesh=anywhere, bucket_mb=ONE_UNIT_EACH)
    for backward in range(1, 4):
        mean_square(model, (rank_data((2, 6), rank, backward), used)).backward()
        assert model.stats()["reductions"] == 6 * backward
        assert model.stats()["backwards"] == backward


@pytest.mark.dist
@pytest.mark.world(min=2)
@STAGES
@REDUCTIONS
def test_ranks_on_different_branches_reduce_the_same_units_in_the_same_order(
    mesh, group, rank, stage, reduction
):
    """A message of another unit or backward would be refused; absent gradients count as zero."""
    model = zero_ext.shard(
        Branching(), stage, mesh=mesh, bucket_mb=ONE_UNIT_EACH, reduction=reduction
    )
    world = mesh.size()
    choices = [["left"], ["right"], ["left", "right"], []]

    def batch(r: int, step: int):
        return rank_data((2, 6), r, step), choices[(r + step) % len(choices)]

    for step in range(5):
        model.zero_grad()
        mean_square(model, batch(rank, step)).backward()
        expected = Branching()
        for r in range(world):
            (mean_square(expected, batch(r, step)) / world).backward()
        gradients = gradients_of(model)
        for name, parameter in expected.named_parameters():
            assert (gradients[name] is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad)
        counts = gather_objects((model.stats()["reductions"], model.stats()["backwards"]), group)
        assert counts == [(6 * (step + 1), step + 1)] * world


@pytest.mark.dist
@pytest.mark.world(min=2)
@STAGES
def test_ranks_whose_gradients_arrive_in_opposite_orders_agree(mesh, rank, stage):
    """Rank 0 runs the layers forwards, the others backwards: more buckets, no deadlock."""
    model = zero_ext.shard(
        Forwards() if rank == 0 else Backwards(), stage, mesh=mesh, bucket_mb=ONE_UNIT_EACH
    )
    x = rank_data((2, 6), rank)
    mean_square(model, x).backward()
    world = mesh.size()
    parts = []
    for r in range(world):
        plain = Forwards() if r == 0 else Backwards()
        mean_square(plain, rank_data((2, 6), r)).backward()
        parts.append({name: p.grad / world for name, p in plain.named_parameters()})
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, sum(part[name] for part in parts))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("how", ["no_sync", "accumulation_steps", "optimizer.no_sync"])
def test_nothing_is_sent_before_the_boundary(anywhere, rank, stage, how):
    """Two local backwards, then the boundary: one reduction of each unit."""
    steps = 3 if how == "accumulation_steps" else None
    model = zero_ext.shard(
        MLP(), stage, mesh=anywhere, bucket_mb=ONE_UNIT_EACH, accumulation_steps=steps
    )
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    owner = optimizer if how == "optimizer.no_sync" else model
    units = model.stats()["units"]
    for step in range(2):
        for micro in range(3):
            loss = mean_square(model, rank_data((3, 5), rank, step, micro))
            if steps is None and micro < 2:
                with owner.no_sync():
                    loss.backward()
            else:
                loss.backward()
            expected = units * (step + (micro == 2))
            assert model.stats()["reductions"] == expected
            assert model.stats()["gathers"] == (0 if stage == 0 else units * step)
        optimizer.step()
        optimizer.zero_grad()
    assert model.stats()["reduced_in_no_sync"] == 0


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_backward_inside_no_sync_needs_no_other_rank(mesh, group, rank, stage):
    """Rank 0 runs five of them alone while the others wait at a barrier behind it."""
    model = zero_ext.shard(MLP(), stage, mesh=mesh, bucket_mb=ONE_UNIT_EACH)
    for turn in range(mesh.size()):
        if turn == rank:
            with model.no_sync():
                mean_square(model, rank_data((3, 5), rank)).backward()
        gather_objects(None, group)
    mean_square(model, rank_data((3, 5), rank)).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("how", ["no_sync", "accumulation_steps"])
def test_stage_2_reduces_inside_no_sync_and_counts_it(anywhere, rank, how):
    steps = 3 if how == "accumulation_steps" else None
    model = zero_ext.shard(
        MLP(), 2, mesh=anywhere, bucket_mb=ONE_UNIT_EACH, accumulation_steps=steps
    )
    units = model.stats()["units"]
    for micro in range(3):
        loss = mean_square(model, rank_data((3, 5), rank, 0, micro))
        if steps is None and micro < 2:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        assert model.stats()["reductions"] == units * (micro + 1)
        assert model.stats()["reduced_in_no_sync"] == min(micro + 1, 2)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_gathers_the_units_that_it_changed(anywhere, rank, stage):
    """Trunk and left, four of six; stage 0 would have nothing to gather."""
    model = zero_ext.shard(Branching(), stage, mesh=anywhere, bucket_mb=ONE_UNIT_EACH)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    mean_square(model, (rank_data((2, 6), rank), ["left"])).backward()
    optimizer.step()
    assert model.stats()["gathers"] == 4
    optimizer.zero_grad()
    optimizer.step()
    assert model.stats()["gathers"] == 4


def calls_during(function) -> list[tuple[str, str]]:
    """Every Python function, and every C function that Python calls, while ``function`` runs."""
    calls = []

    def profile(frame, event, argument):
        if event == "call":
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))
        elif event == "c_call" and argument is not sys.setprofile:
            calls.append(("C", getattr(argument, "__qualname__", str(argument))))

    gc.disable()  # a collection has callbacks in Python
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@STAGES
@REDUCTIONS
@pytest.mark.parametrize("local", [False, True])
def test_no_python_runs_during_backward(anywhere, rank, stage, reduction, local):
    """The calls between ``loss.backward()`` and its return are those of a plain model, no more.

    In the first backward, in one that finds gradients of an earlier one, and in the boundary after
    a local one.
    """
    plain, model = MLP(), MLP()
    zero_ext.shard(model, stage, mesh=anywhere, bucket_mb=ONE_UNIT_EACH, reduction=reduction)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    x = rank_data((3, 5), rank)
    mean_square(plain, x).backward()  # imports what torch imports late
    expected = calls_during(mean_square(plain, x).backward)
    assert ("backward" in expected[0][1]) and len(expected) > 3

    for _ in range(2):
        loss = mean_square(model, x)
        if local:
            with model.no_sync():
                assert calls_during(loss.backward) == expected
            loss = mean_square(model, x)
        assert calls_during(loss.backward) == expected
        assert calls_during(mean_square(model, x).backward) == expected
        optimizer.step()
        optimizer.zero_grad()
    assert model.stats()["reductions"] > 0


@pytest.mark.host
def test_the_count_of_python_calls_sees_a_hook():
    """The test above can fail: one Python hook is one more call."""
    plain = MLP()
    x = rank_data((3, 5), 0)
    mean_square(plain, x).backward()
    before = calls_during(mean_square(plain, x).backward)
    plain.layers[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    after = calls_during(mean_square(plain, x).backward)
    assert len(after) > len(before)
    assert any("<lambda>" in name for _, name in after)


@STAGES
def test_no_python_runs_for_parameters_that_stay_unused(anywhere, rank, stage):
    """The end of backward reduces what never arrived, in C++ as well."""
    plain, model = Branching(), Branching()
    zero_ext.shard(model, stage, mesh=anywhere, bucket_mb=ONE_UNIT_EACH)
    batch = rank_data((2, 6), rank), ["left"]
    mean_square(plain, batch).backward()
    expected = calls_during(mean_square(plain, batch).backward)
    for _ in range(2):
        assert calls_during(mean_square(model, batch).backward) == expected


@pytest.mark.parametrize("stage", [1, 2])
def test_bits_do_not_depend_on_when_reductions_start(anywhere, rank, stage):
    """Overlapping, or all at the end, behind a layer that the first backward waits for in vain."""
    x = rank_data((2, 6), rank)
    results = []
    for unused in (False, True):
        model = Forwards()
        if unused:
            model.unused = nn.Linear(6, 6, bias=False)
        zero_ext.shard(model, stage, mesh=anywhere, bucket_mb=ONE_UNIT_EACH)
        started = watch_reductions(model)
        mean_square(model, x).backward()
        results.append((started, gradients_of(model)))
    assert results[0][0] == [0, 1, 2, 3, 4]
    assert results[1][0] == [0, 0, 0, 0, 0]
    for name, gradient in results[0][1].items():
        assert_bits(results[1][1][name], gradient, name)
