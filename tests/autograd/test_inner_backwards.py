"""Reentrant checkpoints: gradients that the graph does not show before they arrive."""

import contextlib
import random

import pytest
import torch
from harness import (
    ONE_UNIT_EACH,
    OWN_BACKEND,
    assert_bits,
    assert_two_buckets,
    gather_objects,
    gathers_together,
    mean_square,
    needs_one_host,
    needs_own_gathers,
    rank_data,
    step_and_wait,
    watch_reductions,
)
from reference import gradients_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_ext
from zero_ext.engine.registry import find

LAYERS = 5
IN_ORDER = (0, 1, 2, 3, 4)

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2)]
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
REDUCTIONS = pytest.mark.parametrize("reduction", ["exchange", "collective"])


class PlannedError(Exception):
    pass


class Recomputed(nn.Module):
    """``calls``: the layers that run, each time in a reentrant checkpoint of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(LAYERS))
        self.calls: tuple[int, ...] = IN_ORDER

    def forward(self, x):
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        for number in self.calls:
            x = torch.tanh(checkpoint(self.layers[number], x, use_reentrant=True))
        return x


def sharded(mesh, stage: int, **options) -> nn.Module:
    units = {"units": {nn.Linear}} if stage == 3 else {}
    return zero_ext.shard(
        Recomputed(), stage, mesh=mesh, bucket_mb=ONE_UNIT_EACH, **units, **options
    )


def add_expected(sums: dict[str, torch.Tensor], calls_of_ranks, step: int, dtype=torch.float64):
    """One process's gradients of a backward of every rank, which has its own calls."""
    world = len(calls_of_ranks)
    for rank, calls in enumerate(calls_of_ranks):
        plain = Recomputed().to(dtype)
        plain.calls = calls
        plain(batch(rank, step).to(dtype)).square().mean().backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad / world


def batch(rank: int, step: int) -> torch.Tensor:
    return rank_data((3, 7), rank, step)


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, found in gradients_of(model).items():
        if name not in expected:
            assert found is None, name
        else:
            torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-7)


@STAGES
@REDUCTIONS
def test_reductions_start_while_gradients_come(mesh, rank, world, stage, reduction):
    """From the first backward on, and two buckets are enough; ranks that gather together wait."""
    in_turn = [0] * LAYERS if stage == 3 and gathers_together(reduction) else [0, 1, 2, 3, 4]
    model = sharded(mesh, stage, reduction=reduction)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    started = watch_reductions(model)
    for step in range(3):
        mean_square(model, batch(rank, step)).backward()
        assert [count - LAYERS * step for count in started] == in_turn
        started.clear()
        expected: dict[str, torch.Tensor] = {}
        add_expected(expected, [IN_ORDER] * world, step)
        assert_gradients(model, expected)
        optimizer.step()
        optimizer.zero_grad()
        if reduction == "exchange":
            assert_two_buckets(model, Recomputed(), world, stage)


@STAGES
def test_a_unit_of_several_layers_is_reduced_once(mesh, rank, world, stage):
    """Though it is left by each of them."""
    units = {"units": nn.Linear} if stage == 3 else {}
    two_layers = 2 * 7 * 7 * 4 / 2**20
    model = zero_ext.shard(Recomputed(), stage, mesh=mesh, bucket_mb=two_layers * 1.2, **units)
    assert model.stats()["units"] == 3
    for step in range(1, 4):
        mean_square(model, batch(rank, step)).backward()
        assert model.stats()["reductions"] == 3 * step


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@REDUCTIONS
@pytest.mark.parametrize("ranks", ["all", "one", "one_after_the_other"])
def test_a_layer_that_is_called_again(mesh, rank, world, stage, reduction, ranks):
    """Its gradient comes once more after its unit was reduced; later backwards wait for it.

    Those have one process's bits.
    """
    if ranks != "all":
        needs_own_gathers(stage, reduction)
    waits = stage == 3 and gathers_together(reduction)
    model = sharded(mesh, stage, reduction=reduction)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    again = (0, 1, 2, 3, 4, 3)
    before = 0
    for step in range(4):
        does = {"all": range(world), "one": [1], "one_after_the_other": [step % world]}[ranks]
        calls_of_ranks = [again if r in does else IN_ORDER for r in range(world)]
        model.calls = calls_of_ranks[rank]
        mean_square(model, batch(rank, step)).backward()
        expected: dict[str, torch.Tensor] = {}
        add_expected(expected, calls_of_ranks, step)
        assert_gradients(model, expected)
        if step > 0 and ranks == "all" and reduction == "exchange" and world in (2, 4):
            exact: dict[str, torch.Tensor] = {}
            add_expected(exact, calls_of_ranks, step, torch.float32)
            for name, found in gradients_of(model).items():
                assert_bits(found, exact[name], name)
        reductions = model.stats()["reductions"]
        more = reductions - before - model.stats()["units"]
        before = reductions
        if step == 0:
            assert more == (0 if waits else 1)
        elif ranks != "one_after_the_other":
            assert more == 0
        assert len(set(gather_objects(reductions))) == 1
        optimizer.step()
        optimizer.zero_grad()


