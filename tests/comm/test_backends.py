"""Process groups that are like the user's, whichever backend that has."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import MLP, assert_bits, mean_square, rank_batches
from reference import OneProcess, fma_gradients
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from zero_ext.engine.registry import find
from zero_ext.ranks.comm_groups import comm_groups

OVER_LCCL = "lccl" in os.environ.get("ZERO_EXT_TEST_BACKENDS", "")
TIMEOUT = timedelta(seconds=17)


class Chosen(dist.ProcessGroupGloo):
    """gloo with options of the user's."""

    def __init__(self, place, options):
        super().__init__(*place)
        self.chosen = options

    @property
    def options(self):
        return self.chosen


@pytest.fixture
def made(device):
    """What a backend of torch's extended API was asked for, which other tests may not have."""
    asked = []

    def make(own, options):
        place = (own.store, own.group_rank, own.group_size, own.timeout)
        ranks = list(own.global_ranks_in_group)
        if OVER_LCCL:
            import lagged_device

            backend = lagged_device.make_lccl(*place)
        else:
            backend = Chosen(place, options)
        asked.append(SimpleNamespace(name=own.group_id, ranks=ranks, backend=backend, own=own))
        return backend

    dist.Backend.register_backend("nccl-like", make, extended_api=True, devices=[device.type])
    yield asked
    del dist.Backend._plugins["NCCL-LIKE"]


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.skipif(
    not OVER_LCCL and os.environ.get("ZERO_EXT_TEST_DEVICE", "cpu") != "cpu",
    reason="around gloo on the host, around lccl on the emulated device",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backend_of_the_extended_api(made, rank, world, device, stage):
    options = SimpleNamespace(_timeout=TIMEOUT, group_name="users", split_from="another", lanes=[7])
    options.is_high_priority_stream = True
    backends = "cpu:gloo,lagged:nccl-like" if OVER_LCCL else "cpu:nccl-like"
    group = dist.new_group(timeout=TIMEOUT, backend=backends, pg_options=options)
    mesh = DeviceMesh.from_group(group, device.type)
    model = zero_ext.shard(MLP(13), stage, mesh=mesh, bucket_mb=1e-4, reduction="exchange")
    assert len(made) == 3  # the user's, for reductions, and for gathers
    for each in made[1:]:
        assert each.ranks == list(range(world))
        if not OVER_LCCL:  # which shows no options
            own = each.backend.options
            assert each.own.timeout == TIMEOUT
            assert own is not options and own.lanes == [7] and own.lanes is not options.lanes
            assert (own._timeout, own.split_from) == (TIMEOUT, None)
            assert own.is_high_priority_stream
            # By which torch's flight recorder finds the same call on other ranks.
            assert (own.group_name, own.global_ranks_in_group) == (each.name, each.ranks)
    assert options.group_name == "users" and len({each.name for each in made}) == 3

    with comm_groups(find(next(model.parameters()))[0].groups) as comm:
        assert OVER_LCCL or comm.timeout == TIMEOUT
        assert comm.default_reduction == "collective"  # of NCCL, whatever its class is

    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    one = OneProcess(MLP(13), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for step in range(3):
        batches = rank_batches((4, 5), world, step)
        mean_square(model, batches[0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        one.step(fma_gradients(one.model, batches, world))
    for name, parameter in model.named_parameters():
        assert_bits(zero_ext.full_tensor(parameter), one.masters[name], name)
    dist.destroy_process_group(group)


class AskedByTorch215(distributed_c10d._DistributedBackendOptions):
    """What creators are asked for since torch 2.15: they see the group, and the device it is on."""

    process_group = None
    enable_reconfigure = False


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.skipif(not OVER_LCCL, reason="a backend of a device")
def test_a_backend_that_connects_when_it_is_made(made, rank, world, monkeypatch):
    """As NCCL of torch 2.15. Each rank's model is on another device than its number says."""
    monkeypatch.setattr(distributed_c10d, "_DistributedBackendOptions", AskedByTorch215)
    own = torch.device("lagged", (rank + 1) % 2)
    group = dist.new_group(backend="cpu:gloo,lagged:nccl-like")
    with own:
        model = zero_ext.shard(MLP(13), 2, mesh=DeviceMesh.from_group(group, "lagged"))
    asked = [each.own.process_group for each in made[1:]]
    assert [each.bound_device_id for each in asked] == [own, own]
    model(torch.ones(rank + 2, 5, device=own)).sum().backward()
    grads = [zero_ext.full_grad(p) for p in model.parameters()]
    # Of the last bias: a rank's number of rows, and their mean.
    torch.testing.assert_close(grads[-1].cpu(), torch.full([5], (world + 3) / 2, device="cpu"))
    dist.destroy_process_group(group)
