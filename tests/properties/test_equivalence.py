"""N ranks are one process: bit for bit with ``exchange``, within stated bounds otherwise.

Every test runs alone (plain pytest) and on all ranks (torchrun). Ranks always have data of their
own.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from harness import (
    MLP,
    assert_bits,
    gather_objects,
    mean_square,
    rank_batches,
    rank_data,
    reference_gradients,
)
from reference import (
    OneProcess,
    fma,
    fma_gradients,
    gradients_of,
    shown_master,
    whole,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import zero_ext

FP32_EPS = torch.finfo(torch.float32).eps
BF16_EPS = torch.finfo(torch.bfloat16).eps
STEPS = 5
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}

# One unit per parameter; about 1 KB; several units; everything.
BUCKETS = [1e-6, 1e-3, 8e-3, 25.0]
# The parts of them that always run; the rest is slow only in its number.
QUICK = [(1e-6, 7), (1e-3, 64), (8e-3, 64), (25.0, 7), (25.0, 64)]
SWEEP = [
    pytest.param(bucket, hidden, marks=[] if (bucket, hidden) in QUICK else pytest.mark.slow)
    for bucket in BUCKETS
    for hidden in (7, 64)
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def only_me(rank, world):
    """A mesh of this rank alone: the library at one rank, inside a test that runs on several."""
    if not dist.is_initialized():
        yield None
        return
    groups = [dist.new_group([member]) for member in range(world)]
    yield DeviceMesh.from_group(groups[rank], "cpu")
    dist.destroy_process_group(groups[rank])


class Mixed(nn.Module):
    """bf16, fp32 and fp16 layers in turn, each computing in its own dtype."""

    def __init__(self, hidden: int = 7):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, hidden, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(hidden)
        self.middle = nn.Linear(hidden, hidden, dtype=torch.bfloat16)
        self.narrow = nn.Linear(hidden, hidden, dtype=torch.float16)
        self.head = nn.Linear(hidden, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.bfloat16()).float())
        x = self.narrow(self.middle(x.bfloat16()).to(torch.float16))
        return self.head(torch.tanh(x.float()))


def accumulate(model: nn.Module, batches: list, loss_fn=mean_square) -> None:
    for batch in batches:
        loss_fn(model, batch).backward()


def mine(batches: list[list], rank: int) -> list:
    return [ranks[rank] for ranks in batches]


def train(model, optimizer, batches_of: Callable[[int], list], steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        accumulate(model, batches_of(step))
        optimizer.step()


def expected_gradients(model, batches: list[list]) -> dict[str, Tensor | None]:
    """Plain torch where 1/world is a power of two, else with the fma that the library promises."""
    world = len(batches[0])
    if world & (world - 1):
        return fma_gradients(model, batches, world)
    return reference_gradients(lambda: model, batches, world, 1 / world)


def assert_same_gradients(actual: dict, expected: dict) -> None:
    __tracebackhide__ = True
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is not None:
            assert_bits(actual[name], gradient, name)


def test_fma_of_the_reference_rounds_once():
    """Against exact rational arithmetic, on values whose fp64 sum rounds onto an fp32 tie."""
    from fractions import Fraction

    tie = 1 + 2**-24  # halfway between two fp32 numbers
    values = torch.tensor([1.0, 1.0, 3.0, -5.0, 2.0**-30, 1e-20])
    sums = torch.tensor([2.0**-24, -(2.0**-60), 2.0**-24, 7.0, 1.0, 1.0])
    values = torch.cat([values, torch.randn(2000)])
    sums = torch.cat([sums, torch.randn(2000) * 2.0 ** torch.randint(-40, 20, (2000,))])
    for scale in (1 / 3, float(torch.tensor(tie).item()), 0.5):
        scale = torch.tensor(scale, dtype=torch.float32).item()
        result = fma(scale, values, sums)
        for value, addend, actual in zip(
            values.tolist(), sums.tolist(), result.tolist(), strict=True
        ):
            exact = Fraction(scale) * Fraction(value) + Fraction(addend)
            near = torch.tensor(float(exact), dtype=torch.float32)
            down = torch.nextafter(near, torch.tensor(-math.inf)).item()
            up = torch.nextafter(near, torch.tensor(math.inf)).item()
            best = min(abs(Fraction(c) - exact) for c in (down, near.item(), up))
            assert abs(Fraction(actual) - exact) == best


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("bucket_mb, hidden", SWEEP)
def test_stage_2_gradient_has_the_bits_of_one_process(
    anywhere, rank, world, bucket_mb, hidden, dtype, micros
):
    """Micro-batches and ranks are added in (micro-batch, rank) order, whatever the bucket size."""
    batches = rank_batches((4, 5), world, micros=micros, dtype=dtype)
    model = zero_ext.shard(MLP(hidden, dtype=dtype), 2, mesh=anywhere, bucket_mb=bucket_mb)
    accumulate(model, mine(batches, rank))
    assert_same_gradients(
        gradients_of(model), expected_gradients(MLP(hidden, dtype=dtype), batches)
    )


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("bucket_mb, hidden", SWEEP)
def test_other_stages_have_the_same_bits_with_one_micro_batch(
    anywhere, rank, world, stage, bucket_mb, hidden, dtype
):
    batches = rank_batches((4, 5), world, dtype=dtype)
    model = zero_ext.shard(MLP(hidden, dtype=dtype), stage, mesh=anywhere, bucket_mb=bucket_mb)
    accumulate(model, mine(batches, rank))
    assert_same_gradients(
        gradients_of(model), expected_gradients(MLP(hidden, dtype=dtype), batches)
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_reducing_every_micro_batch_gives_stage_2_bits_in_every_stage(anywhere, rank, world, stage):
    """Without no_sync the order is (micro-batch, rank) as well."""
    batches = rank_batches((4, 5), world, micros=3)
    model = zero_ext.shard(MLP(7), stage, mesh=anywhere, bucket_mb=1e-4)
    accumulate(model, mine(batches, rank))
    assert_same_gradients(gradients_of(model), expected_gradients(MLP(7), batches))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_local_accumulation_is_the_same_sum_in_another_order(anywhere, rank, world, stage, dtype):
    """(rank, micro-batch) order: one rounding of fp32 per contribution, of at most their sum."""
    micros = 4
    batches = rank_batches((4, 5), world, micros=micros, dtype=dtype)
    model = zero_ext.shard(MLP(7, dtype=dtype), stage, mesh=anywhere, bucket_mb=1e-4)
    with model.no_sync():
        accumulate(model, mine(batches, rank)[:-1])
    accumulate(model, mine(batches, rank)[-1:])

    expected = expected_gradients(MLP(7, dtype=dtype), batches)
    sizes = summed_magnitudes(MLP(7, dtype=dtype), batches)
    for name, gradient in gradients_of(model).items():
        bound = 2 * micros * world * FP32_EPS * sizes[name]
        assert ((gradient - expected[name]).abs() <= bound).all(), name


def summed_magnitudes(model: nn.Module, batches: list[list]) -> dict[str, Tensor]:
    """The mean over ranks of every contribution's magnitude: what roundings are relative to."""
    world = len(batches[0])
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for batch in (batch for ranks in batches for batch in ranks):
        model.zero_grad(set_to_none=True)
        mean_square(model, batch).backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad.float().abs() / world
    return sums


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("bucket_mb, hidden", [(1e-3, 64), (1e-5, 7)])
def test_parameters_after_five_steps_have_the_bits_of_one_rank(
    anywhere, only_me, rank, world, stage, dtype, bucket_mb, hidden
):
    """Stage 2 with three micro-batches, the others with one; the single rank runs them all."""
    micros = 3 if stage == 2 else 1

    def batches(step: int) -> list[list]:
        return rank_batches((4, 5), world, step=step, micros=micros, dtype=dtype)

    model = zero_ext.shard(MLP(hidden, dtype=dtype), stage, mesh=anywhere, bucket_mb=bucket_mb)
    optimizer = zero_ext.optim.AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, lambda step: mine(batches(step), rank))

    one = zero_ext.shard(MLP(hidden, dtype=dtype), stage, mesh=only_me)
    one.set_gradient_divide_factor(world)
    one_optimizer = zero_ext.optim.AdamW(one.parameters(), **ADAMW)
    train(one, one_optimizer, lambda step: [b for ranks in batches(step) for b in ranks])

    for (name, actual), expected in zip(model.named_parameters(), one.parameters(), strict=True):
        assert_bits(actual, expected, name)
        assert_bits(whole(shown_master(actual)), whole(shown_master(expected)), f"master of {name}")
        for key, value in optimizer.state[actual].items():
            assert_bits(whole(value), whole(one_optimizer.state[expected][key]), f"{key} of {name}")


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_masters_are_those_of_torch_adamw_within_a_few_ulps(anywhere, rank, world, stage, dtype):
    """Same gradients in, so only the update's own roundings differ.

    An update is at most ~lr/(1 - beta1) and made of about a dozen roundings, relative to it; the
    subtraction from the master and the weight decay round once each, relative to the master.
    """
    model = zero_ext.shard(MLP(7, dtype=dtype), stage, mesh=anywhere, bucket_mb=1e-4)
    optimizer = zero_ext.optim.AdamW(model.parameters(), **ADAMW)
    expected = OneProcess(MLP(7, dtype=dtype), lambda p: torch.optim.AdamW(p, **ADAMW))
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(model, rank_data((4, 5), rank, step, dtype=dtype)).backward()
        expected.step(gradients_of(model))
        optimizer.step()

    for name, parameter in model.named_parameters():
        master = whole(shown_master(parameter))
        bound = STEPS * FP32_EPS * (2 * expected.masters[name].abs() + 16 * ADAMW["lr"])
        assert ((master - expected.masters[name]).abs() <= bound).all(), name
        assert_bits(parameter, master.to(dtype), f"{name} is its master, rounded")


