"""examples/gallery: what each program prints and trains, against plain PyTorch in one process."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from code_blocks import ROOT
from harness import assert_bits
from reference import fma
from setups import fresh_accelerate
from test_howto_launch import SCONTROL, environment
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DistributedSampler

import zero_ext

GALLERY = ROOT / "examples/gallery"
SRUN = """#!/bin/bash
shift
for id in 0 1; do SLURM_PROCID=$id SLURM_LOCALID=$id SLURM_NTASKS=2 "$@" || exit; done
"""
PYTHON = """#!/bin/bash
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK here, at $MASTER_ADDR:$MASTER_PORT: $*"
"""
ONE_RANK_DIES_ONCE = """
import os, sys
sys.path.insert(0, {gallery!r})
import resume, zero_ext
save = zero_ext.checkpoint.save
def save_and_die(path, *arguments, **more):
    save(path, *arguments, **more)
    once = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if once and os.environ["RANK"] == "1" and path.endswith("-8"):
        os._exit(1)
zero_ext.checkpoint.save = save_and_die
resume.main("run")
"""


class OneProcess:
    """A plain model. Gradients are added in the order of calls, with the fma of the ranks' sums."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: int):
        self.model, self.optimizer, self.world = model, optimizer, world
        self.sums: dict[nn.Parameter, Tensor] = {}

    def backward(self, loss: Tensor) -> float:
        params = [p for p in self.model.parameters() if p.requires_grad]
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            self.sums[p] = fma(1 / self.world, grad, self.sums.get(p, torch.zeros(p.shape)))
        return loss.item()

    def step(self) -> None:
        for p, total in self.sums.items():
            p.grad = total
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sums.clear()


def sgd(model: nn.Module, lr: float, world: int) -> OneProcess:
    return OneProcess(model, torch.optim.SGD(model.parameters(), lr=lr), world)


def alone(kind: type, model: nn.Module, world: int, **settings) -> OneProcess:
    """With this library's update, because torch's rounds differently."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return OneProcess(model, kind(trained, process_group="alone", **settings), world)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for name, p in plain.named_parameters():
        assert_bits(zero_ext.full_tensor(model.get_parameter(name)), p.detach(), name)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, GALLERY / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def program(request, monkeypatch, shared_path) -> ModuleType:
    """That of the test's name, in an empty folder; the process group is there already."""
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *args: None)
    monkeypatch.chdir(shared_path)
    return load(request.node.originalname.removeprefix("test_"))


@pytest.fixture
def printed(capsys, rank):
    """The numbers that the program has printed; rank 0 alone prints."""

    def numbers() -> list[float]:
        text = capsys.readouterr().out
        assert bool(text) == (rank == 0)
        return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]

    return numbers


def test_each_program_is_short_and_shown():
    page = (ROOT / "docs/gallery.md").read_text()
    for path in GALLERY.glob("*.*"):
        assert len(path.read_text().splitlines()) <= 60, path.name
        assert f"{{literalinclude}} ../examples/gallery/{path.name}\n" in page
        assert f"](../examples/gallery/{path.name})" in page


@pytest.mark.dist
@pytest.mark.host
def test_minimal(program, printed, rank, world):
    model = program.main()
    plain = sgd(program.make_model(), 1.0, world)
    losses = []
    for step in range(program.STEPS):
        for other in range(world):
            x, y = program.batch_of(step, other)
            losses.append(plain.backward(functional.cross_entropy(plain.model(x), y)))
        plain.step()
    assert_same(model, plain.model)
    if rank == 0:
        every_tenth = losses[::world][9::10]
        assert printed()[1::2] == [round(loss, 4) for loss in every_tenth]
        assert every_tenth[-1] < losses[0] / 2


