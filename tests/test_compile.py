"""torch.compile around sharded models: right, and compiled once."""

import pytest
import torch
from harness import ResidualBlock, mean_square, rank_data
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

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
    yield
    torch.compiler.reset()


# Hooks that the compiler looks into are compiled again for every module: then this limit is hit.
@torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
@pytest.mark.dist
@pytest.mark.host
@pytest.mark.parametrize("what", ["model before", "model after", "blocks"])
@pytest.mark.parametrize("stage", [1, 2, 3])
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