@pytest.mark.host
@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_gradient_is_that_of_ddp_up_to_the_rounding_of_its_sum(mesh, group, rank, stage, dtype):
    """DDP divides, then adds in the gradient's dtype: two roundings per rank, of one magnitude."""
    world = mesh.size()
    batches = rank_batches((4, 5), world, dtype=dtype)
    model = zero_ext.shard(MLP(64, dtype=dtype), stage, mesh=mesh, bucket_mb=1e-3)
    accumulate(model, mine(batches, rank))
    ddp = DistributedDataParallel(MLP(64, dtype=dtype), process_group=group)
    accumulate(ddp, mine(batches, rank))

    sizes = summed_magnitudes(MLP(64, dtype=dtype), batches)
    actual = gradients_of(model)
    for name, parameter in ddp.module.named_parameters():
        bound = 2 * world * torch.finfo(dtype).eps * sizes[name]
        assert ((actual[name] - parameter.grad.float()).abs() <= bound).all(), name


@pytest.mark.host
@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_training_follows_ddp(mesh, group, rank, stage, dtype):
    """Five SGD steps; ours and DDP's with fp32 masters, both.

    A step's gradients differ by the rounding of DDP's sum (above), and from the second step on by
    the parameters'. Relative to how far the parameters have moved that is a few eps of the dtype.
    """
    lr = 0.1
    model = zero_ext.shard(MLP(64, dtype=dtype), stage, mesh=mesh, bucket_mb=1e-3)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=lr)
    train(model, optimizer, lambda step: [rank_data((4, 5), rank, step, dtype=dtype)])

    expected = OneProcess(MLP(64, dtype=dtype), lambda p: torch.optim.SGD(p, lr=lr))
    ddp = DistributedDataParallel(expected.model, process_group=group)
    for step in range(STEPS):
        ddp.zero_grad()
        mean_square(ddp, rank_data((4, 5), rank, step, dtype=dtype)).backward()
        expected.step({n: p.grad.float() for n, p in expected.model.named_parameters()})

    start = dict(MLP(64, dtype=dtype).named_parameters())
    for name, parameter in model.named_parameters():
        moved = (expected.masters[name] - start[name].float()).norm()
        differs = (whole(shown_master(parameter)) - expected.masters[name]).norm()
        assert differs <= 4 * world_roundings(mesh.size()) * torch.finfo(dtype).eps * moved, name


