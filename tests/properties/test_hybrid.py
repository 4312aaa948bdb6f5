"""Hybrid sharding: replicas that hold one copy each, and compute what all ranks compute.

On two ranks a mesh of two dimensions has one row or one column; both at once need four.
"""

import pytest
import torch
import torch.distributed as dist
from harness import (
    DIRECT,
    MLP,
    ONE_UNIT_EACH,
    ManyLayers,
    assert_bits,
    gather_objects,
    mean_square,
    needs_own_gathers,
    rank_batches,
    rank_data,
)
from reference import fma_gradients, gradients_of, shown_master, whole
from setups import SMALL_BUCKET_MB, full_master, values_of
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from zero_ext import checkpoint

pytestmark = pytest.mark.dist

SHAPE = (4, 5)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
# Stages 0 and 1 differ from 2 in what is held, not in who adds up what.
MOST_STAGES = pytest.mark.parametrize(
    "stage",
    [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2, 3],
)
SHARDED_STAGES = pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


@pytest.fixture(params=["of one rank", "of several"])
def replicas(request, world, replicas_of) -> DeviceMesh:
    """(replicate, shard): as many replicas as ranks, or some of several ranks each."""
    several = 2 if world % 2 == 0 else world
    return replicas_of(1 if request.param == "of one rank" else several)


def sharded(mesh, stage, model=None, **kwargs):
    model = MLP(13) if model is None else model
    return zero_ext.shard(model, stage, mesh=mesh, **{"bucket_mb": SMALL_BUCKET_MB, **kwargs})


def train(model, optimizer, rank, steps, micros=1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for micro in range(micros):
            mean_square(model, rank_data(SHAPE, rank, step, micro)).backward()
        optimizer.step()


def assert_same_on_all_ranks(values) -> None:
    mine = [value.cpu() for value in values]
    for other in gather_objects(mine):
        for value, expected in zip(mine, other, strict=True):
            assert_bits(value, expected)


@STAGES
@pytest.mark.parametrize(
    "bucket_mb",
    [ONE_UNIT_EACH, pytest.param(25.0, marks=pytest.mark.slow)],
    ids=["units", "one unit"],
)
def test_gradients_have_the_bits_of_one_process(replicas, rank, world, stage, bucket_mb):
    """Of all ranks' micro-batches, in (micro-batch, rank) order, whichever replica they are in."""
    model = sharded(replicas, stage, bucket_mb=bucket_mb, reduction="exchange")
    micros = 1 if stage < 2 else 3
    batches = rank_batches(SHAPE, world, micros=micros)
    for ranks in batches:
        mean_square(model, ranks[rank]).backward()
    expected = fma_gradients(MLP(13), batches, world)
    for name, gradient in gradients_of(model).items():
        assert_bits(gradient, expected[name], name)


@MOST_STAGES
def test_ranks_of_different_replicas_use_different_parameters(replicas, rank, world, stage):
    """One that no rank uses keeps None; one that a single rank uses is everybody's."""
    if replicas.size(1) > 1:
        needs_own_gathers(stage)
    blocks = ManyLayers(blocks=world + 1, width=5)
    batches = [[(rank_data(SHAPE, r), [r]) for r in range(world)]]
    expected = fma_gradients(blocks, batches, world)
    model = sharded(replicas, stage, blocks, bucket_mb=ONE_UNIT_EACH, reduction="exchange")
    mean_square(model, batches[0][rank]).backward()
    for name, gradient in gradients_of(model).items():
        if f"blocks.{world}" in name:
            assert gradient is None, name
        else:
            assert_bits(gradient, expected[name], name)


@MOST_STAGES
@pytest.mark.parametrize("reduction", ["exchange", "collective"])
def test_it_trains_as_one_dimension_and_replicas_stay_equal(replicas, mesh, rank, stage, reduction):
    """Bit for bit with exchange; the norm that clips too. Collectives add up in another order."""
    model = sharded(replicas, stage, reduction=reduction)
    twin = sharded(mesh, stage, reduction=reduction)
    trained = []
    for each in (model, twin):
        optimizer = zero_ext.optim.AdamW(each.parameters(), max_grad_norm=0.1, **ADAMW)
        train(each, optimizer, rank, range(3))
        norm = torch.as_tensor(optimizer.grad_norm)
        trained.append([*values_of(each).values(), *map(full_master, each.parameters()), norm])
    assert_same_on_all_ranks(trained[0])
    for value, expected in zip(*trained, strict=True):
        if reduction == "exchange":
            assert_bits(value, expected)
        else:
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=2e-6)


