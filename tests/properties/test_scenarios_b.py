"""The boundary micro-batch is reduced: no rank steps with its own last gradient.

A failure that was reported against a well-known implementation: the all-reduce of the fp32
accumulators ran before the last micro-batch's bf16 gradient had been added to them.
"""

import contextlib
import functools

import pytest
import torch
from harness import Random, assert_bits, gather_objects, reference_gradients
from reference import OneProcess, fma_gradients, gradients_of
from setups import values_of
from torch import Tensor, nn
from torch.nn import functional

import zero_ext

WIDTH = 64
MICRO_BATCH, MICROS = 4, 4
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95)}
FP32_EPS = torch.finfo(torch.float32).eps

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
BOUNDARIES = pytest.mark.parametrize("boundary", ["no_sync", "accumulation_steps"])


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*layers).bfloat16()


def mean_square_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return functional.mse_loss(model(x.bfloat16()).float(), y)


def sharded(stage: int, boundary: str, mesh, micros: int) -> nn.Module:
    steps = micros if boundary == "accumulation_steps" else None
    # The two layers in units of their own, so that one is reduced before the other.
    return zero_ext.shard(build(), stage, mesh=mesh, bucket_mb=8e-3, accumulation_steps=steps)


def accumulate(model: nn.Module, batches: list, boundary: str) -> Tensor:
    """All backwards of one step, the last of which is the boundary; returns the mean loss."""
    losses = []
    for i, batch in enumerate(batches):
        local = boundary == "no_sync" and i < len(batches) - 1
        with model.no_sync() if local else contextlib.nullcontext():
            loss = mean_square_error(model, batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
    return torch.stack(losses).sum()


def probe_batches(world: int) -> list[list[tuple[Tensor, Tensor]]]:
    """``batches[micro][rank]``, from one generator per rank, seeded 100 + rank."""
    draws = [Random(100 + rank) for rank in range(world)]
    return [
        [tuple(random.normal((MICRO_BATCH, WIDTH)) for _ in range(2)) for random in draws]
        for _ in range(MICROS)
    ]


def probe_reference(world: int) -> dict[str, Tensor]:
    def loss_fn(model, batch):
        return mean_square_error(model, batch) / MICROS

    batches = probe_batches(world)
    if world & (world - 1):
        return fma_gradients(build(), batches, world, loss_fn)
    return reference_gradients(build, batches, world, 1 / world, loss_fn)


@STAGES
@BOUNDARIES
def test_accumulators_hold_every_micro_batch_of_every_rank(anywhere, rank, world, stage, boundary):
    """The probe: norms agree on all ranks, and with one process that adds the same in fp32."""
    model = sharded(stage, boundary, anywhere, MICROS)
    accumulate(model, [ranks[rank] for ranks in probe_batches(world)], boundary)
    gradients = gradients_of(model)
    norm = torch.cat([g.flatten() for g in gradients.values()]).double().norm().item()

    expected = probe_reference(world)
    expected_norm = torch.cat([g.flatten() for g in expected.values()]).double().norm().item()
    if world > 1:
        assert gather_objects(norm, anywhere.get_group()) == [norm] * world
    # Stage 1 adds a rank's micro-batches first: one rounding of fp32 each, in another order.
    assert norm == pytest.approx(expected_norm, rel=FP32_EPS * MICROS * world)
    for name, gradient in gradients.items():
        if stage >= 2:
            assert_bits(gradient, expected[name], name)
        else:
            bound = FP32_EPS * MICROS * world * expected[name].abs().max()
            assert ((gradient - expected[name]).abs() <= bound).all(), name


@pytest.mark.dist
@pytest.mark.world(min=2)
@STAGES
@BOUNDARIES
def test_no_rank_steps_with_its_own_last_gradient(mesh, group, rank, world, stage, boundary):
    """Five steps: all ranks hold the same bits, and the second step starts from nothing."""
    model = sharded(stage, boundary, mesh, MICROS)
    optimizer = zero_ext.optim.AdamW(model.parameters(), **ADAMW)
    for _ in range(5):
        accumulate(model, [ranks[rank] for ranks in probe_batches(world)], boundary)
        optimizer.step()
        optimizer.zero_grad()
    mine = list(values_of(model).values())
    for theirs in gather_objects(mine, group):
        for actual, expected in zip(theirs, mine, strict=True):
            assert_bits(actual, expected)


END_TO_END_STEPS = 40
LOSS_NOISE = 2e-4
SAMPLES = 32  # of each rank in a step


def task(world: int) -> list[tuple[Tensor, Tensor]]:
    """The global batches of all steps: a teacher to imitate. Rank r takes the r-th part."""
    random = Random(7)
    teacher = random.normal((WIDTH, WIDTH)) / WIDTH**0.5
    inputs = [random.normal((SAMPLES * world, WIDTH)) for _ in range(END_TO_END_STEPS)]
    return [(x, torch.tanh(x @ teacher)) for x in inputs]


def split(batch: tuple[Tensor, Tensor], rank: int, per_device: int) -> list:
    part = [t[rank * SAMPLES : (rank + 1) * SAMPLES] for t in batch]
    return list(zip(*(t.split(per_device) for t in part), strict=True))


def held_out_loss(model: nn.Module) -> float:
    teacher = Random(7).normal((WIDTH, WIDTH)) / WIDTH**0.5
    x = Random(8).normal((1024, WIDTH))
    with torch.no_grad():
        return mean_square_error(model, (x, torch.tanh(x @ teacher))).item()


def train_split(stage, boundary, mesh, rank, world, per_device) -> float:
    model = sharded(stage, boundary, mesh, SAMPLES // per_device)
    optimizer = zero_ext.optim.AdamW(model.parameters(), **ADAMW)
    for batch in task(world):
        accumulate(model, split(batch, rank, per_device), boundary)
        optimizer.step()
        optimizer.zero_grad()
    return held_out_loss(model)


@functools.cache
def train_one_process(world: int, broken: bool = False) -> float:
    """Plain torch with fp32 masters on all ranks' batches. ``broken``: as rank 0 would train if its
    own last gradient were not reduced."""
    reference = OneProcess(build(), lambda p: torch.optim.AdamW(p, **ADAMW))
    micros = 4
    for batch in task(world):
        batches = [
            list(ranks)
            for ranks in zip(
                *(split(batch, rank, SAMPLES // micros) for rank in range(world)), strict=True
            )
        ]
        if broken:
            batches[-1] = [batches[-1][0]] * world
        reference.train(batches, lambda m, b: mean_square_error(m, b) / micros)
    return held_out_loss(reference.model)


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@BOUNDARIES
def test_final_loss_does_not_depend_on_the_split(anywhere, rank, world, stage, boundary):
    """Per device 2 in 16 micro-batches, and 8 in 4: the same global batch, the same training."""
    few = train_split(stage, boundary, anywhere, rank, world, per_device=2)
    many = train_split(stage, boundary, anywhere, rank, world, per_device=8)
    expected = train_one_process(world)
    # What is left is the rounding of bf16 weights and activations.
    assert abs(few - many) <= LOSS_NOISE
    assert abs(few - expected) <= LOSS_NOISE


def test_final_loss_would_show_a_boundary_that_is_not_reduced():
    """The test above can fail: the bias that it looks for is 20 times the noise that it allows."""
    assert train_one_process(2, broken=True) - train_one_process(2) > 20 * LOSS_NOISE