@pytest.mark.dist
@pytest.mark.host
def test_vision(program, printed, rank, world):
    model = program.main()
    plain = sgd(program.make_model(), 0.1, world)
    images, classes = program.make_dataset().tensors
    for epoch in range(program.EPOCHS):
        samplers = [DistributedSampler(images, world, other) for other in range(world)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [torch.tensor([*s]).split(program.BATCH) for s in samplers]
        for batch in zip(*batches, strict=True):
            if len(batch[0]) < program.BATCH:
                continue
            for other, indices in enumerate(batch):
                logits = plain.model(images[indices])
                plain.backward(functional.cross_entropy(logits, classes[indices]))
                if other == 0:  # whose running statistics the other ranks' forwards begin with
                    statistics = [buffer.clone() for buffer in plain.model.buffers()]
            for buffer, value in zip(plain.model.buffers(), statistics, strict=True):
                buffer.copy_(value)
            plain.step()
    assert_same(model, plain.model)
    for name, buffer in plain.model.named_buffers():
        assert_bits(model.get_buffer(name), buffer, name)
    right = (plain.model.eval()(images).argmax(1) == classes).sum().item()
    if rank == 0:
        assert printed() == [right, len(classes)] and right > 150


@pytest.mark.dist
@pytest.mark.host
def test_gan(program, printed, rank, world):
    models = program.main()
    generator, discriminator = (
        alone(zero_ext.optim.Adam, model, world, lr=program.LR, betas=program.BETAS)
        for model in program.make_models()
    )
    for step in range(program.STEPS):
        draws = [program.draw(step, other) for other in range(world)]
        for real, noise in draws:
            fake = generator.model(noise).detach()
            loss = program.loss_of(discriminator.model(real), real=True)
            discriminator.backward(loss + program.loss_of(discriminator.model(fake), real=False))
        discriminator.step()
        fakes = [generator.model(noise) for _, noise in draws]
        for fake in fakes:
            generator.backward(program.loss_of(discriminator.model(fake), real=True))
        generator.step()
    assert_same(models[0], generator.model)
    assert_same(models[1], discriminator.model)
    if rank == 0:
        mean = [round(value, 3) for value in fakes[0].mean(0).tolist()]
        assert printed()[-3:] == [program.STEPS, *mean]


@pytest.mark.dist
@pytest.mark.host
def test_policy(program, printed, rank, world):
    model = program.main()
    plain = sgd(program.make_policy(), 1.0, world)
    for step in range(program.STEPS):
        sampled = [program.sample(plain.model, step, other) for other in range(world)]
        for each in sampled:
            plain.backward(program.loss_of(plain.model, *each))
        plain.step()
    assert_same(model, plain.model)
    if rank == 0:
        mean = sampled[0][2].mean().item()
        assert printed()[-2:] == [program.STEPS, round(mean, 3)] and mean > 0.9


@pytest.mark.dist
@pytest.mark.host
def test_token_budget(program, printed, rank, world):
    model = program.main()
    plain = program.make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    counts = set()
    for step in range(program.STEPS):
        ranks = [program.micro_batches(step, other) for other in range(world)]
        counts.add(len({len(batches) for batches in ranks}))
        tokens = sum(len(batch) for batches in ranks for batch in batches)
        for batches in ranks:
            losses = [program.loss_of(plain, batch) for batch in batches]
            (sum(losses) / tokens).backward()
            if batches is ranks[0]:
                own = sum(map(len, batches))
                mean = sum(loss.item() for loss in losses) / own
        optimizer.step()
        optimizer.zero_grad()
    assert max(counts) > 1, "ranks have had different numbers of micro-batches"
    for name, p in plain.named_parameters():  # torch divides before it adds: other roundings
        found = zero_ext.full_tensor(model.get_parameter(name))
        torch.testing.assert_close(found, p.detach(), rtol=0, atol=1e-5)
    if rank == 0:
        assert printed()[-3:] == [program.STEPS, pytest.approx(mean, abs=2e-4), own]
        assert mean < 0.5


@pytest.mark.dist
@pytest.mark.host
def test_adapters(program, printed, rank, world):
    model = program.main()
    plain = alone(zero_ext.optim.AdamW, program.make_model(), world, lr=3e-2)
    for step in range(program.STEPS):
        losses = [
            plain.backward(program.loss_of(plain.model, step, other)) for other in range(world)
        ]
        plain.step()
    assert_same(model, plain.model)  # the frozen weights, too
    if rank == 0:
        assert printed()[-2:] == [program.STEPS, round(losses[0], 4)] and losses[0] < 0.3
        for name, value in torch.load("adapters.pt").items():
            assert_bits(value, plain.model.get_parameter(name).detach(), name)


@pytest.mark.dist
@pytest.mark.host
def test_resume(program, printed, rank, world):
    program.main("run", steps=10)
    dist.barrier()
    model = program.main("run")
    plain = alone(zero_ext.optim.AdamW, program.make_model(), world, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(plain.optimizer, 20)
    for step in range(20):
        for other in range(world):
            x, y = program.batch_of(step, other)
            plain.backward(functional.cross_entropy(plain.model(x), y))
        plain.step()
        schedule.step()
    assert_same(model, plain.model)
    if rank == 0:
        assert printed() == [0, 10, 8, 20]


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.filterwarnings("ignore")
def test_trainer(printed, request, rank, world):
    pytest.importorskip("transformers")
    program = request.getfixturevalue("program")
    trainer = program.main()
    fresh_accelerate()
    plain = program.make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    batches = torch.stack([row["labels"] for row in program.make_dataset()]).split(4)
    losses = []
    for step in range(12):
        first = step * world % len(batches)
        for tokens in batches[first : first + world]:
            loss = plain(input_ids=tokens, labels=tokens).loss
            (loss / world).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in plain.named_parameters():  # the trainer's loss is a sum over a count of tokens
        found = zero_ext.full_tensor(trainer.model.get_parameter(name))
        torch.testing.assert_close(found, p.detach(), rtol=0, atol=1e-5)
    of_rank_0 = losses[::world]
    if rank == 0:
        mean = sum(of_rank_0) / len(of_rank_0)
        assert printed()[-3:] == [12, 0, pytest.approx(mean, abs=2e-4)]


def test_slurm_tells_each_task_its_rank(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "70001", "SLURM_CPUS_PER_TASK": "4"}
    variables["SLURM_JOB_NODELIST"] = "some[0-1]"
    command = ["bash", "-eu", GALLERY / "slurm.sbatch"]
    env = environment(tmp_path, **variables)
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    rest = "at 127.0.0.1:30001: examples/gallery/resume.py runs/resumed"
    assert done.stdout.splitlines() == [f"{rank} of 2, {rank} here, {rest}" for rank in range(2)]


@pytest.mark.slow
def test_torchrun_restarts_ranks_which_resume(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ONE_RANK_DIES_ONCE.format(gallery=str(GALLERY)))
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1".split()
    done = subprocess.run(
        [sys.executable, *torchrun, script],
        cwd=tmp_path,
        env=environment(tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "steps 8 to 20"
    assert zero_ext.checkpoint.latest(tmp_path / "run") == Path(tmp_path / "run" / "step-20")