@SHARDED_STAGES
def test_a_rank_holds_its_part_of_a_replica(replicas, stage, device):
    shards = replicas.size(1)
    model = sharded(replicas, stage, MLP(13, dtype=torch.bfloat16))
    optimizer = zero_ext.optim.AdamW(model.parameters(), **ADAMW)
    mean_square(model, rank_data(SHAPE, 0, dtype=torch.bfloat16)).backward()
    optimizer.step()
    estimate = zero_ext.estimate_memory(
        MLP(13, dtype=torch.bfloat16),
        dist.get_world_size(),
        stage,
        shards=shards,
        bucket_mb=SMALL_BUCKET_MB,
        device=device,
        peer_memory=DIRECT,
    )
    held = model.stats()
    for what in ("full", "shard", "master", "optimizer_state"):
        assert held.get(f"bytes_{what}", 0) == estimate[what], what
    for parameter in model.parameters():
        state = optimizer.state[parameter]["exp_avg"]
        if shards > 1:
            assert state.device_mesh.size() == shards
        assert whole(state).shape == parameter.shape


def test_estimates_refuse_replicas_that_cannot_be():
    with pytest.raises(ValueError, match="8 ranks cannot be replicas of 3"):
        zero_ext.estimate_memory(MLP(), 8, 2, shards=3)


@MOST_STAGES
def test_torchs_clipping_takes_the_norm_of_one_copy(replicas, rank, world, stage):
    model = sharded(replicas, stage, reduction="exchange")
    batches = rank_batches(SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    expected = fma_gradients(MLP(13), batches, world)
    norm = torch.stack([g.double().square().sum() for g in expected.values()]).sum().sqrt()
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(whole(found).double(), norm, rtol=1e-5, atol=0)
    for name, gradient in gradients_of(model).items():
        clipped = expected[name] * (0.01 / norm).float()
        torch.testing.assert_close(gradient, clipped, rtol=1e-5, atol=1e-8, msg=name)


@MOST_STAGES
def test_what_one_rank_cannot_step_nobody_steps(replicas, rank, world, stage):
    model = sharded(replicas, stage)
    optimizer = zero_ext.optim.AdamW(model.parameters(), **ADAMW)
    before = values_of(model)
    factor = float("inf") if rank == world - 1 else 1.0
    (mean_square(model, rank_data(SHAPE, rank)) * factor).backward()
    with pytest.warns(UserWarning, match=f"rank {world - 1}"):
        optimizer.step()
        assert optimizer.skipped_steps == 1
    for name, value in values_of(model).items():
        assert_bits(value, before[name], name)


@SHARDED_STAGES
def test_checkpoints_hold_one_copy_and_fit_any_mesh(replicas, mesh, rank, stage, shared_path):
    """A run that goes on with another mesh and stage has the bits of one that never stopped."""
    path = shared_path / "checkpoint"
    model = sharded(replicas, stage, reduction="exchange")
    optimizer = zero_ext.optim.AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, rank, range(2))
    checkpoint.save(path, model, optimizer)
    if rank == 0:
        written = sum(file.stat().st_size for file in path.glob("*.distcp"))
        entries = FileSystemReader(path).read_metadata().storage_data.values()
        assert written == sum(entry.length for entry in entries)
    train(model, optimizer, rank, range(2, 4))
    for other in (mesh, replicas):
        again = sharded(other, 4 - stage, reduction="exchange")
        with torch.no_grad():
            for parameter in again.parameters():
                zero_ext.set_full_param(parameter, torch.zeros(parameter.shape))
        resumed = zero_ext.optim.AdamW(again.parameters(), **ADAMW)
        checkpoint.load(path, again, resumed)
        train(again, resumed, rank, range(2, 4))
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert_bits(full_master(q), full_master(p))
            assert_bits(whole(resumed.state[q]["exp_avg"]), whole(optimizer.state[p]["exp_avg"]))


