"""zero_ext.integrations.run: scripts that know nothing of zero_ext are sharded."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from setups import values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zero_ext
from zero_ext.engine.registry import find
from zero_ext.optim.sharded import Sharded

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytest.importorskip("pytorch_lightning")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from zero_ext.integrations import ddp  # noqa: E402
from zero_ext.integrations.accelerate import Accelerator  # noqa: E402
from zero_ext.integrations.lightning import ShardedStrategy, StrategyRegistry  # noqa: E402
from zero_ext.integrations.run import run  # noqa: E402
from zero_ext.integrations.transformers import ShardedTrainerMixin, Trainer  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [
    pytest.mark.host,  # the scripts choose the CPU
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


@pytest.fixture(autouse=True)
def as_it_was(anywhere, monkeypatch):
    """The libraries keep a state per process, and set environment variables."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.pop("ZERO_EXT_STAGE", None)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if anywhere is None and dist.is_initialized():
        dist.destroy_process_group()


def stock(script: str, flags: list[str]) -> dict:
    with mock.patch.object(sys, "argv", [script, *flags]):
        return runpy.run_path(script, run_name="__main__")


def whole(model: nn.Module) -> nn.Module:
    return getattr(model, "module", model)  # without DDP's wrapper


def optimizer_of(values: dict) -> object:
    return getattr(values["optimizer"], "optimizer", values["optimizer"])


@pytest.mark.parametrize(
    "name, stage, flags",
    [
        ("accelerate", 3, ["--steps", "3"]),
        ("accelerate", 2, []),
        ("trainer", 3, ["--width", "32", "--max_steps", "4"]),
        ("trainer", 1, ["--max_steps", "2", "--lr_scheduler_type", "cosine"]),
        ("lightning", 3, ["--strategy", "ddp"]),
        ("lightning", 2, ["--strategy", "ddp_find_unused_parameters_true"]),
        ("lightning", 1, ["--strategy", "zero_ext_stage_1"]),
        ("fabric", 2, ["--strategy", "ddp"]),
    ],
)
def test_an_unedited_script_is_sharded(anywhere, world, tmp_path, monkeypatch, name, stage, flags):
    ranks = 1 if anywhere is None else world
    script = str(SCRIPTS / f"with_{name}.py")
    usual = list(flags)
    if name in ("lightning", "fabric"):
        flags += ["--devices", str(ranks)]
        usual = ["--devices", str(ranks)]
    elif name == "trainer":
        flags += f"--output_dir {tmp_path} --use_cpu --save_strategy no --report_to none".split()
        usual = flags
    plain = stock(script, usual)
    if "--strategy" in flags and stage == 1:
        monkeypatch.setenv("ZERO_EXT_STAGE", "3")  # the script's own choice wins
        ours = run([script, *flags])
    else:
        ours = run(["--stage", str(stage), script, *flags])

    model = ours["model"]
    assert find(next(model.parameters())) is not None
    assert type(model).__name__ == type(whole(plain["model"])).__name__  # not wrapped
    assert type(optimizer_of(ours)) is zero_ext.optim.AdamW
    expected = zero_ext.estimate_memory(whole(plain["model"]), ranks, stage)
    for kind in ("full", "shard", "master", "grad", "optimizer_state"):
        assert model.stats()[f"bytes_{kind}"] == expected[kind], kind
    if ranks > 1:  # and DDP holds all of it
        elements = sum(p.numel() for p in whole(plain["model"]).parameters())
        assert model.stats()["bytes_optimizer_state"] < 8 * elements / ranks * 1.02
    assert len(ours["losses"]) == len(plain["losses"]) >= 2
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)

    again = stock(script, usual)  # nothing is left behind
    assert again["losses"] == plain["losses"]
    assert type(optimizer_of(again)) is type(optimizer_of(plain)) is not zero_ext.optim.AdamW


