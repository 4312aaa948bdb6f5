"""elastic.Run: what a training goes on with, on any ranks, and what it does not load."""

import contextlib
import errno
import os
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
from elastic_training import Training
from harness import assert_bits, gather_objects
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from zero_ext.elastic import Run
from zero_ext.elastic.copies import CopyFile, CopyName

KEPT, LATER = 3, 5


class LostError(Exception):
    """Ends a run as the loss of a rank does."""


def run_of(training: Training, folder, **settings) -> Run:
    return Run(
        training.model,
        training.optimizers,
        extra=training.extra,
        run_id="test",
        folder=folder,
        **settings,
    )


def train_and_lose(training: Training, folder, steps: int = KEPT, **settings) -> None:
    with contextlib.suppress(LostError), run_of(training, folder, **settings) as run:
        training.run(run, steps, lambda: None)
        raise LostError


def go_on(training: Training, folder, steps: int = LATER, **settings) -> tuple[str, str | None]:
    """The last fingerprint, and where the run went on from."""
    with run_of(training, folder, **settings) as run:
        source = run.source
        training.run(run, steps, lambda: None)
        return training.fingerprint(), source


def undisturbed(stage: int = 1, steps: int = LATER) -> str:
    training = Training(stage, 0, 1, mesh="alone")
    for _ in range(steps):
        training.step()
    return training.fingerprint()


class Averaging(Training):
    """Its fingerprint is that of the averages of weights."""

    def __init__(self, *where, **mesh):
        super().__init__(*where, **mesh)
        self.ema = zero_ext.EMA(self.model, 0.75)
        self.optimizers[-1].register_step_post_hook(lambda *_: self.ema.update())

    @property
    def extra(self) -> dict:
        return {**super().extra, "ema": self.ema}

    def fingerprint(self) -> str:
        with self.ema.swap():
            return super().fingerprint()


def copies_in(folder) -> list:
    return sorted(folder.glob("zero_ext-test/*.copy"))


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_goes_on_with_the_same_bits_in_another_stage(
    stage, group, mesh, rank, world, shared_path
):
    train_and_lose(Training(stage, rank, world, mesh=mesh), shared_path)
    later = Training(stage % 3 + 1, rank, world, mesh=mesh)
    assert go_on(later, shared_path) == (undisturbed(), "memory")
    assert not (shared_path / "zero_ext-test").exists()  # the run is finished


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_with_fewer_and_more_ranks(stage, group, mesh, rank, world, shared_path):
    train_and_lose(Training(stage, rank, world, mesh=mesh), shared_path, 2)
    some = dist.new_group(range(1, world))
    if rank > 0:  # rank 0 is lost
        kind = torch.get_default_device().type
        mesh_of_some = DeviceMesh.from_group(some, kind) if world > 2 else "alone"
        training = Training(stage, rank - 1, world - 1, mesh=mesh_of_some)
        train_and_lose(training, shared_path, KEPT)
    dist.barrier(group)
    found = go_on(Training(stage, rank, world, mesh=mesh), shared_path)
    assert found == (undisturbed(), "memory")


@pytest.mark.dist
@pytest.mark.parametrize("source", ["memory", "file"])
def test_averages_of_weights_go_on(source, group, mesh, rank, world, shared_path):
    """On other ranks, from the ranks' copies, and from a checkpoint."""
    saves = {"checkpoints": shared_path / "saved", "save_every": 1} if source == "file" else {}
    train_and_lose(Averaging(2, rank, world, mesh=mesh), shared_path, KEPT, **saves)
    dist.barrier(group)
    if source == "file":
        shutil.rmtree(shared_path / "zero_ext-test", ignore_errors=True)
        dist.barrier(group)
    later = Averaging(3, rank, world, mesh=mesh)
    with run_of(later, shared_path, **saves) as run:
        assert ("memory" in run.source) == (source == "memory")
        later.run(run, LATER, lambda: None)
        found = later.fingerprint()
    alone = Averaging(1, 0, 1, mesh="alone")
    for _ in range(LATER):
        alone.step()
    assert found == alone.fingerprint()


@pytest.mark.dist
@pytest.mark.parametrize("buddy", [True, False])
def test_the_loss_of_a_host(buddy, group, mesh, rank, world, shared_path):
    folder = shared_path / f"host{rank % 2}"
    folder.mkdir(exist_ok=True)
    dist.barrier(group)
    train_and_lose(Training(3, rank, world, mesh=mesh), folder, buddy=buddy)
    dist.barrier(group)
    if rank == 0:
        shutil.rmtree(shared_path / "host1/zero_ext-test")
    dist.barrier(group)
    training = Training(2, rank, world, mesh=mesh)
    found = go_on(training, folder, buddy=buddy)
    assert found == (undisturbed(), "memory" if buddy else None)


