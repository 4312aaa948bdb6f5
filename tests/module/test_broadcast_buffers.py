"""shard(broadcast_buffers=True): the numbers of DDP, whose forwards begin with rank 0's buffers."""

import contextlib

import pytest
import torch
from harness import rank_data
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zero_ext

pytestmark = pytest.mark.dist


class Statistics(nn.Module):
    """Buffers of several dtypes that a forward writes, one of them by an assignment."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 1))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(3, dtype=torch.int64), persistent=False)

    def forward(self, x):
        y = self.layers(x) - self.mean
        with torch.no_grad():
            self.mean = torch.lerp(self.mean, x.mean(), 0.5)
            self.calls += 1
        return y


def batch(rank: int, step: int) -> torch.Tensor:
    return rank_data((4, 7), rank, step) + rank


def run(model, optimizer, no_sync, rank):
    """Accumulates, evaluates and trains on; returns what each forward has found."""
    found = []

    def forward(step):
        found.append([b.clone() for b in model.buffers()])
        loss = model(batch(rank, step)).square().mean()
        found.append([loss.detach().clone(), *(b.clone() for b in model.buffers())])
        return loss

    for step in range(0, 12, 4):
        with no_sync():
            (forward(step) / 2).backward()
        (forward(step + 1) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            forward(step + 2)
            forward(step + 3)
        model.train()
    return [value for values in found for value in values]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forwards_have_the_numbers_of_ddp(group, rank, world, stage, device):
    if device.type != "cpu":
        pytest.skip("DDP's own numbers are the host's")
    plain = Statistics()
    ddp = DistributedDataParallel(plain, process_group=group)
    expected = run(ddp, torch.optim.SGD(plain.parameters(), lr=0.1), ddp.no_sync, rank)

    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    model = zero_ext.shard(Statistics(), stage, mesh=mesh, broadcast_buffers=True)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    actual = run(model, optimizer, model.no_sync, rank)
    for k, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=f"value {k}")


def test_a_registered_method_is_a_forward(mesh, rank, world):
    model = Statistics()
    model.encode = model.forward
    zero_ext.shard(model, 2, mesh=mesh, broadcast_buffers=True)
    zero_ext.register_forward_method(model, "encode")
    for step in range(2):
        model.encode(batch(rank, step)).sum().backward()
    expected = torch.lerp(
        torch.lerp(torch.zeros(()), batch(0, 0).mean(), 0.5), batch(rank, 1).mean(), 0.5
    )
    torch.testing.assert_close(model.mean.cpu(), expected.cpu())


def test_buffers_of_ranks_stay_apart_by_default(mesh, rank, world):
    model = zero_ext.shard(Statistics(), 2, mesh=mesh)
    for step in range(2):
        model(batch(rank, step)).sum().backward()
    own = torch.lerp(
        torch.lerp(torch.zeros(()), batch(rank, 0).mean(), 0.5), batch(rank, 1).mean(), 0.5
    )
    torch.testing.assert_close(model.mean.cpu(), own.cpu())


def test_ranks_must_agree(mesh, rank, world):
    differs = pytest.raises(ValueError, match="broadcast_buffers")
    with differs if world > 1 else contextlib.nullcontext():
        zero_ext.shard(Statistics(), 1, mesh=mesh, broadcast_buffers=rank == 0)


def test_it_must_be_a_bool():
    with pytest.raises(TypeError, match="broadcast_buffers must be True or False"):
        zero_ext.shard(Statistics(), 1, broadcast_buffers="all")