def test_subclasses_are_sharded_and_keep_their_methods(anywhere, tmp_path):
    module = tmp_path / "makes_subclasses.py"
    module.write_text(
        "import accelerate, inspect, sys, transformers\n"
        "class Own(accelerate.Accelerator):\n"
        "    def __init__(self, name, **kwargs):\n"
        "        super().__init__(cpu=True, **kwargs)\n"
        "        self.own = name\n"
        "    def unwrap_model(self, model):\n"
        "        return super().unwrap_model(model)\n"
        "made = [Own('a'), Own('b'), accelerate.Accelerator(cpu=True)]\n"
        "arguments = transformers.Seq2SeqTrainingArguments(sys.argv[1], use_cpu=True)\n"
        "model = transformers.T5ForConditionalGeneration(transformers.T5Config(\n"
        "    vocab_size=7, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))\n"
        "made.append(transformers.Seq2SeqTrainer(model, arguments))\n"
        "names = [*inspect.signature(Own).parameters]\n"
    )
    with mock.patch.object(sys, "path", [str(tmp_path), *sys.path]):
        values = run(["-m", "makes_subclasses", str(tmp_path / "out")])
    first, second, third, trainer = values["made"]
    assert type(first) is type(second) and issubclass(type(first), (Accelerator, values["Own"]))
    assert type(first).__name__ == "Own" and [first.own, second.own] == ["a", "b"]
    assert type(third) is Accelerator and values["names"] == ["name", "kwargs"]
    assert isinstance(trainer, ShardedTrainerMixin)
    assert isinstance(trainer, transformers.Seq2SeqTrainer)
    assert isinstance(trainer.accelerator, Accelerator)
    assert type(accelerate.Accelerator(cpu=True)) is accelerate.Accelerator


def test_a_stage_from_outside_is_checked_by_name(anywhere, monkeypatch, tmp_path, capsys):
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    make = {
        "accelerate": lambda **kwargs: Accelerator(cpu=True, **kwargs)._sharding["stage"],
        "transformers": lambda **kwargs: Trainer(
            nn.Linear(7, 3), arguments, **kwargs
        ).accelerator._sharding["stage"],
        "lightning": lambda **kwargs: ShardedStrategy(**kwargs)._sharding["stage"],
    }
    for name, made in make.items():
        monkeypatch.delenv("ZERO_EXT_STAGE", raising=False)
        assert made() == 2, name
        monkeypatch.setenv("ZERO_EXT_STAGE", "3")
        assert [made(), made(stage=None), made(stage=1)] == [3, 3, 1], name
        for wrong in ("4", "two", "", "-1"):
            monkeypatch.setenv("ZERO_EXT_STAGE", wrong)
            with pytest.raises(ValueError, match=f"ZERO_EXT_STAGE='{wrong}' is none of the stages"):
                made()
            assert made(stage=1) == 1
    script = str(SCRIPTS / "with_accelerate.py")
    with pytest.raises(ValueError, match="ZERO_EXT_STAGE='-1' is none of the stages"):
        run([script])
    with pytest.raises(SystemExit):
        run(["--stage", "4", script])
    assert "argument --stage: invalid choice: '4'" in capsys.readouterr().err
    monkeypatch.setenv("ZERO_EXT_STAGE", "1")
    stages = [StrategyRegistry.get(f"zero_ext_stage_{n}")._sharding["stage"] for n in range(4)]
    assert stages == [0, 1, 2, 3]
    assert StrategyRegistry.get("zero_ext")._sharding["stage"] == 1