@pytest.mark.dist
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_bytes_of_copies(stage, hosts, group, mesh, rank, world, shared_path):
    """Counted, and computed beforehand: but for indices and pickled objects."""
    folder = shared_path / f"host{rank % hosts}"
    folder.mkdir(exist_ok=True)
    model = nn.Sequential(nn.Linear(57, 83), nn.BatchNorm1d(83), nn.Linear(83, 19)).bfloat16()
    model[0].weight.requires_grad_(False)
    expected = zero_ext.estimate_memory(model, world, stage, copies=hosts)["copies"]
    zero_ext.shard(model, stage, mesh=mesh)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    with Run(model, optimizer, run_id="test", folder=folder) as run:
        model(torch.randn(3, 57).bfloat16()).sum().backward()
        for _ in range(2):
            optimizer.step()
            run.keep()
        assert zero_ext.stats(run)["steps"] == 2
        held = zero_ext.stats(run)["bytes_copies"]
        if hosts == 1 or world % 2 == 0:  # else one rank keeps the copies of two others
            assert expected <= held <= expected + 2 * hosts * 3 * 4096


@pytest.mark.dist
def test_a_damaged_copy_of_one_rank_costs_one_step(group, mesh, rank, world, shared_path):
    train_and_lose(Training(2, rank, world, mesh=mesh), shared_path)
    dist.barrier(group)
    damaged = [f for f in copies_in(shared_path) if CopyName.of(f)[1::2] == (world - 1, KEPT % 2)]
    if rank == 0:
        [file] = damaged
        data = bytearray(file.read_bytes())
        data[200] ^= 1
        file.write_bytes(data)
    dist.barrier(group)
    told = pytest.warns(UserWarning, match="not those that were written")
    training = Training(2, rank, world, mesh=mesh)
    with told if rank == 0 else contextlib.nullcontext(), run_of(training, shared_path) as run:
        assert (run.step, run.source) == (KEPT - 1, "memory")
        training.run(run, LATER, lambda: None)
        assert training.fingerprint() == undisturbed()


@pytest.mark.dist
def test_copies_of_another_model_are_not_loaded(group, mesh, rank, world, shared_path):
    def small(features: int):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, features), nn.Linear(features, 3))
        zero_ext.shard(model, 2, mesh=mesh)
        return model, zero_ext.optim.SGD(model.parameters(), lr=0.1)

    settings = {"run_id": "test", "folder": shared_path}
    with contextlib.suppress(LostError), Run(*small(13), **settings) as run:
        run.keep()
        raise LostError
    dist.barrier(group)
    told = pytest.warns(UserWarning, match=r"of another model, '0\.bias' differs")
    with told if rank == 0 else contextlib.nullcontext(), Run(*small(5), **settings) as run:
        assert (run.step, run.source) == (0, None)
    with Run(*small(13), run_id="other", folder=shared_path) as run:
        assert run.source is None


@pytest.mark.dist
def test_sigterm_finishes_a_step_and_saves_a_checkpoint(group, mesh, rank, world, shared_path):
    settings = {"checkpoints": shared_path / "checkpoints", "save_every": 100}
    training = Training(2, rank, world, mesh=mesh)
    handler = signal.getsignal(signal.SIGTERM)

    def terminate() -> None:
        if rank == world - 1 and run.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with (
        pytest.raises(SystemExit) as ended,
        run_of(training, shared_path, **settings) as run,
    ):
        training.run(run, LATER, terminate)
    assert ended.value.code == 143 and set(gather_objects(run.step, group)) == {KEPT}
    assert signal.getsignal(signal.SIGTERM) is handler
    assert [path.name for path in settings["checkpoints"].iterdir()] == [f"step{KEPT}"]
    dist.barrier(group)
    if rank == 0:
        shutil.rmtree(shared_path / "zero_ext-test")
    dist.barrier(group)
    training = Training(3, rank, world, mesh=mesh)
    found = go_on(training, shared_path, **settings)
    assert found == (undisturbed(), str(settings["checkpoints"] / f"step{KEPT}"))


@pytest.mark.dist
def test_the_newer_of_copies_and_checkpoints_is_loaded(group, mesh, rank, world, shared_path):
    settings = {"checkpoints": shared_path / "checkpoints", "save_every": 2}
    train_and_lose(Training(2, rank, world, mesh=mesh), shared_path, KEPT, **settings)
    with run_of(Training(2, rank, world, mesh=mesh), shared_path, **settings) as run:
        assert (run.step, run.source) == (KEPT, "memory")
    dist.barrier(group)
    with run_of(Training(2, rank, world, mesh=mesh), shared_path, **settings) as run:
        assert (run.step, run.source) == (2, str(settings["checkpoints"] / "step2"))


