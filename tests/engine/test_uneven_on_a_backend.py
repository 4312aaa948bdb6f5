"""Ranks that run different numbers of backwards where a device's own backend has the messages."""

import os

import pytest
from harness import MLP, mean_square, rank_data

import zero_ext

pytestmark = [
    pytest.mark.dist,
    pytest.mark.world(2),
    # NCCL's watchdog ends the process.
    pytest.mark.skipif(
        "lccl" not in os.environ.get("ZERO_EXT_TEST_BACKENDS", ""),
        reason="of the emulated device's backend",
    ),
]


@pytest.mark.parametrize("counts", [(2, 1), (0, 2), (1, 2)], ids=str)
def test_the_log_names_the_calls_that_wait_for_each_other(mesh, rank, counts, monkeypatch, capfd):
    """The backend's error has neither; on every rank it comes at its timeout."""
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "2")
    model = zero_ext.shard(MLP(), 2, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(RuntimeError, match=r"lccl \[rank .*imed out"):
        for k in range(counts[rank]):
            mean_square(model, rank_data((3, 5), rank, k)).backward()
        optimizer.step()
        optimizer.stats()
    said = capfd.readouterr().err
    assert f"zero_ext [rank {rank}" in said
    if counts[rank] == max(counts):
        assert "waited for its reduction in backward 2 for" in said
    else:
        assert "step() waited for the other ranks' step() for" in said
    assert "every rank must run every backward of a step, see docs/uneven_batches.md" in said
