"""torch.compile around sharded models: right, and compiled once."""

import os
import warnings

import pytest
import torch
from harness import ResidualBlock, assert_bits, mean_square, rank_data
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import StepLR

import zero_ext

WIDTH = 6
SHAPE = (4, WIDTH)


def make() -> nn.Module:
    torch.manual_seed(0)
    blocks = [ResidualBlock(WIDTH) for _ in range(3)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, WIDTH))


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    clear_compilation_metrics()
    yield
    torch.compiler.reset()


# Hooks that the compiler looks into are compiled again for every module: then this limit is hit.
@torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
@pytest.mark.dist
@pytest.mark.host
@pytest.mark.parametrize("what", ["model before", "model after", "blocks"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_a_compiled_model_trains_as_the_plain_one_and_is_compiled_once(mesh, rank, stage, what):
    counter = CompileCounterWithBackend("aot_eager")
    plain, model = make(), make()
    if what == "model before":
        model.compile(backend=counter)
    for m in (plain, model):
        zero_ext.shard(m, stage, mesh=mesh, bucket_mb=1e-4)
    run = model
    if what == "model after":
        run = torch.compile(model, backend=counter)
    if what == "blocks":
        for block in model[1:-1]:
            block.compile(backend=counter)
    sides = [(m, zero_ext.optim.SGD(m.parameters(), lr=0.1)) for m in (plain, run)]
    compiled = []
    for step in range(5):
        x = rank_data(SHAPE, rank, step)
        losses = []
        for m, optimizer in sides:
            loss = mean_square(m, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        # A compiler may order the operations of a fp32 sum in its own way.
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        compiled.append(counter.frame_count)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        actual, expected = zero_ext.full_tensor(q), zero_ext.full_tensor(p)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert 1 <= compiled[-1] == compiled[0]
    # Where no hook lies between them, the layers are one graph.
    if stage < 3 and what != "blocks":
        assert compiled[0] == 1


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.parametrize("what", ["model", "blocks"])
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_casts_of_inputs_make_no_graphs_of_their_own(mesh, rank, stage, what):
    """They are part of a graph around them, or run as they are before a compiled block."""
    counts, outputs = [], []
    for cast in (True, False):
        torch.compiler.reset()
        torch.manual_seed(0)
        counter = CompileCounterWithBackend("aot_eager")
        model = nn.Sequential(*(ResidualBlock(WIDTH) for _ in range(3)))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
        zero_ext.shard(model, stage, mesh=mesh, bucket_mb=1e-4, mp_policy=policy)
        whole = [model] if what == "model" else model
        for module in whole:
            module.compile(backend=counter, fullgraph=what == "blocks")
        for rows in (4, 3, 5):
            x = rank_data((rows, WIDTH), rank).to(torch.float32 if cast else torch.bfloat16)
            outputs.append(model(x))
            outputs[-1].sum().backward()
            model.zero_grad()  # torch compiles no fp32 gradient of a bf16 parameter
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] > 0
    torch.testing.assert_close(outputs[:3], outputs[3:], rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.host
@pytest.mark.parametrize("stage", [2, 3])
def test_inductor(mesh, rank, stage):
    plain, model = make(), make()
    for m in (plain, model):
        zero_ext.shard(m, stage, mesh=mesh, bucket_mb=1e-4)
    run = torch.compile(model)
    for step in range(2):
        x = rank_data(SHAPE, rank, step)
        losses = [mean_square(m, x) for m in (plain, run)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            actual, expected = zero_ext.full_grad(q), zero_ext.full_grad(p)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = make()

    def encode(self, x):
        return self.layers(x)


@torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
@pytest.mark.filterwarnings("error:Dynamo does not know")
@pytest.mark.dist
@pytest.mark.host
@pytest.mark.parametrize("stage", [2, 3])
def test_a_registered_method_can_be_compiled(mesh, rank, stage):
    counter = CompileCounterWithBackend("aot_eager")
    model = zero_ext.shard(Encoder(), stage, mesh=mesh, bucket_mb=1e-4)
    zero_ext.register_forward_method(model, "encode")
    compiled = torch.compile(model.encode, backend=counter)
    counts = []
    for step in range(3):
        x = rank_data(SHAPE, rank, step)
        torch.testing.assert_close(compiled(x), model.encode(x), rtol=1e-5, atol=1e-6)
        compiled(x).sum().backward()
        counts.append(counter.frame_count)
    assert 0 < counts[-1] == counts[1]


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make()

    def forward(self, x):
        return self.inner(x) * 2


def around_by(what, model):
    """Something compiled that calls ``model.inner``, which never is compiled itself."""
    if what == "module":
        return torch.compile(model, backend="aot_eager")
    return torch.compile(lambda x: model.inner(x) * 2, backend="aot_eager")


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.parametrize("what", ["module", "function"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_what_was_compiled_before_a_module_was_sharded_is_compiled_again(mesh, rank, stage, what):
    model = Around()
    run = around_by(what, model)
    x = rank_data(SHAPE, rank, 0)
    expected = run(x).detach()
    policy = MixedPrecisionPolicy(output_dtype=torch.float64)
    zero_ext.shard(model.inner, stage, mesh=mesh, bucket_mb=1e-4, mp_policy=policy)
    y = run(x)
    torch.testing.assert_close(y, expected.double(), rtol=1e-5, atol=1e-6)
    y.sum().backward()
    assert all(p.grad is not None for p in model.inner.parameters())
    weight = model.inner[0].weight
    model.inner[0].weight = nn.Parameter(torch.zeros(weight.shape, device=weight.device))
    with pytest.raises(RuntimeError, match=r"'0\.weight' was replaced"):
        run(x)


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.parametrize(
    "first, second",
    [
        ({"stage": 2}, {"stage": 3, "bucket_mb": 1e-4}),
        ({"stage": 3}, {"stage": 3, "bucket_mb": 1e-4}),
        ({"stage": 3, "units": ResidualBlock}, {"stage": 3, "units": nn.Linear}),
    ],
)
def test_compiled_models_of_one_class_may_be_cut_in_different_ways(mesh, rank, first, second):
    x = rank_data(SHAPE, rank, 0)
    expected = make()(x).detach()
    for options in (first, second):
        model = zero_ext.shard(make(), mesh=mesh, **options)
        model.compile(backend="aot_eager")
        y = model(x)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
        y.sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def clip_ours(model, optimizer):
    return optimizer.clip_grad_norm_(0.01)


def clip_torchs(model, optimizer):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def add_up(model, optimizer):
    return sum(p.grad.full_tensor().sum() for p in model.parameters())


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.parametrize(
    "stage, use_gradients",
    [
        (1, clip_torchs),
        (2, clip_ours),
        (2, add_up),
        (3, clip_ours),
        (3, clip_torchs),
        pytest.param(1, clip_ours, marks=pytest.mark.slow),
        pytest.param(1, add_up, marks=pytest.mark.slow),
        pytest.param(2, clip_torchs, marks=pytest.mark.slow),
        pytest.param(3, add_up, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_training_step_does_what_the_plain_one_does(mesh, rank, stage, use_gradients):
    def train_step(model, optimizer, scheduler, x):
        loss = mean_square(model, x)
        loss.backward()
        result = use_gradients(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.detach(), result

    sides = []
    for step in (train_step, torch.compile(train_step, backend="aot_eager")):
        model = zero_ext.shard(make(), stage, mesh=mesh, bucket_mb=1e-4)
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
        sides.append((step, model, optimizer, StepLR(optimizer, 1, gamma=0.5)))
    for i in range(3):
        x = rank_data(SHAPE, rank, i)
        plain, compiled = (step(*arguments, x) for step, *arguments in sides)
        torch.testing.assert_close(plain, compiled, rtol=1e-4, atol=1e-5)
    frames = [m.co_filename or "" for m in get_compilation_metrics()]
    assert [name for name in frames if f"{os.sep}zero_ext{os.sep}" in name] == []


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_compiled_training_step_does_not_clip_what_is_not_reduced(mesh, rank, clip):
    model = zero_ext.shard(make(), 2, mesh=mesh, accumulation_steps=2)

    def step(x):
        mean_square(model, x).backward()
        getattr(nn.utils, clip)(model.parameters(), 0.01)

    step = torch.compile(step, backend="aot_eager")
    with pytest.raises(RuntimeError, match="after 1 of 2 backwards"):
        step(rank_data(SHAPE, rank, 0))


@pytest.mark.dist
@pytest.mark.host
def test_an_optimizers_methods_can_be_compiled(mesh, rank):
    model = zero_ext.shard(make(), mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    before = zero_ext.full_tensor(model[0].weight).clone()
    mean_square(model, rank_data(SHAPE, rank, 0)).backward()
    clip = torch.compile(optimizer.clip_grad_norm_, backend="aot_eager")
    assert clip(0.01).isfinite()
    torch.compile(optimizer.step, backend="aot_eager")()
    assert not zero_ext.full_tensor(model[0].weight).equal(before)
    torch.compile(optimizer.zero_grad, backend="aot_eager")()
    assert model[0].weight.grad is None


@pytest.mark.dist
@pytest.mark.host
def test_the_warning_of_a_skipped_step_names_the_line_that_steps(mesh, rank):
    model = zero_ext.shard(make(), mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    (mean_square(model, rank_data(SHAPE, rank, 0)) * torch.inf).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_module_without_gradients_is_exported(mesh, rank, stage):
    model = zero_ext.shard(make(), stage, mesh=mesh)
    x = rank_data(SHAPE, rank)
    mean_square(model, x).backward()
    with torch.no_grad(), model.summon_full_params(writeback=False):
        with pytest.raises(NotImplementedError, match=r"after zero_grad\(\)"):
            torch.export.export(model, (x,))
        model.zero_grad()
        exported = torch.export.export(model, (x,))
        assert_bits(exported.module()(x), model(x))
