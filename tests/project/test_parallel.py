"""examples/parallel.py: every layout of four ranks trains as one process does."""

import sys

import pytest
import torch
import torch.distributed as dist
from code_blocks import ROOT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from zero_ext.tensor.meshes import local_of

pytestmark = [pytest.mark.dist, pytest.mark.host, pytest.mark.world(4)]

STEPS = 3
LAYOUTS = [
    "--stage 3",
    "--tp 2 --stage 3",
    "--cp 2 --stage 2",
    "--pp 2 --stage 1",
    "--pp 2 --stage 3 --one-f-one-b",
    "--tp 2 --pp 2 --stage 2",
    "--tp 2 --cp 2 --stage 1",
    "--experts 4 --ep 2 --stage 3",
    "--experts 4 --ep 4 --stage 1",
    "--experts 4 --ep 2 --tp 2 --stage 2",
    "--experts 4 --ep 2 --cp 2 --stage 2",
    "--experts 4 --ep 2 --pp 2 --stage 1",
]


@pytest.fixture
def parallel(monkeypatch, no_stale_meshes):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import parallel

    yield parallel
    for name in ("parallel", "parallel_model"):
        sys.modules.pop(name)


def losses_of_one_process(parallel, experts: int) -> list[float]:
    """Plain PyTorch on all sequences, on every rank alike."""
    names = ("pp", "dp", "ep", "cp", "tp")
    mesh = init_device_mesh("cpu", (1, 4, 1, 1, 1), mesh_dim_names=names)
    model = parallel.Model(2, mesh, experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("others", "dp"))
    losses = []
    for step in range(STEPS):
        inputs, targets = parallel.batch_of(step, {"dp": alone["dp"], "cp": alone["dp"]})
        loss = parallel.loss_of(model(inputs), targets)
        loss.backward()
        norm = nn.utils.get_total_norm([local_of(p.grad) for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(parallel, layout):
    expected = losses_of_one_process(parallel, experts=4 if "--experts" in layout else 0)
    losses = parallel.main(*layout.split(), "--steps", str(STEPS))
    assert_close(losses, expected, rtol=1e-5, atol=0)


def test_stages_have_the_same_bits_and_fully_shard_almost(parallel):
    steps = ("--tp", "2", "--steps", str(STEPS))
    first = parallel.main(*steps, "--stage", "0")
    for stage in "123":
        assert parallel.main(*steps, "--stage", stage) == first
    assert parallel.main(*steps, "--zero-fsdp") == first
    assert_close(parallel.main(*steps, "--fsdp2"), first, rtol=1e-6, atol=0)
    assert dist.get_world_size() == 4