def test_a_script_for_which_nothing_was_sharded_is_named(anywhere, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("import sys\nimport accelerate\nflags = sys.argv[1:]\n")
    with pytest.warns(
        UserWarning,
        match=r"plain\.py' has made no Distrib.*no Accelerator.*zero_ext\.shard\(\)",
    ):
        assert run([str(script), "--stage", "x"])["flags"] == ["--stage", "x"]


@pytest.mark.slow
def test_lightning_starts_the_other_ranks_sharded_as_well(tmp_path):
    """``python -m``, and the libraries imported by the script alone."""
    command = [sys.executable, "-m", "zero_ext.integrations.run", "--stage", "3"]
    outer = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "LOCAL_", "GROUP_", "ROLE_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    environment.pop("PYTHONUNBUFFERED", None)  # it would write a line in pieces
    output = []
    for start in (command, [sys.executable]):
        run = subprocess.run(
            [*start, SCRIPTS / "with_lightning.py"],
            cwd=tmp_path,
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert run.returncode == 0, run.stderr
        output.append([line for line in run.stdout.splitlines() if line.startswith("losses")])
    assert len(output[0]) == 2 and len({*output[0]}) == 1
    values = [[float(v) for v in lines[0][8:-1].split(",")] for lines in output]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


@pytest.fixture
def process_group(anywhere):
    """As_it_was ends that of one rank."""
    if anywhere is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("gan", 1),
        ("gan", 3),
        ("language_model", 2),
        ("language_model", 3),
        ("rnn", 2),
        ("rnn", 3),
        ("vae", 1),
        ("vae", 3),
    ],
)
def test_a_script_with_ddp_is_sharded(process_group, name, stage):
    script = str(SCRIPTS / f"ddp_{name}.py")
    plain, ours = stock(script, []), run(["--stage", str(stage), script])
    assert len(plain["losses"]) == len(ours["losses"]) >= 6
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    model, optimizer = ours["model"], ours["optimizer"]
    assert isinstance(model, DistributedDataParallel)
    assert [*model.state_dict()] == [*plain["model"].state_dict()]
    assert isinstance(optimizer, type(plain["optimizer"])) and isinstance(optimizer, Sharded)
    assert zero_ext.stats(model.module)["reductions"] > 0
    again = stock(script, [])  # nothing is left behind
    assert again["losses"] == plain["losses"] and not isinstance(again["optimizer"], Sharded)


@pytest.mark.skipif(os.environ.get("ZERO_EXT_CROSS_MEMORY") == "0", reason="as on two hosts")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_script_with_ddp_saves_and_resumes(process_group, rank, path, stage):
    """On rank 0 alone, which reads the other ranks' values."""
    script = str(SCRIPTS / "ddp_language_model.py")
    path.mkdir(parents=True, exist_ok=True)
    ours = run(["--stage", str(stage), script, "--out", str(path)])
    file = str(path / "ckpt.pt")
    saved = torch.load(file)["model"]
    values = values_of(ours["raw_model"])
    assert [*saved] == [*dict(ours["raw_model"].state_dict())]
    for name, value in saved.items():
        assert type(value) is torch.Tensor
        if name in values:
            assert torch.equal(value, values[name]), name
    assert saved["wte.weight"].data_ptr() == saved["lm_head.weight"].data_ptr()
    if rank == 0:
        assert torch.equal(ours["sampled"], stock(script, ["--resume", file])["sampled"])
    else:
        stock(script, ["--resume", file])