@STAGES
@REDUCTIONS
@pytest.mark.parametrize(
    "local",
    [
        pytest.param((), id="none"),
        pytest.param((0, 1), id="first_two", marks=pytest.mark.slow),
        pytest.param((1,), id="second"),
    ],
)
def test_layers_come_and_go(mesh, rank, world, stage, reduction, local):
    """Dropped, repeated, in any order, differently on every rank and in every backward.

    Three backwards are a step; those in ``local`` run in ``no_sync()``.
    """
    needs_own_gathers(stage, reduction)
    generator = random.Random(0)
    model = sharded(mesh, stage, reduction=reduction)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    for step in range(5):
        expected: dict[str, torch.Tensor] = {}
        for k in range(3):
            calls_of_ranks = [
                tuple(generator.choices(range(LAYERS), k=generator.randint(1, 7)))
                for _ in range(world)
            ]
            model.calls = calls_of_ranks[rank]
            with model.no_sync() if k in local else contextlib.nullcontext():
                mean_square(model, batch(rank, 3 * step + k)).backward()
            add_expected(expected, calls_of_ranks, 3 * step + k)
        assert_gradients(model, expected)
        optimizer.step()
        optimizer.zero_grad()


@STAGES
@REDUCTIONS
@pytest.mark.parametrize("accumulates", [False, True])
def test_what_was_late_is_undone_as_well(mesh, rank, world, stage, reduction, accumulates):
    model = sharded(mesh, stage, reduction=reduction)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    expected: dict[str, torch.Tensor] = {}
    if accumulates:
        mean_square(model, batch(rank, 0)).backward()
        add_expected(expected, [IN_ORDER] * world, 0)
    again = (0, 1, 2, 3, 4, 3, 4)
    model.calls = again

    def fail(grad):
        raise RuntimeError("after all gradients")

    first = batch(rank, 1).requires_grad_()
    first.register_hook(fail)
    with pytest.raises(RuntimeError, match="after all gradients"):
        mean_square(model, first).backward()
    model.stats()  # on a device: once the failure has been heard of
    assert_gradients(model, expected)
    for k in (2, 3):
        mean_square(model, batch(rank, k)).backward()
        add_expected(expected, [again] * world, k)
        assert_gradients(model, expected)
    optimizer.step()


def test_an_inner_backward_releases_what_it_gathered(mesh, rank, world):
    """When it ends, and not with the outer one."""
    model = sharded(mesh, 3)
    gathered: list[int] = []
    for layer in model.layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda p: gathered.append(len(find(p)[0].engine.gathered_units()))
        )
    for step in range(2):
        mean_square(model, batch(rank, step)).backward()
        assert len(gathered) == LAYERS
        # Of several hosts' ranks, or on a device, the next ones are on their way.
        assert max(gathered) < LAYERS if model.stats()["neighbors"] == 0 else max(gathered) <= 2
        gathered.clear()