def world_roundings(world: int) -> int:
    """DDP's sum over ``world`` ranks rounds once per division and once per addition."""
    return 2 * world


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_gradient_is_that_of_one_process_on_the_joint_batch(anywhere, rank, world, stage, dtype):
    """The one process adds samples inside its GEMMs; we add micro-batches rounded to the dtype."""
    batches = rank_batches((4, 5), world, micros=3, dtype=dtype)
    model = zero_ext.shard(MLP(64, dtype=dtype), stage, mesh=anywhere, bucket_mb=1e-3)
    accumulate(model, mine(batches, rank))

    joint = torch.cat([batch for ranks in batches for batch in ranks])
    reference = MLP(64, dtype=dtype)
    # The sum of three micro-batches' means is three times the joint mean.
    (3 * mean_square(reference, joint)).backward()
    actual = gradients_of(model)
    for name, parameter in reference.named_parameters():
        expected = parameter.grad.float()
        bound = 16 * torch.finfo(dtype).eps * expected.norm()
        assert (actual[name] - expected).norm() <= bound, name


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("micros", [1, 3])
def test_collective_reduction_is_close(mesh, rank, world, stage, dtype, micros):
    """fp32 on the wire; only the order of the fp32 sum is the backend's."""
    batches = rank_batches((4, 5), world, micros=micros, dtype=dtype)
    model = zero_ext.shard(
        MLP(7, dtype=dtype), stage, mesh=mesh, bucket_mb=1e-4, reduction="collective"
    )
    accumulate(model, mine(batches, rank))
    expected = expected_gradients(MLP(7, dtype=dtype), batches)
    sizes = summed_magnitudes(MLP(7, dtype=dtype), batches)
    for name, gradient in gradients_of(model).items():
        bound = 2 * world * micros * FP32_EPS * sizes[name]
        assert ((gradient - expected[name]).abs() <= bound).all(), name


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("reduction", ["exchange", "collective"])
def test_reduce_dtype_rounds_each_contribution_once(mesh, rank, world, reduction):
    """bf16 on the wire for an fp32 model: each contribution rounds, a collective's sums too."""
    batches = rank_batches((4, 5), world)
    model = zero_ext.shard(
        MLP(7),
        2,
        mesh=mesh,
        reduction=reduction,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    )
    accumulate(model, mine(batches, rank))
    expected, sizes = expected_gradients(MLP(7), batches), summed_magnitudes(MLP(7), batches)
    for name, gradient in gradients_of(model).items():
        bound = (1 if reduction == "exchange" else world) * BF16_EPS * sizes[name]
        assert ((gradient - expected[name]).abs() <= bound).all(), name
        assert not torch.equal(gradient, expected[name]), f"{name} was not sent in bf16"