RESUMES = """
import argparse
import torch, torch.distributed as dist
import torch.distributed.checkpoint.state_dict as whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--before", action="store_true")
parser.add_argument("--names", action="store_true")
parser.add_argument("--sliced", action="store_true")
parser.add_argument("--resume")
parser.add_argument("--out")
flags = parser.parse_args()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(13, 37), nn.GELU(), nn.Linear(37, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1) if flags.before else None
model = DDP(net)
if optimizer is None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
sliced = flags.sliced
options = whole.StateDictOptions(full_state_dict=not sliced, cpu_offload=not sliced)
if flags.resume:
    saved = torch.load(flags.resume)
    net.load_state_dict(saved["model"])
    if flags.names:
        whole.set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)
    else:
        optimizer.load_state_dict(saved["optimizer"])
losses = []
for step in range(3):
    x = torch.linspace(-1, dist.get_rank() + step + 1, 26).view(2, 13)
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    losses.append(loss.item())
if flags.names:
    state = whole.get_optimizer_state_dict(model, optimizer, options=options)
if flags.out and dist.get_rank() == 0:
    if not flags.names:
        state = optimizer.state_dict()
    torch.save({"model": net.state_dict(), "optimizer": state}, flags.out)
checked = hasattr(torch.save, "__wrapped__")
dist.barrier()
"""


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.skipif(os.environ.get("ZERO_EXT_CROSS_MEMORY") == "0", reason="as on two hosts")
def test_an_optimizers_state_is_saved_and_resumed(process_group, rank, world, path, stage):
    """By names on every rank, as torch's own function returns it. As it is on rank 0 alone, which
    reads the other ranks' parts of it, by numbers or names. Without them nothing is written."""
    path.mkdir(parents=True, exist_ok=True)
    script, file = path / "resumes.py", str(path / "ckpt.pt")
    if rank == 0:
        script.write_text(RESUMES)
    dist.barrier()
    command = ["--stage", str(stage), str(script)]
    stock(str(script), ["--out", file])
    expected = stock(str(script), ["--resume", file])["losses"]
    for flags in ([], ["--before"]):
        assert run([*command, *flags, "--resume", file])["losses"] == pytest.approx(
            expected, rel=1e-4
        )

    names = str(path / "names.pt")
    run([*command, "--names", "--out", names])
    by_names = ["--names", "--before", "--resume", names]
    for resumed in (stock(str(script), by_names), run([*command, *by_names])):
        assert resumed["losses"] == pytest.approx(expected, rel=1e-4)
    sliced = str(path / "sliced.pt")
    run([*command, "--names", "--sliced", "--out", sliced])
    of_one, of_all = torch.load(sliced)["optimizer"], torch.load(names)["optimizer"]
    torch.testing.assert_close(of_one["state"], of_all["state"], rtol=0, atol=0)

    alone = str(path / "alone.pt")
    ours = run([*command, "--out", alone])
    whole, by_ddp = torch.load(alone)["optimizer"], torch.load(file)["optimizer"]
    assert whole["param_groups"] == by_ddp["param_groups"]
    # DDP adds the ranks' gradients in another order.
    torch.testing.assert_close(whole["state"], by_ddp["state"], rtol=1e-3, atol=1e-5)
    for number, p in enumerate(ours["net"].parameters()):
        expected_state = zero_ext.full_state(ours["optimizer"], p, "exp_avg")
        assert torch.equal(whole["state"][number]["exp_avg"], expected_state)
    for resumed in (stock(str(script), ["--resume", alone]), run([*command, "--resume", alone])):
        assert resumed["losses"] == pytest.approx(expected, rel=1e-4)

    before = Path(file).read_bytes()
    assert ours["checked"] and not stock(str(script), [])["checked"]
    if stage == 0 or world == 1:  # this rank has all
        return
    state = {"model": ours["net"].state_dict(), "optimizer": ours["optimizer"].state_dict()}
    with pytest.raises(ValueError, match=r"\['optimizer'\]\['state'\]\[0\]\['exp_avg'\]. On every"):
        ddp.checked_save(torch.save)(state, file)  # the script has ended, and nothing is shared
    assert Path(file).read_bytes() == before


