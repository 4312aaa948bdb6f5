"""Ray Train starts workers again: ``make test-packages``. Skipped where it is not installed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_training import Training

import zero_ext

ray = pytest.importorskip("ray")
STEPS, LOST_AFTER = 9, 4


def train(config: dict[str, Any]) -> None:
    """On each worker. Rank 1 is killed once."""
    torch.set_num_threads(1)
    folder, rank = Path(config["folder"]), dist.get_rank()
    training = Training(2, rank, dist.get_world_size())

    def kept() -> None:
        if rank == 1 and run.step == LOST_AFTER and run.source is None:
            os.kill(os.getpid(), signal.SIGKILL)

    with zero_ext.elastic.Run(
        training.model, training.optimizers, extra=training.extra, run_id="ray", folder=folder
    ) as run:
        began = run.step
        training.run(run, STEPS, kept)
        (folder / f"{rank}.txt").write_text(f"{began} {run.source} {training.fingerprint()}")


@pytest.mark.timeout(300)
def test_a_worker_that_has_died(tmp_path, monkeypatch):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    alone = Training(3, 0, 1, mesh="alone")
    for _ in range(STEPS):
        alone.step()
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{here.parent / 'support'}")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(
            train,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()
    finally:
        ray.shutdown()
    for rank in range(2):
        told = (tmp_path / f"{rank}.txt").read_text()
        assert told == f"{LOST_AFTER} memory {alone.fingerprint()}"
