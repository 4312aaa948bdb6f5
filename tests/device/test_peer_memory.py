"""Ranks whose devices read each other's gradients and parameters in place, without the backend.

Run with ZERO_EXT_TEST_DIRECT=1 on the device "lagged", or on a GPU as scripts/gpu_suite.sh does.
All else that runs over the emulated device's backend runs there as well, see segments.py.
"""

import contextlib
import os

import lagged_device
import pytest
import torch
import torch.distributed as dist
from harness import MLP, Blocks, assert_bits, mean_square, rank_data
from reference import fma_gradients
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

import zero_ext
import zero_ext.engine.options
from zero_ext.engine.options import StatesOffloadPolicy
from zero_ext.engine.registry import handle_of

pytestmark = [
    pytest.mark.device,
    pytest.mark.dist,
    pytest.mark.world(min=2),
    pytest.mark.skipif(
        os.environ.get("ZERO_EXT_TEST_DIRECT") != "1", reason="for ZERO_EXT_TEST_DIRECT=1"
    ),
]
OFFLOADS = pytest.mark.parametrize("offload", [None, CPUOffloadPolicy()], ids=["", "offload"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@OFFLOADS
def test_gradients_are_one_process_s_bits(mesh, rank, device, stage, dtype, offload):
    """Of three backwards into the same sums. 13 × 5 and 13 elements leave padding in each range."""
    model = MLP(13, dtype=dtype).to(device)
    zero_ext.shard(model, stage, mesh=mesh, bucket_mb=300 / 2**20, offload_policy=offload)
    batches = [
        [rank_data((4, 5), r, step).to(dtype) for r in range(mesh.size())] for step in range(3)
    ]
    for batch in batches:
        mean_square(model, batch[rank].to(device)).backward()
    expected = fma_gradients(MLP(13, dtype=dtype), batches, mesh.size())
    for name, parameter in model.named_parameters():
        assert_bits(zero_ext.full_grad(parameter).cpu(), expected[name], name)


@pytest.mark.parametrize(("stage", "accumulates"), [(0, False), (1, True), (2, False), (3, False)])
@OFFLOADS
def test_a_bucket_has_no_room_for_what_others_send(mesh, rank, device, stage, accumulates, offload):
    """To the byte; there is room for sums in fp32. Where sums lie on the host, copies of all ranks'
    gradients do as well."""
    model = Blocks(13, dtype=torch.bfloat16).to(device)
    options = {"bucket_mb": 1e-5, "offload_policy": offload}
    estimate = zero_ext.estimate_memory(
        model, mesh.size(), stage, local_accumulation=accumulates, peer_memory=True, **options
    )
    zero_ext.shard(model, stage, mesh=mesh, **options)
    batch = rank_data((4, 13), rank).to(device, torch.bfloat16)
    for micro in range(2):
        with model.no_sync() if accumulates and micro == 0 else contextlib.nullcontext():
            mean_square(model, batch).backward()
    assert model.stats()["bytes_bucket"] == estimate["buckets"]
    assert model.stats()["bytes_shard"] == estimate["shard"]
    assert model.stats()["bytes_master"] == estimate["master"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_rank_evaluates_and_reads_alone(mesh, rank, device, dtype):
    """Between steps, any number of times, with the last step's values; no rank waits for it."""
    model, twin = (MLP(13, dtype=dtype).to(device) for _ in range(2))
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=300 / 2**20)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        if rank == step % mesh.size():
            with torch.no_grad():
                twin.load_state_dict(dict(zero_ext.iter_full_params(model)))
                for k in range(step + 1):
                    batch = rank_data((4, 5), k, step).to(device, dtype)
                    assert_bits(model(batch).cpu(), twin(batch).cpu(), f"step {step}")
        mean_square(model, rank_data((4, 5), rank, step).to(device, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.lagged
@pytest.mark.parametrize("late", ["gathers", "updates"])
@pytest.mark.parametrize("offload", [None, StatesOffloadPolicy()], ids=["", "offload"])
def test_devices_meet_around_an_update(mesh, rank, device, late, offload):
    """A late rank has read every part before it changes, and none of its own is read too early."""
    model, twin = MLP(13).to(device), MLP(13).cpu()
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=300 / 2**20, offload_policy=offload)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5, nonfinite="step")
    batches = [rank_data((4, 5), r).cpu() for r in range(mesh.size())]
    sum(mean_square(twin, batch) for batch in batches).div(mesh.size()).backward()
    mean_square(model, batches[rank].to(device)).backward()
    torch.accelerator.synchronize()
    expected, found = [], []
    with torch.no_grad():
        for step in ("before", "after"):
            if rank == 0 and (late, step) in {("gathers", "before"), ("updates", "after")}:
                lagged_device.set_lag(200_000)
            if step == "after":
                optimizer.step()
                torch.optim.SGD(twin.parameters(), lr=0.5).step()
            found.append(model(batches[rank].to(device, non_blocking=True)))
            expected.append(twin(batches[rank]))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs)
    dist.barrier()
    lagged_device.set_lag(5_000)


@pytest.mark.parametrize("chosen", [None, "exchange", "collective"])
def test_sums_are_exact_by_default(mesh, rank, device, monkeypatch, chosen):
    """Also where the backend's own default is its collective, as NCCL's is."""
    groups = zero_ext.engine.options.comm_groups

    @contextlib.contextmanager
    def groups_of_nccl(*args):
        with groups(*args) as made:
            yield made._replace(default_reduction="collective")

    monkeypatch.setattr(zero_ext.engine.options, "comm_groups", groups_of_nccl)
    model = zero_ext.shard(MLP(7).to(device), 2, mesh=mesh, reduction=chosen)
    # Room for gradients is made before the first of them, unless the backend sums them.
    assert (model.stats()["bytes_bucket"] > 0) == (chosen != "collective")
    why = "the backend sums them" if chosen == "collective" else ""
    assert handle_of(model).engine.why_sent == why


def test_a_rank_that_does_not_come_is_named(mesh, rank, device, monkeypatch):
    """The others' devices go on after the timeout, and their next step raises."""
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "2")
    model = zero_ext.shard(MLP(7).to(device), 1, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    last = mesh.size() - 1
    for step in range(2):
        if (step, rank) == (1, last):
            break
        mean_square(model, rank_data((4, 5), rank, step).to(device)).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    if rank < last:
        with pytest.raises(RuntimeError, match=rf"has waited 2 s for rank {last}, and this step's"):
            optimizer.step()
        # The backend had no peer either, for what was queued behind that.
        with contextlib.suppress(RuntimeError):
            torch.accelerator.synchronize()
    dist.barrier()


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_of_other_dtypes_are_named(mesh, rank, device, monkeypatch, stage):
    """Rank 0 has accumulated in fp32, because it was in no_sync(); the others send bf16."""
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "2")
    model = zero_ext.shard(MLP(7, dtype=torch.bfloat16).to(device), stage, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    batch = rank_data((4, 5), rank).to(device, torch.bfloat16)
    if rank == 0:
        with model.no_sync():
            mean_square(model, batch).backward()
    with pytest.raises(RuntimeError, match=r"gradients of another dtype.*no_sync"):
        mean_square(model, batch).backward()
        optimizer.step()
    with contextlib.suppress(RuntimeError):
        torch.accelerator.synchronize()
    dist.barrier()


@pytest.mark.world(min=3)
def test_ranks_that_have_mapped_other_memory_before_map_it_together(rank, device):
    """Some of them have sharded another model. Before torch 2.15 each process numbers its maps."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        own = zero_ext.shard(MLP(7).to(device), 3, mesh=DeviceMesh.from_group(pair, device.type))
        assert handle_of(own).engine.why_sent == ""
    model = zero_ext.shard(MLP(13).to(device), 3)
    assert handle_of(model).engine.why_sent == ""