@MOST_STAGES
def test_whole_values_are_read_and_written_on_all_ranks(replicas, rank, stage):
    model = sharded(replicas, stage)
    for n, parameter in enumerate(model.parameters()):
        value = torch.full(parameter.shape, float(n)) + torch.arange(parameter.shape[-1])
        zero_ext.set_full_param(parameter, value if rank == 0 else None)
        assert_bits(zero_ext.full_tensor(parameter), value)
        assert_bits(whole(shown_master(parameter)), value)
    with model.summon_full_params(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert_same_on_all_ranks(values_of(model).values())
    assert values_of(model)["layers.0.weight"][0, 1] == 2.0


@pytest.mark.parametrize("names", [None, ("a", "b", "c")])
def test_a_mesh_of_three_dimensions_says_which_to_pass(names, world):
    mesh = DeviceMesh("cpu", torch.arange(world, device="cpu").view(1, -1, 1), mesh_dim_names=names)
    remedy = "mesh_dim_names=" if names is None else r"\('a', 'b', 'c'\); pass the one"
    with pytest.raises(ValueError, match=f"mesh has 3 dimensions.*{remedy}"):
        zero_ext.shard(MLP(), mesh=mesh)


def test_unnamed_dimensions_of_some_ranks_need_names(rank, world):
    if world % 2 or world < 4:
        return
    ranks = torch.arange(world, device="cpu").view(2, -1)
    meshes = [DeviceMesh("cpu", half.view(-1, 1)) for half in ranks]
    with pytest.raises(ValueError, match=r"is of some ranks alone.*mesh_dim_names="):
        zero_ext.shard(MLP(), mesh=meshes[rank // (world // 2)])


def test_two_dimensions_of_three_are_replicas_of_some_ranks(rank, world):
    """Pipeline stages, say, each with a model of its own."""
    if world % 2:
        return
    grid = dist.device_mesh.init_device_mesh(
        "cpu", (2, world // 2, 1), mesh_dim_names=("pipeline", "replicate", "shard")
    )
    stage = grid.get_local_rank("pipeline")
    model = sharded(grid["replicate", "shard"], 2, MLP(13 + stage), reduction="exchange")
    mean_square(model, rank_data(SHAPE, rank)).backward()
    mine = range(stage * (world // 2), (stage + 1) * (world // 2))
    expected = fma_gradients(MLP(13 + stage), [[rank_data(SHAPE, r) for r in mine]], len(mine))
    for name, gradient in gradients_of(model).items():
        assert_bits(gradient, expected[name], name)


def test_ranks_that_do_not_rise_are_refused(world):
    grid = torch.arange(world - 1, -1, -1, device="cpu").view(1, world)
    mesh = DeviceMesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="must rise along its rows"):
        zero_ext.shard(MLP(), mesh=mesh)


def test_deepspeeds_mics_is_hybrid_sharding(rank, world, replicas_of):
    size = 2 if world % 2 == 0 else world
    engine, *_ = zero_ext.initialize(
        model=MLP(13),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "zero_optimization": {"stage": 3, "mics_shard_size": size},
        },
        bucket_mb=SMALL_BUCKET_MB,
    )
    twin = sharded(replicas_of(size), 3)
    for each in (engine, twin):
        mean_square(each, rank_data(SHAPE, rank)).backward()
    for parameter, other in zip(engine.module.parameters(), twin.parameters(), strict=True):
        assert parameter.grad.device_mesh.size() == size
        assert_bits(whole(parameter.grad), whole(other.grad))
