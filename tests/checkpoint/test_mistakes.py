"""Mistakes in the calls of zero_ext.checkpoint, each with its remedy."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import MLP, Tied
from torch import nn

import zero_ext
from zero_ext import checkpoint


def test_path_and_model_are_swapped(anywhere, path):
    model = zero_ext.shard(MLP(), 1, mesh=anywhere)
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(
            TypeError, match=rf"got a MLP as its path and a str .*{call.__name__}\(path"
        ):
            call(model, str(path))
    assert not path.exists()


@pytest.mark.parametrize(
    "value, key, kind",
    [
        (lambda: 0, "schedule", "Error"),
        (threading.Lock(), "lock", "TypeError"),
        ((n for n in range(3)), 7, "TypeError"),
    ],
)
def test_an_extra_that_cannot_be_loaded_again_is_refused(anywhere, path, value, key, kind):
    model = zero_ext.shard(MLP(), 1, mesh=anywhere)
    with pytest.raises(
        ValueError, match=rf"extra\[{key!r}\] cannot be saved: \w*{kind}.*Pass what"
    ):
        checkpoint.save(path, model, extra={"step": 3, key: value})
    assert not path.exists()


@pytest.mark.parametrize("extra", [[1, 2], "step", 0, torch.ones(2)])
def test_an_extra_that_is_no_dict_is_refused(anywhere, path, extra):
    with pytest.raises(TypeError, match=r"extra is a .*Pass a dict"):
        checkpoint.save(path, zero_ext.shard(MLP(), 1, mesh=anywhere), extra=extra)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_shard_in_an_object_of_extra_is_named(mesh, shared_path):
    """In plain containers, such as state dicts, it is saved: see test_ema.py."""
    model = zero_ext.shard(MLP(), 3, mesh=mesh)
    shard = next(iter(model.state_dict().values()))
    with pytest.raises(ValueError, match=r"extra\['ema'\] cannot be saved.*only a slice"):
        checkpoint.save(shared_path / "saved", model, extra={"ema": SimpleNamespace(of=shard)})


@pytest.mark.parametrize("strict", [True, False])
def test_names_with_another_prefix(anywhere, path, strict):
    """strict=False would pass everything over."""
    outer = nn.ModuleDict({"module": MLP()})
    checkpoint.save(path, zero_ext.shard(outer, 2, mesh=anywhere))
    model = zero_ext.shard(MLP(), 2, mesh=anywhere)
    match = r"'module\.layers.* and the model has 'layers.*prefix 'module\.'.*a module around it"
    with pytest.raises(ValueError, match=match):
        checkpoint.load(path, model, strict=strict)
    checkpoint.load(path, nn.ModuleDict({"module": model}), strict=strict)


def test_no_name_in_common(anywhere, path):
    checkpoint.save(path, zero_ext.shard(MLP(), 2, mesh=anywhere))
    with pytest.raises(
        ValueError, match=r"no name in common: it has 'layers.*model that was saved"
    ):
        checkpoint.load(path, zero_ext.shard(Tied(), 2, mesh=anywhere), strict=False)


@pytest.mark.parametrize("stage", [1, 3])
def test_after_destroy_process_group(tmp_path, stage):
    if dist.is_initialized():
        pytest.skip("other tests need the process group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = zero_ext.shard(MLP(), stage)
    finally:
        dist.destroy_process_group()
    match = r"group of this MLP was destroyed\. Save, load and export before destroy_process_group"
    for call in (
        lambda: checkpoint.save(tmp_path / "saved", model),
        lambda: checkpoint.load(tmp_path / "saved", model),
        lambda: checkpoint.export_safetensors(model, tmp_path / "exported"),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()


class Several(nn.Sequential):
    """Parameters in and out of units, and buffers of two dtypes."""

    def __init__(self):
        super().__init__(MLP(), nn.BatchNorm1d(5), nn.Linear(5, 3, dtype=torch.float64))
        self[2].requires_grad_(False)


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_full_tensor_of_what_a_state_dict_holds(mesh, stage):
    torch.manual_seed(7)
    plain = Several()
    expected = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
    state = zero_ext.shard(plain, stage, mesh=mesh).state_dict()
    for name, value in state.items():
        full = zero_ext.full_tensor(value)
        assert full.dtype == expected[name].dtype and torch.equal(full.cpu(), expected[name]), name
        assert full.data_ptr() != value.data_ptr() or stage == 3


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("call", ["save", "load"])
def test_another_ranks_error_has_one_beginning_and_one_path(mesh, shared_path, rank, call):
    model = zero_ext.shard(MLP(), 1, mesh=mesh)
    path = shared_path / "saved"
    if call == "load":
        checkpoint.save(path, model)
    with pytest.raises((ValueError, RuntimeError)) as raised:
        if call == "save":
            checkpoint.save(path, model, extra={"lock": threading.Lock()} if rank == 1 else {})
        else:
            checkpoint.load(path if rank != 1 else shared_path / "missing", model)
    text = str(raised.value)
    assert text.startswith("zero_ext") and text.count("zero_ext [") + text.count("zero_ext:") == 1
    assert text.count(str(path)) <= 1 and (rank == 1 or "rank 1: " in text), text


WRONG = {
    "path": (lambda call, path, m, o: call(7, m, o), "the path of a checkpoint is 7"),
    "swapped": (lambda call, path, m, o: call(m, path, o), "The path comes first"),
    "no model": (lambda call, path, m, o: call(path, o, o), "not a|takes a module"),
    "plain model": (lambda call, path, m, o: call(path, MLP(), None), "is sharded on rank"),
    "no optimizer": (lambda call, path, m, o: call(path, m, 7), "an optimizer or several"),
    "another's": (
        lambda call, path, m, o: call(path, m, torch.optim.SGD(MLP().parameters(), lr=1)),
        "is not one of the model's",
    ),
}


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.timeout(20)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", [checkpoint.save, checkpoint.load])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_argument_that_is_wrong_on_one_rank(shared_path, rank, world, stage, call, wrong):
    model = zero_ext.shard(MLP(), stage)  # over the default group, which a rank without model knows
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    path = shared_path / "saved"
    checkpoint.save(path, model, optimizer)
    mistake, message = WRONG[wrong]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message) as raised:
        if rank == world - 1:
            mistake(call, path, model, optimizer)
        else:
            call(path, model, optimizer)
    assert rank == world - 1 or f"rank {world - 1}" in str(raised.value)
    call(path, model, optimizer)
