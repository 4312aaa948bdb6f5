"""zero_ext.checkpoint: saving and loading with other stages, ranks and dtypes; safetensors."""

import contextlib
import json
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import ADAMW, assert_equal, changed, made, train
from harness import (
    DTYPES,
    MLP,
    ONE_UNIT_EACH,
    Odd,
    Tied,
    assert_bits,
    mean_square,
    rank_data,
)
from setups import everything, train_batch, values_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import zero_ext
from zero_ext import checkpoint
from zero_ext.checkpoint import files as checkpoint_files
from zero_ext.engine.registry import find

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: zero_ext.full_tensor(p).cpu()
        for name, p in model.named_parameters()
        if find(p) is not None
    }


# Going on from it


@STAGES
@DTYPES
def test_training_goes_on_with_the_same_bits(anywhere, rank, path, stage, dtype):
    run = made(anywhere, stage, MLP(13, dtype=dtype))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run[1], 0.5)
    train(*run, rank, range(2))
    scheduler.step()
    checkpoint.save(path, *run, extra={"scheduler": scheduler.state_dict(), "step": 2})
    train(*run, rank, range(2, 4))

    again = made(anywhere, stage, changed(MLP(13, dtype=dtype)))
    other = torch.optim.lr_scheduler.ExponentialLR(again[1], 0.5)
    train(*again, rank, range(7, 8))
    extra = checkpoint.load(path, *again)
    other.load_state_dict(extra["scheduler"])
    assert extra["step"] == 2 and again[1].param_groups[0]["lr"] == ADAMW["lr"] / 2
    train(*again, rank, range(2, 4))
    assert_equal(again, run)


