"""zero_ext.checkpoint with models, optimizers and calls that are out of the ordinary."""

import gc
import os
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import assert_equal, changed, made, train
from harness import MLP, assert_bits, needs_one_dimension
from setups import values_of
from torch import nn

import zero_ext
from zero_ext import checkpoint
from zero_ext.checkpoint import files, writer


def barrier(mesh) -> None:
    if mesh is not None:
        dist.barrier(mesh.get_group())


@pytest.fixture
def slow_writes(monkeypatch):
    """Until it is set, nothing is written."""
    go, write_data = threading.Event(), files.DigestingWriter.write_data

    def waits(*args):
        assert go.wait(30)
        return write_data(*args)

    monkeypatch.setattr(files.DigestingWriter, "write_data", waits)
    yield go
    go.set()


# Frozen and unfrozen


def frozen_first(requires_grad=False) -> MLP:
    model = MLP(13, dtype=torch.bfloat16)
    model.layers[0].requires_grad_(requires_grad)
    return model


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [zero_ext.optim.AdamW, "NAdam"], ids=["AdamW", "NAdam"])
def test_what_was_thawed_goes_on(anywhere, rank, path, stage, optimizer):
    def make(model):
        if optimizer != "NAdam":
            return made(anywhere, stage, model)

        def wrapped(params, **arguments):
            return zero_ext.optim.wrap(torch.optim.NAdam, params, **arguments)

        return made(anywhere, stage, model, wrapped)

    run = make(frozen_first())
    train(*run, rank, range(1))
    run[0].layers[0].requires_grad_(True)
    train(*run, rank, range(1, 3))
    checkpoint.save(path, *run)
    train(*run, rank, range(3, 5))
    again = make(frozen_first())
    again[0].layers[0].requires_grad_(True)
    checkpoint.load(path, *again)
    train(*again, rank, range(3, 5))
    assert_equal(again, run)


def test_a_model_that_was_thawed_has_the_masters_of_the_checkpoint(anywhere, rank, path):
    third = made(anywhere, 2, MLP(13, dtype=torch.bfloat16))[0]
    for parameter in third.parameters():
        zero_ext.set_full_param(parameter, torch.full(parameter.shape, 1 / 3))
    checkpoint.save(path, third)
    model = made(anywhere, 2, frozen_first())[0]
    model.requires_grad_(True)
    checkpoint.load(path, model)
    for name, parameter in model.named_parameters():
        master = zero_ext.full_tensor(parameter)
        assert_bits(master, torch.full_like(master, 1 / 3), name)


def test_the_state_of_what_is_frozen_now_is_passed_over(anywhere, rank, path):
    run = made(anywhere, 2, MLP(13, dtype=torch.bfloat16))
    train(*run, rank, range(2))
    checkpoint.save(path, *run)
    again = made(anywhere, 2, frozen_first())
    with pytest.warns(
        UserWarning, match=r"frozen now are passed over: 'layers.0.weight', '"
    ) as told:
        checkpoint.load(path, *again)
    assert told[0].filename == __file__
    for name, value in values_of(again[0]).items():
        assert_bits(value, values_of(run[0])[name], name)
    later, earlier = again[0].layers[1].weight, run[0].layers[1].weight
    assert_bits(
        zero_ext.full_state(again[1], later, "exp_avg"),
        zero_ext.full_state(run[1], earlier, "exp_avg"),
    )


# What state_dict() names


class Copies(MLP):
    """``state_dict()`` gives copies, and something that is no tensor."""

    def __init__(self):
        super().__init__(13)
        self.taken: dict = {}
        self.register_state_dict_post_hook(self._copy)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _copy(module, state, prefix, metadata):
        for name in list(state):
            state[name] = state[name].detach().clone()
        state["version"] = "2.0"

    @staticmethod
    def _take(module, state, prefix, *_):
        module.taken = {"version": state.pop("version", None)}


@pytest.mark.parametrize("stage", [1, 2])
def test_what_a_hook_makes_is_loaded_by_load_state_dict(anywhere, rank, path, stage):
    model = made(anywhere, stage, Copies())[0]
    checkpoint.save(path, model)
    again = made(anywhere, stage, changed(Copies()))[0]
    checkpoint.load(path, again)
    assert again.taken == {"version": "2.0"}
    for name, value in values_of(again).items():
        assert_bits(value, MLP(13).get_parameter(name), name)


class Detaches(MLP):
    """``state_dict()`` gives aliases, and not all of them."""

    def __init__(self):
        super().__init__(13, dtype=torch.bfloat16)
        self.layers[0].requires_grad_(False)
        self.register_state_dict_post_hook(self._detach)

    @staticmethod
    def _detach(module, state, prefix, metadata):
        del state["layers.0.weight"]
        for name in list(state):
            state[name] = state[name].detach()