class HalfUsed(nn.Module):
    """Layers of two weights, of which each rank may leave the second one out."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn(7, 7) / 7)
            self.second = nn.Parameter(torch.randn(7, 7) / 7)
            self.uses_second = True

        def forward(self, x):
            x = torch.tanh(x @ self.first)
            return torch.tanh(x @ self.second) if self.uses_second else x

    def __init__(self, layers: int = LAYERS):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(self.Layer() for _ in range(layers))

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@REDUCTIONS
def test_a_layer_that_was_left_waits_for_nothing(mesh, rank, world, reduction):
    """Not for a weight that this rank leaves out."""
    needs_own_gathers(3, reduction)
    model = zero_ext.shard(
        HalfUsed(), 3, mesh=mesh, units=HalfUsed.Layer, bucket_mb=ONE_UNIT_EACH, reduction=reduction
    )
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    started = watch_reductions(model)
    for step in range(4):
        before = model.stats()["reductions"]
        for number, layer in enumerate(model.layers):
            layer.uses_second = (rank + number + step) % 2 == 0
        mean_square(model, batch(rank, step)).backward()
        assert started[-1] - before >= LAYERS - 2, started
        assert model.stats()["reductions"] - before == model.stats()["units"]
        started.clear()
        optimizer.step()
        optimizer.zero_grad()


class Dropping(HalfUsed):
    """Layers that may do nothing, though they are called."""

    class Layer(HalfUsed.Layer):
        def __init__(self):
            super().__init__()
            self.dropped = False

        def forward(self, x):
            return x if self.dropped else super().forward(x)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_throws_while_another_has_late_gradients(mesh, rank, world, stage, monkeypatch):
    """It waits for nobody: on a device its last message says that it gives up."""
    needs_one_host("the following backwards may time out")
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "20")
    model = sharded(mesh, stage)
    calls_of_ranks = [(0, 1, 2, 3, 4, 3) if r == 0 else IN_ORDER for r in range(world)]
    model.calls = calls_of_ranks[rank]

    def fail(_gradient):
        raise PlannedError

    for step in range(2):
        hook = model.layers[1].weight.register_hook(fail) if rank == 1 else None
        error = PlannedError if rank == 1 else RuntimeError
        # In the second step this rank expects the gradients that were late in the first.
        learns = OWN_BACKEND and rank != 1 and step == 1
        with contextlib.nullcontext() if learns else pytest.raises(error):
            mean_square(model, batch(rank, step)).backward()
        if rank == 1:
            hook.remove()
        model.zero_grad(set_to_none=True)
        mean_square(model, batch(rank, step)).backward()
        expected: dict[str, torch.Tensor] = {}
        add_expected(expected, calls_of_ranks, step)
        assert_gradients(model, expected)
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("layer", [0, 4, 8])
def test_a_layer_that_does_nothing_on_one_rank_keeps_nobody_waiting(
    mesh, rank, world, stage, layer
):
    """All ranks gather it, but that one has no gradient of it and never leaves it."""
    units = {"units": Dropping.Layer, "prefetch_mb": 0} if stage == 3 else {}
    model = zero_ext.shard(Dropping(10), stage, mesh=mesh, bucket_mb=ONE_UNIT_EACH, **units)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4):
        sums: dict[str, torch.Tensor] = {}
        model.layers[layer].dropped = rank == 0 and step == 2
        mean_square(model, batch(rank, step)).backward()
        for r in range(world):
            plain = Dropping(10).double()
            plain.layers[layer].dropped = r == 0 and step == 2
            plain(batch(r, step).double()).square().mean().backward()
            for name, parameter in plain.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0) + parameter.grad / world
        assert_gradients(model, sums)
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_that_were_late_are_checked_for_nan(mesh, rank, world):
    model = sharded(mesh, 2)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=1.0)
    model.calls = (3, 0, 1, 2, 3, 4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = 0

    def spoil(grad):
        nonlocal seen
        seen += 1  # the second call of layer 3 comes first
        return grad * float("nan") if rank == world - 1 and seen == 2 else grad

    model.layers[3].weight.register_hook(spoil)
    mean_square(model, batch(rank, 0)).backward()
    with pytest.warns(UserWarning, match="layers.3.weight"):
        step_and_wait(optimizer)
    assert seen == 2 and optimizer.skipped_steps == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), before[name])