AVERAGES = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(13, 37), nn.GELU(), nn.Linear(37, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
average = AveragedModel(model)
for step in range(3):
    x = torch.linspace(-1, dist.get_rank() + step + 1, 26).view(2, 13)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
result = average(torch.ones(2, 13))
"""
TRAINS_A_COPY = """
import copy, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

plain = nn.Linear(3, 5)
model = DDP(plain)
copied = copy.deepcopy(copy.deepcopy(model))
copy.copy(model)(torch.ones(2, 3)).sum().backward()
error = None
try:
    copied(torch.ones(2, 3)).sum().backward()
except RuntimeError as caught:
    error = str(caught)
again = DDP(copy.deepcopy(model.module))
again(torch.ones(2, 3)).sum().backward()
"""


def test_weights_of_a_ddp_model_are_averaged(process_group, tmp_path):
    """torch copies the model for it."""
    script = tmp_path / "averages.py"
    script.write_text(AVERAGES)
    expected = stock(str(script), [])["result"]
    found = run(["--stage", "2", str(script)])["result"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_ddp_model_is_not_trained_apart(process_group, tmp_path):
    script = tmp_path / "trains.py"
    script.write_text(TRAINS_A_COPY)
    assert "through a copy of a DistributedDataParallel" in run([str(script)])["error"]


GOES_BACK = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

kind, first, second = sys.argv[1:]
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(13, 37), nn.GELU(), nn.Linear(37, 3)))
optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.linspace(-1, dist.get_rank() + step + 1, 26).view(2, 13)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 and dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), first)
dist.barrier()
for _ in range(2):
    optimizer.load_state_dict(torch.load(first))
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), second)
dist.barrier()
"""


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
@pytest.mark.skipif(os.environ.get("ZERO_EXT_CROSS_MEMORY") == "0", reason="as on two hosts")
def test_a_state_that_was_loaded_is_saved_by_one_rank(process_group, rank, path, kind):
    path.mkdir(parents=True, exist_ok=True)
    script, files = path / "goes_back.py", [str(path / "first.pt"), str(path / "second.pt")]
    if rank == 0:
        script.write_text(GOES_BACK)
    dist.barrier()
    run(["--stage", "2", str(script), kind, *files])
    first, second = map(torch.load, files)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize(
    "wrapped", ["DDP(torch.compile(net, **eager))", "torch.compile(DDP(net), **eager)"]
)
def test_compiled_modules(process_group, rank, tmp_path, wrapped):
    script = tmp_path / "compiles.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "eager = {'backend': 'aot_eager'}\n"
        "torch.manual_seed(0)\n"
        "net = nn.Sequential(nn.Linear(13, 7), nn.GELU(), nn.Linear(7, 3))\n"
        "optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)\n"
        f"model = {wrapped}\n"
        f"x = torch.linspace(-1, {rank + 1}, 26).view(2, 13)\n"
        "for _ in range(3):\n"
        "    loss = model(x).square().sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "state = net.state_dict()\n"
    )
    plain, ours = stock(str(script), []), run(["--stage", "3", str(script)])
    assert ours["loss"].item() == pytest.approx(plain["loss"].item(), rel=1e-4)
    assert [*ours["state"]] == [*plain["state"]]
    for name, value in plain["state"].items():
        torch.testing.assert_close(ours["state"][name], value, rtol=1e-4, atol=1e-5)


def test_an_optimizer_waits_for_its_own_model(process_group, tmp_path):
    """It was made before another model's forward."""
    script = tmp_path / "two.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "models = [nn.Linear(3, 5), nn.Linear(3, 5)]\n"
        "made = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]\n"
        "kinds = []\n"
        "for k, model in enumerate(models):\n"
        "    DDP(model)(torch.ones(2, 3)).sum().backward()\n"
        "    made[k].step()\n"
        "    kinds.append([type(each) for each in made])\n"
    )
    (first, later), both = run([str(script)])["kinds"]
    assert issubclass(first, Sharded) and later is torch.optim.SGD
    assert all(issubclass(kind, Sharded) for kind in both)
    assert ddp._made == ddp._plain == []


def test_what_has_no_counterpart_is_an_error(process_group, tmp_path):
    module = tmp_path / "wraps.py"
    module.write_text(
        "import sys\n"
        "from torch import nn\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = DDP(nn.Linear(3, 5), **eval(sys.argv[1]))\n"
        "eval(sys.argv[2])\n"
    )
    for arguments, call, message in (
        ("{'mixed_precision': 1}", "0", r"DistributedDataParallel\(mixed_precision\)"),
        ("{'static_graph': True}", "model.register_comm_hook(None, print)", "register_comm_hook"),
        ("{}", "model.join()", "leave it out, and call"),
    ):
        with pytest.raises(ValueError, match=message):
            run([str(module), arguments, call])
    made = run(
        [
            "--stage=1",
            str(module),
            "{'process_group': __import__('torch').distributed.group.WORLD}",
            "0",
        ]
    )
    model = made["model"]
    assert model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    model.require_backward_grad_sync = False
    model(torch.ones(2, 3)).sum().backward()
    assert zero_ext.stats(model.module)["reductions"] == 0
    model.require_backward_grad_sync = True


def test_a_launcher_that_has_another_ones_command_names_this_module_once():
    from zero_ext.integrations.run import _running_this

    command = _running_this(_running_this(lambda: ["python", "train.py"]))
    assert command() == ["python", "-m", "zero_ext.integrations.run", "train.py"]