@pytest.mark.parametrize("bucket_mb", [1e-6, 2e-4, 25.0])
def test_one_model_may_mix_dtypes(anywhere, rank, world, bucket_mb):
    """bf16, fp16 and fp32 layers; gradients to the bit, masters as torch's AdamW has them."""
    model = zero_ext.shard(Mixed(), 2, mesh=anywhere, bucket_mb=bucket_mb)
    optimizer = zero_ext.optim.AdamW(model.parameters(), **ADAMW)
    expected = OneProcess(Mixed(), lambda p: torch.optim.AdamW(p, **ADAMW))
    for step in range(STEPS):
        batches = rank_batches((4, 5), world, step=step, micros=2)
        # From the same parameters, because one ulp of a master may become one of a bf16 weight.
        expected.model.load_state_dict(model.state_dict())
        gradients = expected_gradients(expected.model, batches)
        optimizer.zero_grad()
        accumulate(model, mine(batches, rank))
        assert_same_gradients(gradients_of(model), gradients)
        expected.step(gradients)
        optimizer.step()

    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float16, torch.float32}
    for name, parameter in model.named_parameters():
        bound = STEPS * FP32_EPS * (2 * expected.masters[name].abs() + 16 * ADAMW["lr"])
        differs = (whole(shown_master(parameter)) - expected.masters[name]).abs()
        assert (differs <= bound).all(), name