def test_aliases_are_the_parameters_themselves(anywhere, rank, path):
    """As LoRA libraries leave out the frozen weights."""
    run = made(anywhere, 2, Detaches())
    train(*run, rank, range(2))
    checkpoint.save(path, *run)
    again = made(anywhere, 2, changed(Detaches()))
    checkpoint.load(path, *again)
    for name, parameter in run[0].named_parameters():
        if name != "layers.0.weight":
            other = again[0].get_parameter(name)
            assert_bits(zero_ext.full_tensor(other), zero_ext.full_tensor(parameter), name)


class Remembers(nn.Module):
    def __init__(self, extra):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "before"),
    [
        (7, 0),
        ({"a": 7, "b": {"c": "x"}}, {"a": 0, "b": {"c": ""}}),
        (torch.ones(3), torch.zeros(3)),
    ],
    ids=["int", "dict", "tensor"],
)
def test_extra_states_are_exchanged_with_torch(anywhere, rank, path, saved, before):
    model = made(anywhere, 2, Remembers(saved))[0]
    checkpoint.save(path, model)
    theirs, plain = path.with_name(f"plain {rank}"), Remembers(before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": plain.state_dict()}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        plain.load_state_dict(state["model"])
        dcp.save({"model": Remembers(saved).state_dict()}, checkpoint_id=theirs, no_dist=True)
    again = made(anywhere, 2, Remembers(before))[0]
    checkpoint.load(theirs, again)
    ours = made(anywhere, 2, Remembers(before))[0]
    checkpoint.load(path, ours)
    for each in (plain, again, ours):
        if isinstance(saved, torch.Tensor):
            assert_bits(each.extra, saved)
        else:
            assert each.extra == saved


def test_extra_states_are_set_in_the_order_of_modules(anywhere, path):
    """They may send messages, and each process has an order of its own for a set of names."""
    set_by: list[str] = []

    class Recorded(Remembers):
        def set_extra_state(self, state):
            set_by.append(state)

    names = [f"part {k}" for k in range(7)]
    model = made(anywhere, 2, nn.ModuleList(map(Recorded, names)))[0]
    checkpoint.save(path, model)
    checkpoint.load(path, model)
    assert set_by == names


def test_a_plain_checkpoint_of_a_compiled_model_is_read(anywhere, rank, path):
    plain = torch.compile(MLP(13), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = path.with_name(f"plain {rank}")
        dcp.save({"model": plain.state_dict()}, checkpoint_id=path, no_dist=True)
    model = made(anywhere, 2, changed(MLP(13)))[0]
    checkpoint.load(path, model)
    for name, value in values_of(model).items():
        assert_bits(value, MLP(13).get_parameter(name), name)


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_without_a_model_entry_says_how_to_write_one(anywhere, rank, path, strict):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = path.with_name(f"bare {rank}")
        dcp.save(MLP(13).state_dict(), checkpoint_id=path, no_dist=True)
    model = made(anywhere, 2, changed(MLP(13)))[0]
    message = r"without a 'model' entry.* 'layers.0.bias'.* Write \{'model': model.state_dict\(\)\}"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(path, model, strict=strict)
    for name, value in values_of(model).items():
        assert_bits(value, changed(MLP(13)).get_parameter(name), name)


class Twins(nn.Module):
    """Tied weights, whose first name is the one of the module that comes first."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        setattr(self, first, nn.Linear(5, 5))
        setattr(self, second, nn.Linear(5, 5))
        self.right.weight = self.left.weight

    def forward(self, x):
        return self.right(self.left(x))


def test_tied_parameters_are_known_by_all_their_names(anywhere, rank, path):
    run = made(anywhere, 2, Twins("left", "right"))
    train(*run, rank, range(2))
    checkpoint.save(path, *run)
    again = made(anywhere, 2, changed(Twins("right", "left")))
    checkpoint.load(path, *again)
    train(*run, rank, range(2, 4))
    train(*again, rank, range(2, 4))
    for name, value in values_of(run[0]).items():
        if name in ("left.weight", "left.bias", "right.bias"):
            other = "right.weight" if name == "left.weight" else name
            assert_bits(values_of(again[0])[other], value, name)


def test_what_cannot_be_written_is_said_before_anything_is_changed(anywhere, rank, path):
    def make(model):
        run = made(anywhere, 2, model)
        model.register_buffer("expanded", torch.zeros(1).expand(4))
        return run

    run = make(MLP(13))
    checkpoint.save(path, *run)
    again = make(changed(MLP(13)))
    before = values_of(again[0])
    again[1].param_groups[0]["lr"] = 7.0
    with pytest.raises(ValueError, match=r"'expanded' of shape \(4,\) is expanded"):
        checkpoint.load(path, *again)
    assert again[1].param_groups[0]["lr"] == 7.0
    for name, value in values_of(again[0]).items():
        assert_bits(value, before[name], name)


# Optimizers


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
    ids=["RMSprop", "SGD"],
)
def test_the_settings_of_a_wrapped_optimizer_are_the_checkpoints(anywhere, rank, path, kind, saved):
    def make(model, **arguments):
        def wrapped(params, **kwargs):
            return zero_ext.optim.wrap(kind, params, lr=0.01, **kwargs)

        return made(anywhere, 2, model, wrapped, arguments)

    run = make(MLP(13), **saved)
    train(*run, rank, range(2))
    checkpoint.save(path, *run)
    again = make(changed(MLP(13)))
    checkpoint.load(path, *again)
    train(*run, rank, range(2, 4))
    train(*again, rank, range(2, 4))
    assert_equal(again, run)


def test_another_optimizers_state_is_refused(anywhere, rank, path):
    run = made(anywhere, 2, MLP(13))
    train(*run, rank, range(1))
    checkpoint.save(path, *run)
    model = zero_ext.shard(changed(MLP(13)), mesh=anywhere)
    optimizer = zero_ext.optim.wrap(torch.optim.NAdam, model.parameters())
    before = values_of(model)
    with pytest.raises(ValueError, match="lacks 'mu_product', which NAdam has"):
        checkpoint.load(path, model, optimizer)
    for name, value in values_of(model).items():
        assert_bits(value, before[name], name)
    train(model, optimizer, rank, range(1))


@pytest.mark.parametrize("stage", [2, 3])
def test_inside_inference_mode(anywhere, rank, path, stage):
    """As a validation does that keeps the best model."""
    run = made(anywhere, stage, MLP(13))
    train(*run, rank, range(1))
    with torch.inference_mode():
        checkpoint.save(path, *run)
    train(*run, rank, range(1, 2))
    again = made(anywhere, stage, changed(MLP(13)))
    with torch.inference_mode():
        checkpoint.load(path, *again)
    train(*again, rank, range(1, 2))
    assert_equal(again, run)


# Ranks that differ, saves that go on


def test_a_load_waits_for_what_is_being_saved(anywhere, rank, path, slow_writes):
    model = made(anywhere, 2, MLP(13))[0]
    slow_writes.set()
    checkpoint.save(path, model, extra={"count": 1})
    slow_writes.clear()
    saving = checkpoint.save(path, changed_in_place(model), extra={"count": 2}, async_=True)
    threading.Timer(0.3 * (1 + rank), slow_writes.set).start()
    again = made(anywhere, 2, MLP(13))[0]
    assert checkpoint.load(path, again) == {"count": 2} and saving.done()
    for name, value in values_of(again).items():
        assert_bits(value, MLP(13).get_parameter(name) + 1, name)


def changed_in_place(model):
    for parameter in model.parameters():
        zero_ext.set_full_param(parameter, zero_ext.full_tensor(parameter) + 1)
    return model


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_ranks_that_differ_are_told(mesh, rank, shared_path):
    run = made(mesh, 2, MLP(13))
    train(*run, rank, range(1))
    for name in ("a", "b"):
        checkpoint.save(shared_path / name, *run)
    before = values_of(run[0])
    with pytest.raises(ValueError, match=r"checkpoints to be loaded differ .* Load the same one"):
        checkpoint.load(shared_path / ("b" if rank == 1 else "a"), *run)
    with pytest.raises(ValueError, match=r"checkpoints to be saved differ .* 'folder a'"):
        checkpoint.save(shared_path / ("b" if rank == 1 else "a"), *run)
    with pytest.raises(ValueError, match="checkpoints to be saved differ"):
        checkpoint.save(shared_path / "a", run[0], run[1] if rank == 0 else None)
    error = TypeError if rank == 1 else RuntimeError
    with pytest.raises(error, match="NoneType"):
        checkpoint.save(None if rank == 1 else shared_path / "a", *run)
    for name, value in values_of(run[0]).items():
        assert_bits(value, before[name], name)
    assert checkpoint.load(shared_path / "a", *run) == {}


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_save_meanwhile_has_the_process_groups_timeout(mesh, group):
    needs_one_dimension()
    own = writer._apart(zero_ext.ranks.groups.resolve(None, mesh, []))
    backends = [g._get_backend(torch.device("cpu")) for g in (own.parent, group)]
    assert backends[0].options._timeout == backends[1].options._timeout
    dist.barrier(group)
    dist.destroy_process_group(own.parent)


@pytest.mark.parametrize("async_", [False, True])
def test_a_save_that_failed_holds_no_memory(anywhere, rank, path, monkeypatch, async_):
    def held() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        return sum(each.numel() for each in tensors if each.numel() >= 250_000)

    model = made(anywhere, 2, nn.Linear(1000, 1000), bucket_mb=25)[0]
    before = held()

    def fails(*args):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(files.DigestingWriter, "write_data", fails)
        saving = None
        try:
            saving = checkpoint.save(path, model, async_=async_)
            saving.result()
        except RuntimeError as error:
            assert "No space left" in str(error)
        else:
            pytest.fail("did not raise")
    barrier(anywhere)
    assert held() == before


# Files


def test_what_the_user_keeps_beside_it_stays(anywhere, rank, path, slow_writes):
    model = made(anywhere, 2, MLP(13))[0]
    slow_writes.set()
    checkpoint.save(path, model)
    if anywhere is None or rank == 0:
        (path / "config.json").write_text("{}")
        (path / "best").mkdir()
        (path / "best" / "notes").write_text("good")
    barrier(anywhere)
    checkpoint.save(path, changed_in_place(model))
    assert (path / "config.json").read_text() == "{}"
    assert (path / "best" / "notes").read_text() == "good"

    slow_writes.clear()
    new = path.with_name("new")
    saving = checkpoint.save(new, model, async_=True)
    if anywhere is None or rank == 0:
        os.makedirs(new)
        (new / "config.json").write_text("{}")
    barrier(anywhere)
    slow_writes.set()
    saving.result()
    assert (new / "config.json").read_text() == "{}" and (new / ".metadata").exists()
    for saved in (path, new):
        again = made(anywhere, 2, MLP(13))[0]
        checkpoint.load(saved, again)
        for name, value in values_of(again).items():
            assert_bits(value, MLP(13).get_parameter(name) + 1, name)
    assert {each.name for each in path.parent.iterdir()} == {"checkpoint", "new"}


def test_views_are_exported_apart(anywhere, rank, path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = MLP(13)
    model.register_buffer("all", torch.arange(6.0))
    model.register_buffer("some", model.all[2:4])
    model.register_buffer("same", model.all.view(2, 3))
    made(anywhere, 2, model)
    checkpoint.export_safetensors(model, path)
    loaded = safetensors.load_file(path / "model.safetensors")
    for name in ("all", "some", "same"):
        assert_bits(loaded[name], model.get_buffer(name), name)


def test_an_export_that_fails_leaves_nothing(anywhere, rank, path, monkeypatch):
    from safetensors import torch as safetensors

    model, save_file = made(anywhere, 2, MLP(13))[0], safetensors.save_file

    def fails(tensors, file, **kwargs):
        if "00002-of" in file.name:
            raise OSError("No space left on device")
        save_file(tensors, file, **kwargs)

    monkeypatch.setattr(safetensors, "save_file", fails)
    with pytest.raises((OSError, RuntimeError), match="No space left"):
        checkpoint.export_safetensors(model, path, max_shard_size=200)
    barrier(anywhere)
    assert list(path.iterdir()) == []


# Sharded tensors in extra


@pytest.mark.dist
def test_ranks_order_their_extra_as_they_like(mesh, rank, shared_path):
    """Lists in two places stay one."""
    model = zero_ext.shard(MLP(13), 2, mesh=mesh)
    first = zero_ext.EMA(model)
    first.update()
    for p in model.parameters():
        zero_ext.set_full_param(p, torch.zeros(p.shape))
    second = zero_ext.EMA(model)
    second.update()
    shared = [rank]
    pairs = [("first", first.state_dict()), ("second", [second.state_dict()]), ("x", (shared,))]
    extra = dict([*(pairs if rank == 0 else reversed(pairs)), ("y", shared)])
    expected = {n: v.full_tensor() for n, v in first.state_dict()["averages"].items()}
    for async_ in (False, True):
        saving = checkpoint.save(shared_path / "saved", model, extra=extra, async_=async_)
        if async_:
            saving.result()
        loaded = checkpoint.load(shared_path / "saved", model)
        assert loaded["y"] is loaded["x"][0] and loaded["y"] == [rank]
        for name, value in loaded["first"]["averages"].items():
            assert_bits(value, expected[name], name)
        assert not any(v.any() for v in loaded["second"][0]["averages"].values())
