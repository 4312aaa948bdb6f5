"""``metrics``: what a logger gets, computed in other ways."""

import time

import pytest
import torch
import torch.distributed as dist
from harness import (
    MLP,
    OWN_BACKEND,
    mean_square,
    needs_one_dimension,
    rank_batches,
    rank_data,
    reference_gradients,
    step_and_wait,
)
from torch.profiler import ProfilerActivity, profile

import zero_ext

WAITED = "waited_ms/"


def known(model, optimizer) -> dict[str, float]:
    """What the host knows once the device has done all."""
    if torch.get_default_device().type != "cpu":
        zero_ext.metrics(model, optimizer)
        torch.accelerator.synchronize()
    return zero_ext.metrics(model, optimizer)


@pytest.mark.filterwarnings("ignore:zero_ext.*skipped")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norm_skipped_steps_scale_and_bytes(anywhere, rank, stage):
    needs_one_dimension()
    world = 1 if anywhere is None else anywhere.size()
    model = zero_ext.shard(MLP(83), stage, mesh=anywhere)
    scaler = zero_ext.LossScaler("static", init_scale=8.0)
    optimizer = zero_ext.optim.AdamW(model.parameters(), max_grad_norm=0.1, loss_scaler=scaler)
    assert "grad_norm" not in zero_ext.metrics(model, optimizer)
    scaler.scale(mean_square(model, rank_data((4, 5), rank))).backward()
    step_and_wait(optimizer)
    found = known(model, optimizer)
    gradients = reference_gradients(lambda: MLP(83), rank_batches((4, 5), world), world, 1 / world)
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert (found["loss_scale"], found["skipped_steps"]) == (8.0, 0.0)

    planned = zero_ext.estimate_memory(MLP(83), world, stage)
    parameters = planned["full"] + planned["shard"] + planned["master"]
    assert found["bytes/parameters"] == parameters
    assert found["bytes/gradients"] == planned["grad"]
    assert found["bytes/states"] == planned["optimizer_state"]
    assert 0 <= found["bytes/buckets"] <= planned["buckets"]
    assert found["bytes/gathered"] == found["bytes/offloaded"] == 0
    with zero_ext.summon_full_params(model):
        gathered = zero_ext.metrics(model, optimizer)["bytes/gathered"]
        whole = sum(p.nbytes for p in model.parameters())
    assert gathered >= whole if stage == 3 and world > 1 else gathered == 0

    optimizer.zero_grad()
    scaler.scale(mean_square(model, rank_data((4, 5), rank)) * float("nan")).backward()
    step_and_wait(optimizer)
    assert zero_ext.metrics(model, optimizer)["skipped_steps"] == 1.0
    assert all(type(value) is float for value in found.values())


@pytest.mark.dist
def test_waits_are_those_of_the_profiler_since_the_last_call(mesh, rank, world):
    if OWN_BACKEND:
        pytest.skip("the host does not wait for collectives of a device")
    model = zero_ext.shard(MLP(13), 2, mesh=mesh)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    for step in range(2):  # the first one learns the order of reductions
        zero_ext.metrics(model, optimizer)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            if step == 1:
                dist.barrier()  # a profiler's start takes each rank another time
                if rank == world - 1:
                    time.sleep(0.05)
            mean_square(model, rank_data((4, 5), rank)).backward()
            optimizer.step()
    found = zero_ext.metrics(model, optimizer)
    found = {k.removeprefix(WAITED): ms for k, ms in found.items() if k.startswith(WAITED) and ms}
    shown: dict[str, float] = {}
    for event in profiler.events():
        if event.name.startswith("zero_ext::wait for "):
            whom = event.name.removeprefix("zero_ext::wait for ").replace(" ", "_")
            shown[whom] = shown.get(whom, 0.0) + event.cpu_time_total / 1000
    assert found == pytest.approx(shown, rel=0.05, abs=0.5)
    if rank != world - 1:
        assert found.keys() & {f"rank_{world - 1}", "all_ranks"}, "nobody waited for the late rank"
    again = zero_ext.metrics(model, optimizer)
    assert {ms for k, ms in again.items() if k.startswith(WAITED)} == {0.0}


def test_what_is_not_sharded_is_named(anywhere):
    model = zero_ext.shard(MLP(13), 1, mesh=anywhere)
    with pytest.raises(TypeError, match=r"an optimizer of zero_ext\.optim, not SGD"):
        zero_ext.metrics(model, torch.optim.SGD(MLP(13).parameters()))
    with pytest.raises(ValueError, match="this MLP is not sharded"):
        zero_ext.metrics(MLP(13), zero_ext.optim.SGD(model.parameters()))
