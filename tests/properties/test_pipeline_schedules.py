"""torch's schedules of pipelines, whose stages are sharded, against one process."""

import pytest
import torch
from harness import assert_bits
from reference import fma
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing import assert_close

import zero_ext

pytestmark = [pytest.mark.dist, pytest.mark.host]

WIDTH, LAYERS, MICRO_BATCHES, STEPS = 7, 4, 4, 2
# Of each rank of two, its layers.
ROUND, AND_BACK = [(0, 2), (1, 3)], [(0, 3), (1, 2)]
STAGES = pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])


@pytest.fixture
def mesh(world) -> DeviceMesh:
    if world % 2:
        pytest.skip("a pipeline of two ranks")
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, WIDTH, generator=draw), torch.randn(8, WIDTH, generator=draw)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def of_one_process(ranks: int) -> dict[str, Tensor]:
    model = nn.ModuleList(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        for rank in range(ranks):
            x, y = batch_of(step, rank)
            for layer in model:
                x = layer(x)
            (loss_of(x, y) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


class Pipeline:
    def __init__(self, mesh: DeviceMesh, kind: type, places: list[tuple[int, int]], stage: int):
        self.mesh, self.own = mesh, places[mesh["pp"].get_local_rank()]
        self.modules = nn.ModuleDict({str(i): layers()[i] for i in self.own})
        zero_ext.shard(self.modules, stage, mesh=mesh["dp"])
        self.optimizer = zero_ext.optim.SGD(self.modules.parameters(), lr=0.5)
        group, device = mesh.get_group("pp"), torch.device("cpu")
        stages = [
            PipelineStage(self.modules[str(i)], i, LAYERS, device, group=group) for i in self.own
        ]
        self.schedule = kind(stages, MICRO_BATCHES, loss_fn=loss_of)

    def backward(self, step: int) -> None:
        x, y = batch_of(step, self.mesh["dp"].get_local_rank())
        # A rank needs the inputs of the first layer, and the targets of the last one.
        self.schedule.step(*([x] if 0 in self.own else []), target=y, losses=[])

    def assert_parameters(self, expected: dict[str, Tensor]) -> None:
        for name, parameter in self.modules.named_parameters():
            whole = zero_ext.full_tensor(parameter)
            assert_close(whole, expected[name], rtol=1e-5, atol=1e-6)


@STAGES
@pytest.mark.parametrize("kind", ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
def test_schedules_with_whole_backwards(mesh, stage, kind):
    pipeline = Pipeline(mesh, getattr(schedules, kind), ROUND, stage)
    for step in range(STEPS):
        pipeline.backward(step)
        pipeline.optimizer.step()
        pipeline.optimizer.zero_grad()
    pipeline.assert_parameters(of_one_process(mesh["dp"].size()))


@STAGES
@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("ScheduleInterleavedZeroBubble", ROUND),
        ("ScheduleZBVZeroBubble", AND_BACK),
        ("ScheduleDualPipeV", AND_BACK),
    ],
)
def test_schedules_that_write_weight_gradients_by_hand(mesh, stage, kind, places):
    pipeline = Pipeline(mesh, getattr(schedules, kind), places, stage)
    for step in range(STEPS):
        with zero_ext.local_gradients(pipeline.modules):
            pipeline.backward(step)
        pipeline.optimizer.step()
        pipeline.optimizer.zero_grad()
    pipeline.assert_parameters(of_one_process(mesh["dp"].size()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_own_gradients_are_reduced_at_the_end(stage, rank, world):
    model = zero_ext.shard(nn.Sequential(*layers()), stage)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    plain = nn.Sequential(*layers())
    batches = [[batch_of(micro, each) for each in range(world)] for micro in range(3)]

    def backward(of: nn.Module, micro: int, of_rank: int) -> None:
        x, y = batches[micro][of_rank]
        loss_of(of(x), y).backward()

    backward(model, 0, rank)
    with zero_ext.local_gradients(model):
        assert all(p.grad is None for p in model.parameters())
        for micro in (1, 2):
            backward(model, micro, rank)
        for p in model.parameters():
            p.grad += 1.0
        with pytest.raises(RuntimeError, match=r"step\(\) inside local_gradients\(\)"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_.* inside local_gradients\(\)"):
            optimizer.clip_grad_norm_(1.0)
        with (
            pytest.raises(RuntimeError, match=r"local_gradients\(\) inside local_gradients\(\)"),
            zero_ext.local_gradients(model),
        ):
            pass
    expected: dict[str, Tensor] = {}
    for micros in ((0,), (1, 2)):
        for each in range(world):
            plain.zero_grad()
            for micro in micros:
                backward(plain, micro, each)
            for name, p in plain.named_parameters():
                own = p.grad + 1.0 if micros == (1, 2) else p.grad
                expected[name] = fma(1 / world, own, expected.get(name, torch.zeros(p.shape)))
    for name, p in model.named_parameters():
        assert_bits(zero_ext.full_grad(p), expected[name])
    with pytest.raises(KeyError), zero_ext.local_gradients(model):
        backward(model, 0, rank)
        raise KeyError
    for name, p in model.named_parameters():
        assert_bits(zero_ext.full_grad(p), expected[name])
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_see_own_gradients_once(stage, rank, world):
    """Inside, and not again when the gradients are reduced. Later backwards run them."""

    def with_hooks() -> tuple[nn.Module, list[str]]:
        model, calls = nn.Sequential(*layers()), []
        first, *_, last = model.parameters()
        first.register_hook(lambda g: calls.append("before") or g * 0.5)
        last.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
        return model, calls

    def backward(of: nn.Module, of_rank: int) -> None:
        x, y = batch_of(0, of_rank)
        loss_of(of(x), y).backward()

    plain, _ = with_hooks()
    expected = {name: torch.zeros(p.shape) for name, p in plain.named_parameters()}
    for each in range(world):
        plain.zero_grad()
        backward(plain, each)
        for name, p in plain.named_parameters():
            expected[name] = fma(1 / world, p.grad, expected[name])
    model, calls = with_hooks()
    zero_ext.shard(model, stage)
    with zero_ext.local_gradients(model):
        backward(model, rank)
    assert calls == ["after", "before"]
    for name, p in model.named_parameters():
        assert_bits(zero_ext.full_grad(p), expected[name])
    backward(model, rank)
    assert calls == ["after", "before"] * 2