@pytest.mark.dist
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_without_memory_tells_it_once_and_trains(
    hosts, group, mesh, rank, world, shared_path, monkeypatch
):
    folder = shared_path / f"host{rank % hosts}"
    folder.mkdir(exist_ok=True)
    dist.barrier(group)
    training = Training(2, rank, world, mesh=mesh)
    if rank == 1:

        def full(*arguments):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(CopyFile, "write", full)
    told = pytest.warns(UserWarning, match=r"no memory for a copy of step 1: .*No space")
    with told if rank == 1 else contextlib.nullcontext() as seen:
        train_and_lose(training, folder)
    assert rank != 1 or len(seen) == 1
    assert training.fingerprint() == undisturbed(steps=KEPT)
    monkeypatch.undo()
    dist.barrier(group)
    with run_of(Training(2, rank, world, mesh=mesh), folder) as run:
        assert run.source is None


class Counting(nn.Module):
    """Its buffer has another value on each rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.register_buffer("seen", torch.zeros(3))


@pytest.mark.dist
def test_each_rank_gets_its_own_values_back(group, mesh, rank, world, shared_path):
    def counting(**where):
        model = zero_ext.shard(Counting(), 2, **where)
        return model, zero_ext.optim.AdamW(model.parameters(), lr=0.1)

    settings = {"run_id": "test", "folder": shared_path}
    with (
        contextlib.suppress(LostError),
        Run(*(made := counting(mesh=mesh)), **settings) as run,
    ):
        made[0].seen.add_(rank + 1)
        run.keep()
        raise LostError
    again = counting(mesh=mesh)
    with contextlib.suppress(LostError), Run(*again, **settings):
        assert_bits(again[0].seen, torch.full((3,), rank + 1.0))
        raise LostError
    dist.barrier(group)
    if rank == 0:
        told = pytest.warns(UserWarning, match=r"rank 0's values .*'model\.seen'")
        with told, Run(*(alone := counting(mesh="alone")), **settings):
            assert_bits(alone[0].seen, torch.full((3,), 1.0))
    dist.barrier(group)


def test_arguments_without_sense_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    training = Training(1, 0, 1, mesh="alone")
    arguments = training.model, training.optimizers
    with pytest.raises(ValueError, match="is not None"):
        Run(*arguments, folder=tmp_path)
    for run_id in ("", "a/b", ".. "):
        with pytest.raises(ValueError, match="run's id"):
            Run(*arguments, run_id=run_id, folder=tmp_path)
    with pytest.raises(TypeError, match=r"extra\['count'\] is a int"):
        Run(*arguments, run_id="test", extra={"count": 3}, folder=tmp_path)
    with pytest.raises(ValueError, match="checkpoints and save_every together"):
        Run(*arguments, run_id="test", save_every=3, folder=tmp_path)
    with pytest.raises(ValueError, match="save_every must be at least 1"):
        Run(*arguments, run_id="test", checkpoints=tmp_path, save_every=0, folder=tmp_path)
    train_and_lose(training, tmp_path, 1)
    other = Run(*arguments, run_id="test", extra={"batches": training.batches}, folder=tmp_path)
    with pytest.raises(ValueError, match=r"extra=\['batches'\], .* \['batches', 'schedule'\]"):
        other.__enter__()
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.warns(UserWarning, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        Run(*arguments, folder=tmp_path)


def test_only_its_own_checkpoints_are_loaded(tmp_path):
    training = Training(1, 0, 1, mesh="alone")
    settings = {"checkpoints": tmp_path / "saved", "save_every": 2}
    train_and_lose(training, tmp_path, 2, **settings)
    shutil.rmtree(tmp_path / "zero_ext-test")
    zero_ext.checkpoint.save(tmp_path / "saved/best3000", training.model, training.optimizers)
    with run_of(Training(1, 0, 1, mesh="alone"), tmp_path, **settings) as run:
        assert (run.step, run.source) == (2, str(tmp_path / "saved/step2"))


def test_a_changed_number_of_micro_batches_is_an_error(tmp_path):
    train_and_lose(Training(1, 0, 1, mesh="alone"), tmp_path, 1)
    training = Training(1, 0, 1, mesh="alone")
    training.batches._of["micro_batches"] = 11
    with pytest.raises(ValueError, match=r"micro_batches=12, and .* micro_batches=11"):
        run_of(training, tmp_path).__enter__()
