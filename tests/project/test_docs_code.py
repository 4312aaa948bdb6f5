"""The code of README.md and docs/ runs as it stands there.

A block's language says how it is checked. `python` and `diff` (the code after the change) run here,
on all ranks in one process group. No language, `sh` or `bash`: a command line, whose syntax, make
targets, files and modules are checked. `text`: output and forms, not run.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from code_blocks import PAGES, ROOT, Block, blocks, make_batches, names, sections
from setups import fresh_accelerate
from torch import nn
from torch.nn import functional

import zero_ext
from zero_ext.optim.arguments import Sharding

SHELL = ("", "sh", "bash")
RUN = ("python", "diff")
SPHINX = re.compile(r"\{(eval-rst|literalinclude|toctree)\}")
WITH_CODE = [page for page in PAGES if any(block.language in RUN for block in blocks(page))]
COMMANDS = [block for page in PAGES for block in blocks(page) if block.language in SHELL]
INLINE = re.compile(r"`((?:make|python|torchrun) [^`\n]+)`")
FOLDERS = "benchmarks|docs|examples|kernels|scripts|tests"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def test_every_block_says_how_it_is_checked():
    known = (*RUN, *SHELL, "text", "py")  # py: a program of its own, see test_howto_launch.py
    found = [block for page in PAGES for block in blocks(page)]
    assert [
        b.place for b in found if b.language not in known and not SPHINX.match(b.language)
    ] == []


def test_command_lines_are_right():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)", makefile, re.M))
    targets = set(" ".join(targets).replace("\\\n", " ").split())
    patterns = tuple(re.findall(r"^([a-z][\w-]*-)%:", makefile, re.M))
    for block in COMMANDS:
        checked = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True)
        assert checked.returncode == 0, f"{block.place}: {checked.stderr}"
    lines = [(b.place, line) for b in COMMANDS for line in b.code.splitlines()]
    lines += [(page, line) for page in PAGES for line in INLINE.findall((ROOT / page).read_text())]
    assert len(lines) > 50
    for place, line in lines:
        code = line.partition("#")[0]
        for name in re.findall(r"^make ([a-z][\w-]*)", code):
            assert name in targets or name.startswith(patterns), f"{place}: make {name}"
        for path in re.findall(rf"(?:^|\s)((?:{FOLDERS})/[\w./-]+)", code):
            assert (ROOT / path).exists() or (ROOT / "csrc" / path).exists(), (place, path)
        for module in re.findall(r"-m (zero_ext[\w.]*)", code):
            assert importlib.util.find_spec(module), f"{place}: {module}"


def test_signatures_are_the_functions_own():
    """What stands after `*,` in the forms of reference.md, with its defaults."""
    forms = {
        re.match(r"[\w.]+", block.code)[0]: block.code
        for block in blocks(Path("docs/reference.md"))
        if block.language == "text" and block.code.startswith("zero_ext.")
    }
    shown = {name: keywords(form) for name, form in forms.items()}
    parameters = inspect.signature(zero_ext.shard).parameters.values()
    of_shard = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {k: repr(v) for k, v in of_shard.items()} == shown["zero_ext.shard"]
    assert set(get_type_hints(Sharding)) == set(shown["zero_ext.optim.AdamW"])


def keywords(form: str) -> dict[str, str]:
    arguments = form[form.index("*,") + 2 : form.index("\n)")]
    return {
        keyword.arg: ast.unparse(keyword.value)
        for keyword in ast.parse(f"f({arguments})", mode="eval").body.keywords
    }


@pytest.fixture
def reader(monkeypatch, shared_path, rank, world):
    """The folder in which the code runs; the process group is there already."""
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: None)
    for name, value in {"RANK": rank, "SIZE": world, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    if rank == 0:
        (shared_path / "ds_config.json").write_text(
            json.dumps({"train_micro_batch_size_per_gpu": 5, "optimizer": {"type": "AdamW"}})
        )
    monkeypatch.chdir(shared_path)
    dist.barrier()
    yield shared_path
    fresh_accelerate()


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", WITH_CODE, ids=str)
def test_the_code_of_a_page_runs(page, reader, rank, world):
    for section in sections(page, *RUN):
        heading = section[0].heading
        if heading in CUT_OFF:
            with pytest.raises(CutOffError), cut_off(*CUT_OFF[heading]):
                run_section(section, heading, rank, world, reader)
        given = run_section(section, heading, rank, world, reader)
        CHECKS.get(heading, lambda given: None)(given)


def run_section(
    section: list[Block], heading: str, rank: int, world: int, reader: Path
) -> dict[str, Any]:
    given = names(section, rank, world, reader)
    given |= MORE_NAMES.get(heading, lambda given: {})(given)
    for block in section:
        run(block, given)
        dist.barrier()
    return given


class CutOffError(BaseException):
    """Ends a script as the loss of a rank does."""


@contextlib.contextmanager
def cut_off(module: str, name: str, method: str, calls: int) -> Iterator[None]:
    """The script ends after so many calls of a method."""
    kind = getattr(importlib.import_module(module), name)
    count, called = itertools.count(1), getattr(kind, method)

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = called(*args, **kwargs)
        if next(count) == calls:
            raise CutOffError
        return result

    with mock.patch.object(kind, method, counted):
        yield


def run(block: Block, given: dict[str, Any]) -> None:
    """Errors show the page and its line."""
    code = "\n" * (block.line - 1) + block.python
    try:
        exec(compile(code, str(ROOT / block.page), "exec"), given)
    except Exception as error:
        raise AssertionError(f"{block.place}: {error}") from error


Names = dict[str, Any]


def of_trainers(given: Names) -> Names:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments("out", use_cpu=True, report_to=[], max_steps=1)
    lightning = pytest.importorskip("pytorch_lightning")
    fabric = pytest.importorskip("lightning_fabric").Fabric
    data = [{"x": torch.zeros(13)}] * 4
    return {"args": arguments, "data": data, "Trainer": lightning.Trainer, "Fabric": fabric}


def a_language_model(given: Names) -> Names:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=24, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return {"model": zero_ext.shard(transformers.GPT2LMHeadModel(config), stage=3)}


def a_run(given: Names) -> Names:
    """That has stepped, and has a gradient."""
    model = zero_ext.shard(given["Model"](), stage=2)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in given["batches"]:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    scheduler = given["make_scheduler"](optimizer)
    p = model.head.weight
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "p": p} | {
        "value": torch.ones(p.shape)
    }


def an_engine(given: Names) -> Names:
    """A trainer in bf16, an engine with other weights, and a copy of what the engine imports."""
    path = ROOT / "zero_ext" / "state" / "receiving.py"
    specification = importlib.util.spec_from_file_location("receiving", path)
    sys.modules["receiving"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(sys.modules["receiving"])
    model = zero_ext.shard(given["Model"]().bfloat16(), stage=3)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-4)
    engine_model = given["Model"]().bfloat16()
    for p in engine_model.parameters():
        p.data.zero_()
    messages: list[bytes] = []
    return {
        "model": model, "optimizer": optimizer, "engine_model": engine_model,
        "messages": messages, "send": messages.append, "received": lambda: messages,
    }  # fmt: skip


def mpi_alone(given: Names) -> Names:
    for name in RANK_VARIABLES:
        os.environ.pop(name)
    return {}


def uneven(given: Names) -> Names:
    """Rank 0 has a batch more than the others."""
    model = zero_ext.shard(nn.Linear(13, 7), stage=2)
    x, y = given["batches"][0]
    batches = [(x, y), (x[:3], y[:3])][: 2 if dist.get_rank() == 0 else 1]
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    start = {"weight": zero_ext.full_tensor(model.weight), "bias": zero_ext.full_tensor(model.bias)}
    return {
        "model": model, "optimizer": optimizer, "batches": iter(batches), "steps": 2,
        "start": start, "itertools": itertools,
    }  # fmt: skip


def by_tokens(given: Names) -> Names:
    """Rank r has r micro-batches, and all of its batches in the last step."""
    batches = given["batches"]
    return {"steps": [batches[: dist.get_rank()], batches]}


def global_batches(given: Names) -> Names:
    """Of 53 samples: two steps, and the last micro-batch has one sample."""
    samples = [each for batch in make_batches(0, 11) for each in zip(*batch, strict=True)][:53]
    batches = zero_ext.data.GlobalBatches(samples, batch_size=4, micro_batches=12)
    return {"dataset": samples, "epochs": 2, "batches": batches}


def a_replay(given: Names) -> Names:
    given = given | a_run(given) | global_batches(given)
    loader = torch.utils.data.DataLoader(given["dataset"], batch_sampler=given["batches"])
    return given | {"loader": loader}


def a_logged_run(given: Names) -> Names:
    return a_run(given) | {"step": SimpleNamespace(number=0), "loss": torch.tensor(0.5)}


def of_transformers(given: Names) -> Names:
    transformers = pytest.importorskip("transformers")
    given = given | global_batches(given)

    class WithLoss(given["Model"]):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = super().forward(x)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    transformers.trainer_utils.set_seed(0)
    rows = [{"x": x, "labels": y} for x, y in given["dataset"]]
    return {"model": WithLoss(), "dataset": rows, "path": given["folder"] / "run", "epochs": 2}


def assert_undisturbed(given: Names) -> None:
    """The bits of a run that was not cut off."""
    assert given["newest"].name == "checkpoint-4"
    again = given["Trainer"](
        of_transformers(given)["model"],
        given["TrainingArguments"](given["folder"] / "again", **given["settings"]),
        train_dataset=given["dataset"],
        stage=2,
    )
    again.train()
    for p, q in zip(given["model"].parameters(), again.model.parameters(), strict=True):
        assert torch.equal(zero_ext.full_tensor(p), zero_ext.full_tensor(q))


def assert_bits_of_one_process(given: Names, micro_batches: int = 12, **settings: Any) -> None:
    alone = zero_ext.shard(given["Model"](), stage=1, mesh="alone")
    if "trainer" in given or "run" in given:
        run = given["trainer"].lightning_module.run if "trainer" in given else given["run"]
        assert run.source == "memory"  # of the script that was cut off
    settings = settings or {"lr": 1e-3, "max_grad_norm": 1.0}
    optimizer = zero_ext.optim.AdamW(alone.parameters(), **settings)
    count = micro_batches
    batches = zero_ext.data.GlobalBatches(given["dataset"], 4, count, num_replicas=1, rank=0)
    loader = torch.utils.data.DataLoader(given["dataset"], batch_sampler=batches)
    decay = 0.99 if "schedule" in given else 1.0
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    for epoch in range(2):
        batches.set_epoch(epoch)
        for step in batches.steps(loader, alone):
            for x, y in step:
                functional.cross_entropy(alone(x), y).backward()
            optimizer.step(divide_by=len(step))
            optimizer.zero_grad()
            schedule.step()
    for p, q in zip(given["model"].parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)


def assert_each_sample_counted_once(given: Names) -> None:
    plain = nn.Linear(13, 7)
    plain.load_state_dict(given["start"])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    first = [make_batches(r, 1)[0] for r in range(dist.get_world_size())]
    for parts in (first, [tuple(t[:3] for t in first[0])]):
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        optimizer.zero_grad()
        functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(zero_ext.full_tensor(given["model"].weight), plain.weight.data)


def assert_resumed(given: Names) -> None:
    assert given["first_step"] == 100
    saved, _ = zero_ext.checkpoint.read_whole("run/step-100")
    for name, p in given["model"].named_parameters():
        assert torch.equal(zero_ext.full_tensor(p), saved[name]), name


def assert_exported(given: Names) -> None:
    for name, p in given["model"].named_parameters():
        assert torch.equal(zero_ext.full_tensor(p), given["plain"].get_parameter(name)), name


def assert_adapted(given: Names) -> None:
    adapters = torch.load("adapters.pt")
    assert len(adapters) == 6
    assert all(torch.count_nonzero(value) for value in adapters.values())
    base, before = given["model"].layers[1].linear.base.weight, given["Model"]().layers[1].linear
    assert torch.equal(zero_ext.full_tensor(base), before.weight)


def assert_handed_over(given: Names) -> None:
    changes = [pickle.loads(message) for message in given["messages"]]
    assert [*map(type, changes)] == [tuple] * len(changes)
    assert bool(changes) == (dist.get_rank() == 0)
    trained = {name: value.clone() for name, value in zero_ext.iter_full_params(given["model"])}
    assert not torch.equal(trained["head.weight"], given["Model"]().head.weight.bfloat16())
    if changes:
        assert {indices is None for _, indices, *_ in changes} == {True, False}
        for name, p in given["engine_model"].named_parameters():
            assert torch.equal(p, trained[name]), name


def assert_sharpness_aware(given: Names) -> None:
    plain = given["Model"]()
    params = list(plain.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    ranks = [make_batches(r) for r in range(dist.get_world_size())]
    for parts in zip(*ranks, strict=True):
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        before = [p.detach().clone() for p in params]
        grads = torch.autograd.grad(functional.cross_entropy(plain(x), y), params)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        torch._foreach_add_([p.data for p in params], grads, alpha=0.05 / norm.item())
        optimizer.zero_grad()
        functional.cross_entropy(plain(x), y).backward()
        torch._foreach_copy_([p.data for p in params], before)
        optimizer.step()
    for p, q in zip(given["model"].parameters(), params, strict=True):
        torch.testing.assert_close(zero_ext.full_tensor(p), q.data)


def assert_translated(given: Names) -> None:
    here = (dist.get_rank(), dist.get_world_size(), dist.get_rank())
    assert [os.environ[name] for name in RANK_VARIABLES] == [str(number) for number in here]


def assert_unfrozen(given: Names) -> None:
    before = dict(given["Model"]().named_parameters())
    for name, p in given["model"].named_parameters():
        assert not torch.equal(zero_ext.full_tensor(p), before[name]), name


def assert_bytes_fall(given: Names) -> None:
    losses = [losses for losses, _ in given["runs"].values()]
    assert losses[2] == losses[3]
    assert losses[0] == pytest.approx(losses[3], abs=1e-4)
    assert losses[3][-1] < losses[3][0] - 0.1
    held = [held["bytes_held"] for _, held in given["runs"].values()]
    assert held == sorted(held, reverse=True) and len(set(held)) == 4
    assert "<svg" in Path("bytes.svg").read_text()


# What the code under a heading needs of the reader's script, and what it must have done.
MORE_NAMES: dict[str, Callable[[Names], Names]] = {
    "Accelerate": global_batches,
    "Accelerate, Transformers, Lightning": of_trainers,
    "Export to Hugging Face": a_language_model,
    "Resume with another number of ranks": a_run,
    "A missing last batch": uneven,
    "Fingerprints": a_logged_run,
    "Going on with other ranks": global_batches,
    "Hand weights to an inference engine": an_engine,
    "Faulty processors": a_replay,
    "Lightning": global_batches,
    "Losing and gaining ranks": global_batches,
    "The loop": global_batches,
    "Token budgets": by_tokens,
    "Whole values": a_run,
    "mpirun": mpi_alone,
    "transformers.Trainer": of_transformers,
}
# Scripts that are run twice: at first they end after so many calls of a method.
RUN_CLASS = ("zero_ext.elastic", "Run")
CUT_OFF: dict[str, tuple[str, str, str, int]] = {
    "Accelerate": (*RUN_CLASS, "keep", 3),
    "Lightning": (*RUN_CLASS, "keep", 3),
    "Losing and gaining ranks": (*RUN_CLASS, "keep", 2),
    "transformers.Trainer": ("transformers", "Trainer", "_maybe_log_save_evaluate", 5),
}
CHECKS: dict[str, Callable[[Names], None]] = {
    "Accelerate": functools.partial(assert_bits_of_one_process, micro_batches=6, lr=1e-2),
    "Lightning": functools.partial(assert_bits_of_one_process, micro_batches=6, lr=1e-2),
    "A script of one process": assert_bytes_fall,
    "Export to Hugging Face": assert_exported,
    "Freeze and unfreeze": assert_unfrozen,
    "Hand weights to an inference engine": assert_handed_over,
    "LoRA": assert_adapted,
    "Losing and gaining ranks": assert_bits_of_one_process,
    "The loop": assert_bits_of_one_process,
    "SAM": assert_sharpness_aware,
    "Resume with another number of ranks": assert_resumed,
    "A missing last batch": assert_each_sample_counted_once,
    "checkpoint": lambda given: given["saving"].result(),
    "mpirun": assert_translated,
    "transformers.Trainer": assert_undisturbed,
}