@pytest.mark.parametrize("optimizer", ["SGD", "amsgrad", "NAdam", "drop-in", "offload", "fp16"])
def test_whatever_the_optimizer_is(anywhere, rank, path, optimizer):
    def make(model):
        if optimizer == "SGD":
            return made(
                anywhere, 2, model, zero_ext.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0}
            )
        if optimizer == "amsgrad":
            return made(anywhere, 3, model, arguments={**ADAMW, "amsgrad": True})
        if optimizer == "NAdam":
            zero_ext.shard(model, 3, mesh=anywhere)
            return model, zero_ext.optim.wrap(torch.optim.NAdam, model.parameters(), lr=0.05)
        if optimizer == "drop-in":
            group = None if anywhere is None else anywhere.get_group()
            decayed = [p for p in model.parameters() if p.dim() > 1]
            others = [p for p in model.parameters() if p.dim() <= 1]
            groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.01}]
            return model, zero_ext.optim.AdamW(groups, process_group=group, **ADAMW)
        if optimizer == "offload":
            return made(anywhere, 3, model, offload_policy=CPUOffloadPolicy())
        scaler = zero_ext.LossScaler(init_scale=2.0**9, growth_interval=2)
        return made(anywhere, 2, model, arguments={**ADAMW, "loss_scaler": scaler})

    def step(model, optimizer, number):
        dtype = next(model.parameters()).dtype
        loss = mean_square(model, train_batch(rank, number, dtype=dtype))
        getattr(optimizer, "scale", lambda loss: loss)(loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    dtype = torch.float16 if optimizer == "fp16" else torch.bfloat16
    run = make(MLP(13, dtype=dtype))
    for number in range(3):
        step(*run, number)
    checkpoint.save(path, *run)
    again = make(changed(MLP(13, dtype=dtype)))
    if optimizer == "fp16":
        assert run[1].loss_scaler.get_scale() == 2.0**10  # grown meanwhile
    assert checkpoint.load(path, *again) == {}
    for number in range(3, 5):
        step(*run, number)
        step(*again, number)
    assert_equal(again, run)
    for mine, theirs in zip(again[1].param_groups, run[1].param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }
    if optimizer == "fp16":
        assert again[1].loss_scaler.state_dict() == run[1].loss_scaler.state_dict()


def with_two_optimizers(mesh, stage, model):
    """Of other kinds, by turns over the model's parameters."""
    zero_ext.shard(model, stage, mesh=mesh, bucket_mb=200 / 2**20)
    parameters = list(model.parameters())
    scaler = zero_ext.LossScaler(init_scale=2.0**9, growth_interval=2)
    first = zero_ext.optim.AdamW(parameters[::2], **ADAMW)
    second = zero_ext.optim.wrap(torch.optim.NAdam, parameters[1::2], lr=0.05, loss_scaler=scaler)
    return model, [first, second]


def step_both(model, optimizers, rank, steps) -> None:
    for number in steps:
        batch = train_batch(rank, number, dtype=next(model.parameters()).dtype)
        optimizers[1].scale(mean_square(model, batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("before, after", [(1, 1), (2, 3), (3, 3)])
def test_several_optimizers_of_one_model(anywhere, rank, path, before, after):
    model, optimizers = with_two_optimizers(anywhere, before, MLP(13, dtype=torch.bfloat16))
    step_both(model, optimizers, rank, range(3))
    checkpoint.save(path, model, optimizers)
    other, others = with_two_optimizers(anywhere, after, changed(MLP(13, dtype=torch.bfloat16)))
    checkpoint.load(path, other, iter(others))
    assert others[1].loss_scaler.state_dict() == optimizers[1].loss_scaler.state_dict()
    step_both(model, optimizers, rank, range(3, 5))
    step_both(other, others, rank, range(3, 5))
    for mine, theirs in zip(others, optimizers, strict=True):
        assert_equal((other, mine), (model, theirs))


def test_several_optimizers_that_do_not_fit_change_nothing(anywhere, rank, path):
    model, optimizers = with_two_optimizers(anywhere, 2, MLP(13))
    step_both(model, optimizers, rank, range(2))
    with pytest.raises(ValueError, match=r"two of the optimizers have 'layers\.0\.weight'"):
        checkpoint.save(path, model, [*optimizers, optimizers[0]])
    checkpoint.save(path, model, optimizers)

    other, others = with_two_optimizers(anywhere, 3, changed(MLP(13)))
    sgd = zero_ext.optim.wrap  # the second one's, of another kind: found when it is its turn
    parameters = others.pop().param_groups[0]["params"]
    others.append(sgd(torch.optim.Adadelta, parameters, lr=0.1))
    step = others[0].state[others[0].param_groups[0]["params"][0]]["step"]
    before = [value.clone() for value in everything(other, others[0])]
    for optimizer, message in (
        (others[0], "has the states of 2 optimizers, and is loaded into 1"),
        ([*others, others[0]], "is loaded into 3"),
        (others[::-1], "the optimizer's group 0 has other parameters"),
        (others, "lacks 'acc_delta', which Adadelta has"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.load(path, other, optimizer)
        for a, e in zip(everything(other, others[0]), before, strict=True):
            assert_bits(a, e)
        assert float(step) == 0


def barrier_of(mesh) -> None:
    if mesh is not None:
        dist.barrier(mesh.get_group())


class Everything(nn.Module):
    """What else a state_dict() may hold."""

    def __init__(self):
        super().__init__()
        self.odd = Odd()
        self.tied = Tied()
        self.norm = nn.BatchNorm1d(2)
        self.whole = nn.Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False)
        self.ignored = nn.Parameter(torch.ones(3))
        self.count = {"calls": 0}

    def forward(self, x):
        self.count["calls"] += 1
        tokens = torch.arange(4) % 11
        return self.norm(self.odd(x)).sum() + self.tied(tokens).sum() + self.ignored.sum()

    def get_extra_state(self):
        return dict(self.count)

    def set_extra_state(self, state):
        self.count = state


@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 2), (3, 3)])
def test_whatever_a_model_holds(anywhere, rank, path, saved, loaded):
    def make(stage, model):
        zero_ext.shard(model, stage, mesh=anywhere, ignored_params=[model.ignored])
        params = [p for p in model.parameters() if p.requires_grad and p is not model.ignored]
        return model, zero_ext.optim.AdamW(params, **ADAMW)

    run, again = make(saved, Everything()), make(loaded, changed(Everything()))
    for step in range(2):
        run[0](rank_data((4, 3, 4, 4), rank, step)).square().backward()
        run[1].step()
        run[1].zero_grad()
    checkpoint.save(path, *run)
    checkpoint.load(path, *again)
    mine, theirs = values_of(again[0]), values_of(run[0])
    for name in theirs:
        assert_bits(mine[name], theirs[name], name)
    if rank == 0:  # whose buffers they are
        for (name, mine), theirs in zip(again[0].named_buffers(), run[0].buffers(), strict=True):
            assert_bits(mine, theirs, name)
    assert again[0].count == {"calls": 2}
    assert again[0].tied.head.weight is again[0].tied.embedding.weight
    for p, q in zip(run[0].parameters(), again[0].parameters(), strict=True):
        for state in run[1].state.get(p, {}):
            expected = zero_ext.full_state(run[1], p, state)
            assert_bits(zero_ext.full_state(again[1], q, state), expected)


# Other numbers of ranks, other stages


@DTYPES
@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_goes_on_from_several_and_several_from_one(
    anywhere, on_one_rank, rank, path, stage, dtype
):
    """With other units; the average of gradients is then another, so that nothing is trained."""
    run = made(anywhere, stage, MLP(13, dtype=dtype))
    train(*run, rank, range(2))
    checkpoint.save(path, *run)
    alone = made(on_one_rank, 5 - stage, changed(MLP(13, dtype=dtype)), bucket_mb=25)
    checkpoint.load(path, *alone)
    assert_equal(alone, run)
    if rank == 0:
        checkpoint.save(path.with_name("alone"), *alone)
    if anywhere is not None:
        dist.barrier(anywhere.get_group())
    again = made(anywhere, stage, changed(MLP(13, dtype=dtype)), bucket_mb=ONE_UNIT_EACH)
    checkpoint.load(path.with_name("alone"), *again)
    assert_equal(again, run)


def test_half_precision_can_go_on_in_fp32_and_back(anywhere, rank, path):
    run = made(anywhere, 2, MLP(13, dtype=torch.bfloat16))
    train(*run, rank, range(2))
    checkpoint.save(path, *run)
    fp32, half = (made(anywhere, 3, changed(MLP(13, dtype=d))) for d in (None, torch.bfloat16))
    checkpoint.load(path, *fp32)
    expected = masters(run[0])
    for name, value in values_of(fp32[0]).items():
        assert_bits(value, expected[name], name)
    checkpoint.save(path, *fp32)
    checkpoint.load(path, *half)
    assert_equal(half, run)


@STAGES
def test_plain_torch_reads_it_and_it_reads_plain_torchs(anywhere, rank, path, stage):
    model, optimizer = made(anywhere, stage, MLP(13, dtype=torch.bfloat16))
    train(model, optimizer, rank, range(2))
    checkpoint.save(path, model)
    trained = values_of(model)
    state = {"model": changed(MLP(13, dtype=torch.bfloat16)).state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)
        for name, value in state["model"].items():
            assert_bits(value, trained[name], name)
        plain = changed(MLP(13))
        theirs = path.with_name(f"plain {rank}")  # each writes the same
        dcp.save({"model": plain.state_dict()}, checkpoint_id=theirs, no_dist=True)
    assert checkpoint.load(theirs, model) == {}
    for name, value in masters(model).items():
        assert_bits(value, plain.get_parameter(name), name)
    with pytest.raises(ValueError, match="has no optimizer's state"):
        checkpoint.load(theirs, model, optimizer)


def test_torch_reads_it_into_what_get_state_dict_gives(anywhere, rank, path):
    def in_groups(parameters, lr, **others):
        first, *rest = parameters
        return torch.optim.AdamW(
            [{"params": [first]}, {"params": rest, "lr": 3 * lr}], lr, **others
        )

    model = zero_ext.shard(MLP(13), 3, mesh=anywhere)
    optimizer = zero_ext.optim.adopt(in_groups(model.parameters(), 0.25, betas=(0.5, 0.75)))
    train(model, optimizer, rank, range(2))
    checkpoint.save(path, model, optimizer)
    plain = changed(MLP(13))
    theirs = in_groups(plain.parameters(), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = dict(zip(("model", "optimizer"), get_state_dict(plain, theirs), strict=True))
        dcp.load(state, checkpoint_id=path, no_dist=True)
        set_state_dict(
            plain, theirs, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    groups = theirs.param_groups
    assert [(g["lr"], g["betas"]) for g in groups] == [(0.25, (0.5, 0.75)), (0.75, (0.5, 0.75))]
    trained = values_of(model)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert_bits(p, trained[name], name)
        assert_bits(theirs.state[p]["exp_avg"], zero_ext.full_state(optimizer, q, "exp_avg"), name)


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.world(min=2)
@pytest.mark.usefixtures("no_stale_meshes")
def test_fsdp2_reads_it_and_it_reads_fsdp2s(mesh, rank, shared_path):
    model, optimizer = made(mesh, 3, MLP(13))
    train(model, optimizer, rank, range(2))
    checkpoint.save(shared_path / "ours", model, optimizer)
    theirs = changed(MLP(13))
    for module in (*theirs.layers, theirs):
        fully_shard(module, mesh=mesh)
    state = {"model": theirs.state_dict()}
    dcp.load(state, checkpoint_id=shared_path / "ours")
    trained = values_of(model)
    for name, value in state["model"].items():
        assert_bits(value.full_tensor(), trained[name], name)
    dcp.save({"model": changed(theirs).state_dict()}, checkpoint_id=shared_path / "theirs")
    checkpoint.load(shared_path / "theirs", model)
    expected = {name: p.full_tensor() for name, p in theirs.named_parameters()}
    for name, value in values_of(model).items():
        assert_bits(value, expected[name], name)

    # Its state and that of torch's optimizer, by our own functions.
    again = changed(MLP(13))
    for module in (*again.layers, again):
        fully_shard(module, mesh=mesh)
    runs = [(each, torch.optim.AdamW(each.parameters(), **ADAMW)) for each in (theirs, again)]
    train(*runs[0], rank, range(2))
    checkpoint.save(shared_path / "both", *runs[0])
    checkpoint.load(shared_path / "both", *runs[1])
    for run in runs:
        train(*run, rank, range(2, 4))
    for p, q in zip(theirs.parameters(), again.parameters(), strict=True):
        assert_bits(q.full_tensor(), p.full_tensor())


@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_user_wrote_is_in_it_also_what_is_gathered(anywhere, rank, path, stage):
    model, _ = made(anywhere, stage, MLP(13, dtype=torch.bfloat16))
    gathers = model.stats()["gathers"]
    checkpoint.save(path, model)
    assert model.stats()["gathers"] == gathers
    model.unshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    checkpoint.save(path, model)
    again, _ = made(anywhere, stage, MLP(13, dtype=torch.bfloat16))
    again.unshard()
    checkpoint.load(path, again)
    for parameter in again.parameters():
        assert_bits(parameter, torch.full_like(parameter, 0.5))
    for each in (model, again):
        each.reshard()
    for value in values_of(again).values():
        assert_bits(value, torch.full_like(value, 0.5))


def test_compiled_models_have_the_names_of_plain_ones(anywhere, rank, path):
    model = torch.compile(made(anywhere, 2, MLP(13))[0], backend="eager")
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    checkpoint.save(path, model)
    again, _ = made(anywhere, 2, changed(MLP(13)))
    checkpoint.load(path, again)
    for name, value in values_of(again).items():
        assert_bits(value, MLP(13).get_parameter(name), name)
    checkpoint.load(path, model)


# While training goes on


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_saved_meanwhile_is_what_there_was(anywhere, rank, path, stage):
    run = made(anywhere, stage, MLP(13, dtype=torch.bfloat16))
    train(*run, rank, range(1))
    expected = [value.clone() for value in everything(*run)]
    first = checkpoint.save(path, *run, async_=True)
    train(*run, rank, range(1, 3))
    later = [value.clone() for value in everything(*run)]
    second = checkpoint.save(path.with_name("second"), *run, async_=True)
    train(*run, rank, range(3, 4))
    checkpoint.save(path.with_name("third"), *run)  # after them
    assert first.done() and second.done()
    assert first.result() is None and second.result() is None
    again = made(anywhere, stage, changed(MLP(13, dtype=torch.bfloat16)))
    for name, values in (("checkpoint", expected), ("second", later), ("third", everything(*run))):
        checkpoint.load(path.with_name(name), *again)
        for a, e in zip(everything(*again), values, strict=True):
            assert_bits(a, e, name)


@pytest.mark.dist
@pytest.mark.world(min=3)
def test_some_ranks_save_meanwhile_whatever_groups_each_is_in(rank, world, shared_path):
    """torch names a group that only its members make by how many groups they know, and since 2.15
    a group of all ranks by how many groups each rank has made."""
    path = shared_path / "checkpoint"
    dist.new_group([0, world - 1])
    some = dist.new_group(list(range(world - 1)))
    if rank < world - 1:
        mesh = DeviceMesh.from_group(some, "cpu")
        run = made(mesh, 2, MLP(13))
        checkpoint.save(path, *run, async_=True).result()
        again = made(mesh, 2, changed(MLP(13)))
        checkpoint.load(path, *again)
        assert_equal(again, run)
    dist.barrier(dist.new_group())


# Errors


def some_folder(path):
    path.mkdir(parents=True, exist_ok=True)
    (path / "thesis.txt").write_text("years of work")


def test_something_else_is_not_replaced(anywhere, rank, path):
    model, _ = made(anywhere, 2, MLP())
    some_folder(path)
    with pytest.raises(ValueError, match="holds something else than a checkpoint"):
        checkpoint.save(path, model)
    with pytest.raises(ValueError, match="is a file; a checkpoint is a folder"):
        checkpoint.save(path / "thesis.txt", model)
    assert (path / "thesis.txt").read_text() == "years of work"


def test_what_a_link_names_is_replaced_and_the_link_stays(anywhere, rank, path):
    model, optimizer = made(anywhere, 2, MLP())
    link = path.with_name("latest")
    if anywhere is None or rank == 0:
        path.parent.mkdir(parents=True)
        link.symlink_to(path.name)
    if anywhere is not None:
        dist.barrier(anywhere.get_group())
    for count in range(3):
        checkpoint.save(link, model, optimizer, extra={"count": count})
        assert link.is_symlink() and checkpoint.load(path, model) == {"count": count}
    assert {each.name for each in path.parent.iterdir()} == {"checkpoint", "latest"}


@pytest.mark.parametrize("async_", [False, True])
def test_a_save_that_fails_on_one_rank_leaves_the_old_one(
    anywhere, rank, path, monkeypatch, async_
):
    run = made(anywhere, 2, MLP(13))
    checkpoint.save(path, *run, extra={"which": "old"})
    train(*run, rank, range(1))

    def fails(*args):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        if rank == 0 if anywhere is None else rank == anywhere.size() - 1:
            patch.setattr(checkpoint_files.DigestingWriter, "write_data", fails)
        message = r"rank \d: OSError: No space left on device"
        told = pytest.warns(UserWarning, match=message) if async_ else contextlib.nullcontext()
        with told, pytest.raises(RuntimeError, match=message):
            saving = checkpoint.save(path, *run, async_=async_)
            saving.result()
        if anywhere is not None:
            dist.barrier(anywhere.get_group())
        assert [each.name for each in path.parent.iterdir()] == ["checkpoint"]
    again = made(anywhere, 2, changed(MLP(13)))
    assert checkpoint.load(path, *again) == {"which": "old"}
    for name, value in values_of(again[0]).items():
        assert_bits(value, MLP(13).get_parameter(name), name)
    checkpoint.save(path, *run, extra={"which": "new"})
    assert checkpoint.load(path, *again) == {"which": "new"}
    assert_equal(again, run)
    assert [each.name for each in path.parent.iterdir()] == ["checkpoint"]


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("patience", ["of a file system", "of the other ranks"])
def test_a_folder_that_the_ranks_do_not_share_is_found_out(
    rank, shared_path, monkeypatch, patience
):
    timeout_s = 60
    if patience == "of a file system":
        monkeypatch.setattr(checkpoint_files, "_VISIBLE_WITHIN_S", 0.3)
    else:  # they would not hear of it, if it took longer than they wait
        timeout_s = 3
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    model, _ = made(DeviceMesh.from_group(group, "cpu"), 2, MLP(13))
    path = shared_path / f"host {rank}" / "checkpoint"
    with pytest.raises(RuntimeError, match="Save to a folder that all ranks share"):
        checkpoint.save(path, model)
    assert not path.exists()


class Wider(MLP):
    def __init__(self):
        super().__init__(13)
        self.layers[1] = nn.Linear(13, 14)
        self.layers[2] = nn.Linear(14, 5)


class Longer(MLP):
    def __init__(self):
        super().__init__(13)
        self.more = nn.Linear(2, 2)


def in_two_groups(params, **kwargs):
    first, *others = params
    return zero_ext.optim.AdamW([{"params": [first]}, {"params": others}], **kwargs)


def all_but_one(params, **kwargs):
    return zero_ext.optim.AdamW(list(params)[1:], **kwargs)


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (Wider, None, r"'layers.1.weight' has shape \(14, 13\) in the model, and \(13, 13\)"),
        (Longer, None, "lacks 'more.bias', 'more.weight'.*strict=False"),
        (lambda: MLP(13, layers=2), None, "has, but the model lacks, 'layers.2.bias'"),
        (MLP, in_two_groups, "the optimizer has 2 groups, and 1 in checkpoint"),
        (MLP, all_but_one, "'layers.0.weight' is in the checkpoint's alone"),
        (MLP, zero_ext.optim.SGD, "no state 'exp_avg'"),
    ],
    ids=["shape", "lacks", "superfluous", "groups", "parameters", "states"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_does_not_fit_changes_nothing(anywhere, rank, path, stage, model, optimizer, message):
    checkpoint.save(path, *made(anywhere, 2, changed(MLP(13))))
    model = model(13) if model is MLP else model()
    run = made(anywhere, stage, model, optimizer or zero_ext.optim.AdamW, {"lr": 0.1})
    before = [value.clone() for value in everything(*run)]
    with pytest.raises(ValueError, match=message):
        checkpoint.load(path, *run)
    for a, e in zip(everything(*run), before, strict=True):
        assert_bits(a, e)


def test_what_is_not_strict_is_passed_over(anywhere, rank, path):
    checkpoint.save(path, made(anywhere, 2, changed(MLP(13)))[0])
    model, _ = made(anywhere, 3, Longer())
    with pytest.warns(UserWarning, match="lacks 'more.bias', 'more.weight': passed over"):
        checkpoint.load(path, model, strict=False)
    expected = {**changed(MLP(13)).state_dict(), "more.bias": Longer().more.bias}
    for name, value in expected.items():
        assert_bits(values_of(model)[name], value, name)


@pytest.mark.parametrize("damage", ["absent", "truncated", "one rank"])
def test_what_cannot_be_read_changes_nothing(anywhere, rank, path, monkeypatch, damage):
    world = 1 if anywhere is None else anywhere.size()
    run = made(anywhere, 2, MLP(13))
    checkpoint.save(path, *run)
    again = made(anywhere, 3, changed(MLP(13)))
    before = [value.clone() for value in everything(*again)]
    message = "there is no checkpoint at"
    if damage == "absent":
        path = path / "nowhere"
    elif damage == "truncated":
        if rank == 0:
            largest = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
            largest.write_bytes(largest.read_bytes()[:-700])
        if anywhere is not None:
            dist.barrier(anywhere.get_group())
        message = "load.. of checkpoint"
    elif rank == world - 1:

        def fails(*args):
            raise OSError("Stale file handle")

        monkeypatch.setattr(checkpoint_files, "read", fails)
    if damage == "one rank":
        message = "Stale file handle"
    with pytest.raises((ValueError, RuntimeError, OSError), match=message):
        checkpoint.load(path, *again)
    for a, e in zip(everything(*again), before, strict=True):
        assert_bits(a, e)


def test_parameters_that_are_not_the_models_are_named(anywhere, rank, path):
    model = MLP()
    _, optimizer = made(anywhere, 2, model)
    with pytest.raises(ValueError, match=r"'layers\.1\.weight' of the optimizer's group 0"):
        checkpoint.save(path, nn.ModuleList(model.layers[:1]), optimizer)


def test_inside_a_backward_it_is_refused(anywhere, rank, path):
    model, optimizer = made(anywhere, 2, MLP())
    checkpoint.save(path, model, optimizer)
    raised = []

    def hook(parameter):
        for act in (checkpoint.save, checkpoint.load):
            with pytest.raises(RuntimeError, match="inside a backward") as error:
                act(path, model, optimizer)
            raised.append(error)

    model.layers[1].weight.register_post_accumulate_grad_hook(hook)
    mean_square(model, train_batch(rank)).backward()
    assert len(raised) == 2


# safetensors


@pytest.fixture
def load_file():
    """Which reads a file by itself, without the model that was exported."""
    return pytest.importorskip("safetensors.torch").load_file


@STAGES
@DTYPES
def test_an_export_is_the_plain_models_state(anywhere, rank, path, stage, dtype, load_file):
    model, optimizer = made(anywhere, stage, MLP(13, dtype=dtype))
    train(model, optimizer, rank, range(2))
    checkpoint.export_safetensors(model, path)
    expected = values_of(model)
    assert [each.name for each in path.iterdir()] == ["model.safetensors"]
    tensors = load_file(path / "model.safetensors")
    assert list(tensors) == sorted(expected)
    for name, value in tensors.items():
        assert_bits(value, expected[name], name)


def test_a_large_export_is_several_files_and_an_index(anywhere, rank, path, load_file):
    model = zero_ext.shard(Tied(), 3, mesh=anywhere)
    checkpoint.export_safetensors(model, path)
    if anywhere is not None:
        dist.barrier(anywhere.get_group())
    checkpoint.export_safetensors(model, path, max_shard_size="200B")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    assert {f.name for f in path.iterdir()} == {*files, "model.safetensors.index.json"}
    tensors = {}
    for file in files:
        part = load_file(path / file)
        assert all(index["weight_map"][name] == file for name in part)
        tensors |= part
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    plain = Tied()
    assert set(tensors) == set(plain.state_dict()) - {"head.weight"}  # it is the embedding's
    for name, value in tensors.items():
        assert_bits(value, plain.get_parameter(name), name)


@pytest.mark.usefixtures("load_file")
@pytest.mark.parametrize("size", ["much", "5GiB", 0, -1, "0MB"])
def test_no_size(size, tmp_path):
    with pytest.raises(ValueError, match="is not a size"):
        checkpoint.export_safetensors(MLP(), tmp_path, max_shard_size=size)


@pytest.mark.usefixtures("load_file")
def test_an_export_that_rank_0_cannot_write_is_everybodys_error(anywhere, rank, path):
    model = zero_ext.shard(MLP(), 3, mesh=anywhere)
    some_folder(path.parent)
    with pytest.raises((OSError, RuntimeError), match=r"thesis\.txt"):
        checkpoint.export_safetensors(model, path.parent / "thesis.txt")
    checkpoint.export_safetensors(model, path)
