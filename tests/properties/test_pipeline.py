"""Accumulate, reduce, clip, step: any shapes, dtypes, cuts and scales against plain arithmetic.

Gradients are multiples of 1/4, factors powers of two: sums are exact in any order, and every
gradient can be demanded to the bit. All ranks draw the same examples (see conftest.py).
"""

import contextlib
import math
from typing import NamedTuple

import hypothesis
import torch
from harness import assert_bits
from hypothesis import strategies as st
from setups import full, full_master, values_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LR = 2.0**-5
DIVIDE = 4.0  # on any number of ranks: a power of two
STEPS = 2


class Plan(NamedTuple):
    """One run of the pipeline."""

    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    stage: int
    bucket_bytes: int
    reduction: str
    micros: int
    local: bool  # the micro-batches before the last run inside no_sync()
    loss_scale: float | None
    max_grad_norm: float | None
    seed: int


@st.composite
def plans(draw) -> Plan:
    sizes = st.sampled_from([0, 1, 2, 3, 5, 7, 13, 16, 17, 64])
    shapes = draw(st.lists(st.lists(sizes, max_size=3).map(tuple), min_size=1, max_size=6))
    return Plan(
        shapes=shapes,
        dtypes=[draw(st.sampled_from(DTYPES)) for _ in shapes],
        stage=draw(st.sampled_from([0, 1, 2, 3])),
        bucket_bytes=draw(st.sampled_from([1, 64, 200, 1000, 2**20])),
        reduction=draw(st.sampled_from(["exchange", "collective"])),
        micros=draw(st.integers(1, 4)),
        local=draw(st.booleans()),
        loss_scale=draw(st.sampled_from([None, 1.0, 2.0**5, 2.0**12])),
        max_grad_norm=draw(st.sampled_from([None, 0.1, 1.0, 1e4])),
        seed=draw(st.integers(0, 2**16)),
    )


def values(plan: Plan, i: int) -> Tensor:
    generator = torch.Generator().manual_seed(plan.seed + i)
    return torch.randn(plan.shapes[i], generator=generator).to(plan.dtypes[i])


def gradient(plan: Plan, i: int, rank: int, step: int, micro: int) -> Tensor | None:
    """None: this rank's loss does not reach the parameter."""
    seed = plan.seed + i + 100 * (micro + 10 * (step + 10 * rank))
    generator = torch.Generator().manual_seed(seed)
    if torch.rand((), generator=generator) < 0.3:
        return None
    quarters = torch.randint(-16, 17, plan.shapes[i], generator=generator)
    return (quarters / 4).to(plan.dtypes[i])


def expected_gradient(plan: Plan, i: int, world: int, step: int) -> Tensor | None:
    contributions = [
        gradient(plan, i, rank, step, micro)
        for micro in range(plan.micros)
        for rank in range(world)
    ]
    present = [g.float() / DIVIDE for g in contributions if g is not None]
    return sum(present, torch.zeros(plan.shapes[i])) if present else None


class WeightedSum(nn.Module):
    """Parameter i's gradient is ``gradients[i]``."""

    def __init__(self, plan: Plan):
        super().__init__()
        for i in range(len(plan.shapes)):
            self.register_parameter(f"p{i}", nn.Parameter(values(plan, i)))

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        parameters = list(self.parameters())
        used = [
            (p * g).float().sum()
            for p, g in zip(parameters, gradients, strict=True)
            if g is not None
        ]
        # A rank whose loss reaches nothing must still run its backward.
        return sum(used, sum(0.0 * p.float().sum() for p in parameters[:1]))


def run(plan: Plan, team) -> None:
    model = WeightedSum(plan)
    parameters = list(model.parameters())
    masters = [values(plan, i).float() for i in range(len(parameters))]
    mesh = None if team.group is None else DeviceMesh.from_group(team.group, "cpu")
    zero_ext.shard(
        model,
        plan.stage,
        mesh=mesh,
        bucket_mb=plan.bucket_bytes / 2**20,
        reduction=plan.reduction,
    )
    model.set_gradient_divide_factor(DIVIDE)
    scaler = plan.loss_scale and zero_ext.LossScaler("static", init_scale=plan.loss_scale)
    optimizer = zero_ext.optim.SGD(
        parameters, lr=LR, max_grad_norm=plan.max_grad_norm, loss_scaler=scaler
    )
    for step in range(STEPS):
        for micro in range(plan.micros):
            gradients = [gradient(plan, i, team.rank, step, micro) for i in range(len(parameters))]
            local = plan.local and micro < plan.micros - 1
            with model.no_sync() if local else contextlib.nullcontext():
                optimizer.scale(model(gradients)).backward()
        check_and_step(plan, team, step, model, masters, optimizer)
        optimizer.zero_grad()


def check_and_step(plan: Plan, team, step: int, model, masters, optimizer) -> None:
    parameters = list(model.parameters())
    gradients = [expected_gradient(plan, i, team.world, step) for i in range(len(parameters))]
    gradients[0] = torch.zeros(plan.shapes[0]) if gradients[0] is None else gradients[0]
    for parameter, expected in zip(parameters, gradients, strict=True):
        assert (parameter.grad is None) == (expected is None)
        if expected is not None:
            # A zero may have a sign: of 0 times a value, and of sums that cancel.
            assert_bits(full(parameter.grad) + 0.0, expected + 0.0, "gradient")
    present = [g for g in gradients if g is not None]
    norm = math.sqrt(sum(g.double().square().sum().item() for g in present))
    factor = 1.0
    if plan.max_grad_norm is not None:
        factor = min(1.0, plan.max_grad_norm / (norm + 1e-6))
    optimizer.step()
    if plan.max_grad_norm is not None:
        torch.testing.assert_close(
            optimizer.grad_norm, torch.tensor(norm), rtol=2**-23, atol=0, check_dtype=False
        )
    shown = values_of(model).values()
    for parameter, value, master, g in zip(parameters, shown, masters, gradients, strict=True):
        if g is not None:
            master -= LR * (torch.tensor(factor, dtype=torch.float32) * g)
        actual = full_master(parameter)
        if factor == 1.0:
            assert_bits(actual, master, "master")
        else:  # one more rounding here than with an fma, for each step
            torch.testing.assert_close(actual, master, rtol=2**-22, atol=2**-24)
            master.copy_(actual)
        assert_bits(value, actual.to(parameter.dtype), "parameter")


@hypothesis.given(plan=plans())
@hypothesis.settings(max_examples=60)
def test_any_pipeline_is_plain_arithmetic(team, plan):
    run(plan, team)
