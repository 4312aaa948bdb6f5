"""What goes to Python's logging."""

import logging
from types import SimpleNamespace

import pytest
import torch
from harness import MLP, mean_square, rank_data
from setups import SMALL_BUCKET_MB
from torch import nn

import zero_ext
from zero_ext.module import sharding


def lines_of_a_start(device, world: int) -> int:
    """What was sharded, and on a device how its gradients travel."""
    return 1 + (device.type != "cpu" and world > 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shard_logs_on_rank_0(anywhere, rank, device, stage, caplog):
    with caplog.at_level(logging.INFO, "zero_ext"):
        model = zero_ext.shard(MLP(13), stage, mesh=anywhere, bucket_mb=SMALL_BUCKET_MB)
    told = [r for r in caplog.records if r.name.split(".")[0] == "zero_ext"]
    world = 1 if anywhere is None else anywhere.get_group().size()
    lines = lines_of_a_start(device, world)
    assert len(told) == (lines if rank == 0 else 0)
    stats = model.stats()
    for record in told[:1]:
        line = record.getMessage()
        assert record.levelno == logging.INFO
        assert line.startswith("zero_ext [rank 0]: sharded MLP with ")
        for part in (
            f"stage {stage} over {world} ranks",
            f"{stats['units']} units",
            f"{stats['bytes_held']} bytes per rank",
            f"{stats['neighbors']} local peers",
        ):
            assert part in line


@pytest.mark.parametrize(
    ("stage", "copies", "neighbors", "world", "shards", "reduction", "told"),
    [
        (3, False, 7, 16, 16, None, "a host with 8 of 16 ranks sends up to 4.3 times the bytes"),
        (3, True, 7, 16, 16, None, "a host with 8 of 16 ranks sends up to 2.4 times the bytes"),
        (1, False, 7, 16, 16, None, "a host with 8 of 16 ranks sends up to 2.4 times the bytes"),
        (2, False, 3, 12, 12, "exchange", "a host with 4 of 12 ranks sends up to 1.8 times"),
        (0, False, 1, 4, 4, "exchange", "a host with 2 of 4 ranks sends up to 2.7 times"),
        (2, False, 7, 16, 16, "collective", None),
        (2, False, 7, 16, 8, None, None),  # replicas
        (2, False, 7, 8, 8, None, None),
        (2, False, 0, 8, 8, None, None),
    ],
)
def test_exchange_between_hosts_is_told(
    stage, copies, neighbors, world, shards, reduction, told, caplog
):
    """Of a handle as it is on several hosts."""
    handle = SimpleNamespace(
        groups=SimpleNamespace(
            rank=0,
            where="zero_ext [rank 0]: ",
            world=world,
            shards=shards,
            device=torch.device("cpu"),
        ),
        options=SimpleNamespace(stage=stage, reduction=reduction, host_copies=copies),
        engine=SimpleNamespace(stats=lambda: {"units": 1, "bytes_held": 8, "neighbors": neighbors}),
    )
    with caplog.at_level(logging.INFO, "zero_ext"):
        sharding._log_sharded(handle, nn.Linear(3, 5))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 + (told is not None)
    assert told is None or lines[1].startswith(f"zero_ext [rank 0]: {told}")


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("", "gradients are read in place by the other ranks' devices"),
        ("the ranks are on several hosts", "gradients are sent: the ranks are on several hosts"),
    ],
)
def test_how_gradients_of_a_device_travel_is_told(why, told, caplog):
    """Of a handle as it is on two GPUs of a host."""
    device = torch.device("cuda", 0)
    handle = SimpleNamespace(
        groups=SimpleNamespace(rank=0, where="zero_ext: ", world=2, shards=2, device=device),
        options=SimpleNamespace(stage=2, reduction=None),
        engine=SimpleNamespace(
            stats=lambda: {"units": 1, "bytes_held": 8, "neighbors": 0}, why_sent=why
        ),
    )
    with caplog.at_level(logging.INFO, "zero_ext"):
        sharding._log_sharded(handle, nn.Linear(3, 5))
    assert caplog.records[1].getMessage() == f"zero_ext: {told}"


def test_the_rest_is_debug(anywhere, rank, device, path, caplog):
    model = MLP(13)
    model.layers[0].weight.requires_grad_(False)
    with caplog.at_level(logging.DEBUG, "zero_ext"):
        zero_ext.shard(model, 2, mesh=anywhere, bucket_mb=SMALL_BUCKET_MB)
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
        model.layers[0].weight.requires_grad_(True)
        mean_square(model, rank_data((4, 5), rank)).backward()
        optimizer.step()
        zero_ext.checkpoint.save(path, model, optimizer)
        zero_ext.checkpoint.load(path, model, optimizer)
        zero_ext.offload_states(model, ["grad"])
        zero_ext.reload_states(model)
    lines = [r for r in caplog.records if r.name.startswith("zero_ext.")]
    world = 1 if anywhere is None else anywhere.get_group().size()
    told = lines_of_a_start(device, world) if rank == 0 else 0
    assert [r.levelno for r in lines].count(logging.INFO) == told
    text = "\n".join(r.getMessage() for r in lines)
    for part in (
        "trainable unit 'layers.1.bias",
        f"parameters in {torch.float32}",
        "trained from now on: ['layers.0.weight']",
        f"writes checkpoint '{path}'",
        f"ended load() of checkpoint '{path}': ",
        "offloaded states: ['grad']",
        "offloaded states: none",
    ):
        assert part in text, part


class Whole(nn.Module):
    """Without a list of blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 13), nn.Linear(13, 7)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.dist
@pytest.mark.parametrize(
    "make, told",
    [
        (Whole, "one unit, that of the whole module, holds 100 % of the parameters"),
        (lambda: nn.Sequential(Whole(), nn.Linear(7, 3)), "one unit, '0', holds 88 % of the"),
        (lambda: nn.Sequential(*(nn.Linear(7, 7) for _ in range(3))), None),
        (lambda: nn.Linear(7, 1083), None),  # one module cannot be cut
    ],
)
def test_a_unit_with_most_of_the_parameters_is_named_once(mesh, rank, world, make, told, caplog):
    with caplog.at_level(logging.WARNING, "zero_ext"):
        zero_ext.shard(make(), 3, mesh=mesh, bucket_mb=1e-5)
        zero_ext.shard(make(), 2, mesh=mesh, bucket_mb=1e-5)  # keeps all of them anyway
        zero_ext.shard(make(), 3, mesh=mesh)  # fits one bucket
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("zero_ext.")]
    expected = told is not None and rank == 0 and world > 1
    assert len(lines) == expected
    if expected:
        assert lines[0].startswith(f"zero_ext [rank 0]: {told}")
        assert "zero_ext.shard(units=[BlockClass])" in lines[0]