@pytest.mark.parametrize("stage", [1, 2])
def test_mixed_precision_policy_is_a_bf16_model_with_exact_masters(anywhere, rank, world, stage):
    """An fp32 model under ``param_dtype=bf16`` and a bf16 model whose masters are written."""
    full = MLP(7)
    model = zero_ext.shard(
        MLP(7),
        stage,
        mesh=anywhere,
        bucket_mb=1e-4,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    twin = zero_ext.shard(MLP(7).bfloat16(), stage, mesh=anywhere, bucket_mb=1e-3)
    for parameter, value in zip(twin.parameters(), full.parameters(), strict=True):
        shown_master(parameter).copy_(value.detach())

    pair = [
        (each, zero_ext.optim.AdamW(each.parameters(), **ADAMW), dtype)
        for each, dtype in ((model, torch.float32), (twin, torch.bfloat16))
    ]
    for each, optimizer, dtype in pair:
        # The policy casts the fp32 inputs itself.
        train(each, optimizer, lambda step, to=dtype: [rank_data((4, 5), rank, step, dtype=to)])

    for (name, actual), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert actual.dtype == torch.bfloat16
        assert_bits(actual, expected, name)
        assert_bits(whole(shown_master(actual)), whole(shown_master(expected)), f"master of {name}")


def test_mixed_precision_policy_keeps_the_fp32_values_as_masters(anywhere):
    model = zero_ext.shard(
        MLP(7), 2, mesh=anywhere, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    for (name, parameter), value in zip(model.named_parameters(), MLP(7).parameters(), strict=True):
        assert_bits(whole(shown_master(parameter)), value, name)
        assert_bits(parameter, value.bfloat16(), name)


@pytest.mark.parametrize("stage, local", [(0, True), (1, True), (1, False), (2, False), (2, True)])
def test_small_gradients_behind_a_large_one_are_not_lost(anywhere, rank, world, stage, local):
    """256, then 1, 1, 1 … over 64 micro-batches in bf16, where 256 + 1 is 256.

    Not divided, so that the expected value is a whole number for every number of ranks.
    """
    micros = 64
    model = nn.Linear(1, 3, bias=False, dtype=torch.bfloat16)
    zero_ext.shard(model, stage, mesh=anywhere)
    model.set_gradient_divide_factor(1)
    for micro in range(micros):
        gradient = (256.0 if micro == 0 else 1.0) * 2**rank
        x = torch.full((1, 1), gradient, dtype=torch.bfloat16)
        with model.no_sync() if local and micro < micros - 1 else nullcontext():
            model(x).sum().backward()
    expected = sum((256 + micros - 1) * 2**other for other in range(world))
    assert_bits(whole(model.weight.grad), torch.full((3, 1), float(expected)))


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_all_ranks_end_with_the_same_parameters(mesh, group, rank, dtype):
    """The gather after the step leaves no rank behind, padding and straddling included."""
    model = zero_ext.shard(MLP(7, dtype=dtype), 1, mesh=mesh, bucket_mb=1e-4)
    optimizer = zero_ext.optim.AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, lambda step: [rank_data((4, 5), rank, step, dtype=dtype)])
    values = [p.detach().clone() for p in model.parameters()]
    for other in gather_objects(values, group):
        for actual, expected in zip(other, values, strict=True):
            assert_bits(actual, expected)
