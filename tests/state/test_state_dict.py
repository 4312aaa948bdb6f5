"""state_dict() and load_state_dict() of a module whose parameters are released."""

import copy
import io
import pickle
import re
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import MLP, Tied, assert_bits, mean_square, rank_batches
from reference import OneProcess
from setups import MLP_INPUT, assert_same_values, full_master, train_batch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext
from zero_ext.tensor.shard_tensor import ShardTensor

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2)]

SEPARATE = 1e-6  # MiB: every module is a unit
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Mixed(nn.Module):
    """Buffers; a frozen, a transposed, a 0-dim and an empty parameter."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 13), nn.Linear(13, 5)])
        self.layers[1].weight = nn.Parameter(torch.randn(7, 13).t())
        self.layers[2].bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x) * self.scale + self.nothing.sum()


def sharded(mesh, model=None, **kwargs) -> nn.Module:
    kwargs = {"bucket_mb": SEPARATE, **kwargs}
    return zero_ext.shard(Mixed() if model is None else model, 3, mesh=mesh, **kwargs)


def full_state(model) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, ShardTensor) else value.clone()
        for name, value in model.state_dict().items()
    }


def assert_state(actual: dict, expected: dict) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
        assert actual[name].dtype == value.dtype, name


def assert_released(model) -> None:
    assert model.stats()["bytes_full"] == 0


# What state_dict() returns


def test_keys_shapes_dtypes_and_values_are_the_plain_models(mesh):
    model, plain = sharded(mesh), Mixed()
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    parameters = dict(plain.named_parameters())
    for name, value in state.items():
        assert value.shape == expected[name].shape and value.dtype == expected[name].dtype
        assert value.stride() == expected[name].stride()
        assert isinstance(value, ShardTensor) == (name in parameters), name
        assert not value.requires_grad
    assert_state(full_state(model), expected)
    assert state._metadata == expected._metadata
    assert_released(model)


def test_after_training_it_has_the_trained_values(mesh, rank, world):
    model = sharded(mesh, MLP(13))
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    reference = OneProcess(MLP(13), lambda params: torch.optim.AdamW(params, lr=0.1))
    for step in range(2):
        batches = rank_batches(MLP_INPUT, world, step)
        mean_square(model, batches[0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.train(batches)
    trained = MLP(13)
    trained.load_state_dict(full_state(model))
    assert_same_values(trained, reference.model)


def test_a_tied_parameter_has_both_its_keys(mesh):
    model = sharded(mesh, Tied(), units=nn.Linear)
    assert_state(full_state(model), Tied().state_dict())


def test_a_module_inside_another_keeps_its_prefix(mesh):
    outer = nn.ModuleDict({"model": sharded(mesh), "other": nn.Linear(2, 2)})
    state = outer.state_dict()
    plain = nn.ModuleDict({"model": Mixed(), "other": nn.Linear(2, 2)})
    assert list(state) == list(plain.state_dict())
    assert isinstance(state["model.layers.0.weight"], ShardTensor)
    assert type(state["other.weight"]) is torch.Tensor
    expected = Mixed().state_dict()
    assert torch.equal(state["model.layers.0.weight"].full_tensor(), expected["layers.0.weight"])


def test_inside_summon_full_params_the_tensors_are_plain(mesh):
    model = sharded(mesh)
    with model.summon_full_params():
        state = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(type(value) is torch.Tensor for value in state.values())
    assert_state(state, Mixed().state_dict())


def test_keep_vars_returns_the_parameters(mesh):
    model = sharded(mesh)
    state = model.state_dict(keep_vars=True)
    for name, parameter in model.named_parameters():
        assert state[name] is parameter


def test_a_policys_dtype_is_the_dtype_of_the_values(mesh):
    model = sharded(mesh, MLP(13), mp_policy=BF16)
    assert_state(full_state(model), MLP(13).to(torch.bfloat16).state_dict())


def test_names_shapes_and_counts_are_right_while_released(mesh):
    model, plain = sharded(mesh), Mixed()
    assert_released(model)
    for (name, p), (expected_name, e) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == expected_name and type(p) is nn.Parameter
        assert (p.shape, p.dtype, p.device, p.stride()) == (e.shape, e.dtype, e.device, e.stride())
        assert (p.numel(), p.requires_grad, p.is_leaf) == (e.numel(), e.requires_grad, True)
    assert repr(model) == repr(plain)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert_released(model)


# load_state_dict


def other_values() -> dict[str, torch.Tensor]:
    state = Mixed(seed=1).state_dict()
    state["norm.running_mean"] += 3
    return state


def test_a_plain_state_dict_is_taken_over(mesh):
    model = sharded(mesh)
    result = model.load_state_dict(other_values())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_released(model)
    assert_state(full_state(model), other_values())


def test_its_own_state_dict_is_taken_over(mesh):
    source, model = sharded(mesh, Mixed(seed=1)), sharded(mesh)
    state = source.state_dict()
    model.load_state_dict(state)
    assert_released(model)
    assert_state(full_state(model), Mixed(seed=1).state_dict())
    assert isinstance(state["layers.0.weight"], ShardTensor), "the caller's state dict was changed"


def test_another_cut_is_taken_over(mesh):
    """ShardTensors of other units, and of a stage that has none."""
    source = sharded(mesh, Mixed(seed=1), bucket_mb=25.0)
    model = sharded(mesh)
    model.load_state_dict(source.state_dict())
    assert_state(full_state(model), Mixed(seed=1).state_dict())
    replicated = zero_ext.shard(Mixed(), 2, mesh=mesh)
    replicated.load_state_dict(full_state(source))
    assert_state(full_state(replicated), Mixed(seed=1).state_dict())


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_the_next_step_starts_from_the_loaded_values(mesh, rank, world, policy):
    """Masters follow: a step of zero gradients with weight decay alone shows them."""
    dtype = torch.float32 if policy is None else torch.bfloat16
    model = sharded(mesh, MLP(13), mp_policy=policy)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    mean_square(model, train_batch(rank, dtype=dtype)).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.manual_seed(5)
    loaded = {name: torch.randn_like(value) for name, value in MLP(13).state_dict().items()}
    model.load_state_dict(loaded)

    plain = MLP(13).to(dtype)
    plain.load_state_dict(loaded)
    reference = OneProcess(plain, lambda params: torch.optim.SGD(params, lr=0.5))
    batches = rank_batches(MLP_INPUT, world, 1, dtype=dtype)
    mean_square(model, batches[0][rank]).backward()
    optimizer.step()
    reference.train(batches)
    for name, parameter in model.named_parameters():
        # One fused expression here, two roundings in torch; and the average of 3 ranks rounds.
        torch.testing.assert_close(
            full_master(parameter), reference.masters[name], rtol=1e-5, atol=1e-6
        )


BAD = {
    "missing": (lambda s: s.pop("layers.0.weight"), r'Missing key\(s\).*"layers.0.weight"'),
    "unexpected": (lambda s: s.update(x=torch.ones(1)), r'Unexpected key\(s\).*"x"'),
    "shape": (
        lambda s: s.update({"layers.1.bias": torch.ones(14)}),
        r"size mismatch for layers.1.bias: copying a param with shape torch.Size\(\[14\]\)",
    ),
}


@pytest.mark.parametrize("mistake", BAD)
def test_errors_are_torchs_and_leave_a_usable_module(mesh, rank, mistake):
    make, message = BAD[mistake]
    state = other_values()
    make(state)
    model = sharded(mesh)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=re.compile(message, re.DOTALL)) as ours:
        model.load_state_dict(state)
    with pytest.raises(RuntimeError) as torchs:
        Mixed().load_state_dict(state)
    assert str(ours.value) == str(torchs.value)
    assert_released(model)
    mean_square(model, train_batch(rank)).backward()
    optimizer.step()
    assert_released(model)
    model.load_state_dict(other_values())
    assert_state(full_state(model), other_values())


def test_what_is_not_strict_is_reported(mesh):
    state = other_values()
    del state["scale"]
    state["x"] = torch.ones(1)
    model = sharded(mesh)
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["scale"], ["x"])
    assert_released(model)
    expected = other_values() | {"scale": Mixed().scale.detach()}
    assert_state(full_state(model), expected)


@pytest.mark.parametrize("part", ["layers", "layers.1", "norm"])
def test_a_part_of_it_is_saved_and_loaded_alone(mesh, part):
    model, plain = sharded(mesh), Mixed(seed=1)
    expected = full_state(model)
    found = full_state(model.get_submodule(part))
    assert found.keys() == plain.get_submodule(part).state_dict().keys()
    for name, value in found.items():
        assert_bits(value, expected[f"{part}.{name}"], name)
    model.get_submodule(part).load_state_dict(plain.get_submodule(part).state_dict())
    expected |= {
        f"{part}.{name}": value for name, value in full_state(plain.get_submodule(part)).items()
    }
    for name, value in full_state(model).items():
        assert_bits(value, expected[name], name)
    assert model.stats()["bytes_full"] == 0, "gathered"


@pytest.mark.parametrize("change", ["remove", "swap", "insert", "parametrize"])
def test_names_are_those_of_layers_that_were_moved(mesh, shared_path, rank, change):
    def moved(model):
        if change == "remove":
            del model[0]
        elif change == "swap":
            model[0], model[1] = model[1], model[0]
        elif change == "insert":
            model.insert(1, nn.Tanh())
        else:
            nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Tanh())
        return model

    def layers():
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

    model = sharded(mesh, layers(), bucket_mb=150 / 2**20)
    with model.summon_full_params():
        moved(model)
    expected = moved(layers()).state_dict()
    found = full_state(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_bits(found[name], value, name)
    zero_ext.checkpoint.save(shared_path / "saved", model)
    if rank == 0:
        values, _ = zero_ext.checkpoint.read_whole(shared_path / "saved")
        for name, value in expected.items():
            assert_bits(values[name], value, name)
    zero_ext.checkpoint.export_safetensors(model, shared_path / "exported")


def test_a_module_around_it_loads_it(mesh):
    """As a part of a larger module, with a prefix."""
    outer = nn.ModuleDict({"model": sharded(mesh), "other": nn.Linear(2, 2)})
    plain = nn.ModuleDict({"model": Mixed(seed=1), "other": nn.Linear(2, 2)})
    outer.load_state_dict(plain.state_dict())
    assert_released(outer["model"])
    assert_state(full_state(outer), plain.state_dict())


# torch.distributed.checkpoint, copies, pickles


def test_torch_distributed_checkpoint_saves_and_loads_it(mesh, shared_path):
    source = sharded(mesh, Mixed(seed=1))
    dcp.save({"model": source.state_dict()}, checkpoint_id=shared_path)
    model = sharded(mesh, bucket_mb=25.0)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=shared_path)
    model.load_state_dict(state["model"])
    assert_state(full_state(model), Mixed(seed=1).state_dict())


@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "kind",
    [
        AsyncCheckpointerType.THREAD,
        pytest.param(AsyncCheckpointerType.PROCESS, marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_asynchronously_is_what_there_is(mesh, stage, kind, shared_path, rank, world):
    """torch copies the state first, which goes by new_empty() and data_ptr()."""

    def trained(seed):
        model = zero_ext.shard(Mixed(seed), stage, mesh=mesh, bucket_mb=SEPARATE)
        optimizer = zero_ext.optim.AdamW(model.parameters())
        mean_square(model, rank_batches((3, 5), world)[0][rank]).backward()
        optimizer.step()
        return model, optimizer

    source, other = trained(1), trained(2)
    model_state, optimizer_state = get_state_dict(*source)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.async_save(state, checkpoint_id=shared_path, async_checkpointer_type=kind).result()
    model_state, optimizer_state = get_state_dict(*other)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=shared_path)
    set_state_dict(*other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_same_values(other[0], source[0])
    for p, q in zip(source[0].parameters(), other[0].parameters(), strict=True):
        if p.requires_grad:
            for name in ("exp_avg", "exp_avg_sq", "step"):
                assert_bits(
                    zero_ext.full_state(source[1], p, name), zero_ext.full_state(other[1], q, name)
                )


@pytest.mark.host
def test_what_a_process_gets_of_it_can_be_saved_there(mesh, shared_path):
    """As dcp.async_save sends it. Other pickles raise."""
    source = sharded(mesh, Mixed(seed=1))
    state = source.state_dict()
    addresses = [t.to_local().data_ptr() for t in state.values() if isinstance(t, ShardTensor)]
    sent = ForkingPickler.loads(ForkingPickler.dumps(state))
    assert not any(isinstance(value, ShardTensor) for value in sent.values())
    dcp.save({"model": sent}, checkpoint_id=shared_path)
    assert addresses == [
        t.to_local().data_ptr() for t in state.values() if isinstance(t, ShardTensor)
    ]
    model = sharded(mesh, bucket_mb=25.0)
    loaded = {"model": model.state_dict()}
    dcp.load(loaded, checkpoint_id=shared_path)
    model.load_state_dict(loaded["model"])
    assert_state(full_state(model), Mixed(seed=1).state_dict())


def test_a_checkpoint_of_it_is_a_plain_models(mesh, shared_path):
    dcp.save({"model": sharded(mesh, Mixed(seed=1)).state_dict()}, checkpoint_id=shared_path)
    state = {"model": Mixed().state_dict()}
    dcp.load(state, checkpoint_id=shared_path)
    assert_state(state["model"], Mixed(seed=1).state_dict())


@pytest.mark.parametrize("full", [False, True])
def test_torchs_state_dict_functions_get_and_set_it(mesh, full):
    model = sharded(mesh)
    options = StateDictOptions(full_state_dict=full)
    state = get_model_state_dict(model, options=options)
    for name, parameter in model.named_parameters():
        assert isinstance(state[name], ShardTensor) != full
        assert state[name].shape == parameter.shape
    assert_released(model)
    set_model_state_dict(model, other_values(), options=options)
    assert_released(model)
    assert_state(full_state(model), other_values())


RELEASED = r"zero_ext \[rank \d.*\]: .*parameters that stage 3 has released"


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_released_module_cannot_be_copied(mesh, how):
    model = sharded(mesh)
    copying = {
        "deepcopy": copy.deepcopy,
        "pickle": pickle.dumps,
        "torch.save": lambda m: torch.save(m, io.BytesIO()),
    }[how]
    with pytest.raises(RuntimeError, match=RELEASED):
        copying(model)
    assert_released(model)
    assert_state(full_state(model), Mixed().state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_gathered_module_is_a_plain_one(mesh, rank, how):
    model = sharded(mesh)
    with model.summon_full_params():
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert_state(dict(twin.state_dict()), Mixed().state_dict())
    for p in twin.parameters():
        with torch.no_grad():
            p.add_(1)
    assert_state(full_state(model), Mixed().state_dict())
    mean_square(twin, train_batch(rank)).backward()
    assert type(twin.scale.grad) is torch.Tensor
    assert not hasattr(twin, "unshard")
    twin.zero_grad()
    again = zero_ext.shard(twin, 3, mesh=mesh)
    assert_released(again)


def test_a_shard_cannot_be_pickled(mesh, rank):
    """Parameters and optimizer states: the remedy fits both."""
    model = sharded(mesh)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    mean_square(model, train_batch(rank)).backward()
    optimizer.step()
    message = r"this rank holds only a slice\. On all ranks, save with zero_ext\.checkpoint\.save"
    for state in (model.state_dict(), optimizer.state_dict()):
        with pytest.raises(RuntimeError, match=message) as error:
            torch.save(state, io.BytesIO())
        assert "summon_full_params" not in str(error.value)
