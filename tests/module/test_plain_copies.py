"""A saved or copied module is a plain one: its file can be read without zero_ext."""

import copy
import io
import pickle
import pickletools

import pytest
import torch
from harness import assert_bits, mean_square, rank_data
from torch import nn

import zero_ext

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
CLASSES = [nn.Sequential, nn.ModuleList, nn.Linear, nn.ReLU, nn.BatchNorm1d]


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 13))


class OwnState(nn.Module):
    """A hook, a __getstate__ and an attribute of the user's own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 1083)])
        self.head = nn.Linear(1083, 3)
        self.head.weight.requires_grad_(False)
        self.scratch = object()  # does not belong into a file
        self.layers[0].register_forward_hook(double)
        self.register_forward_pre_hook(shift, with_kwargs=True)

    def __getstate__(self):
        return {k: v for k, v in super().__getstate__().items() if k != "scratch"}

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    def encode(self, x):
        return self.layers[0](x)


def double(module, args, output):
    return output * 2


def shift(module, args, kwargs):
    return (args[0] + 1, *args[1:]), kwargs


def sharded(mesh, make, stage) -> nn.Module:
    model = zero_ext.shard(make(), stage, mesh=mesh, bucket_mb=1e-4)
    if isinstance(model, OwnState):
        zero_ext.register_forward_method(model, "encode")
    return model


def read(how, model):
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def attributes(module) -> dict[str, set[str]]:
    return {name: set(each.__dict__) for name, each in module.named_modules()}


@STAGES
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("make", [sequential, OwnState])
def test_it_has_the_attributes_and_values_of_a_plain_one(anywhere, rank, stage, how, make):
    model = sharded(anywhere, make, stage)
    with model.summon_full_params(writeback=False):
        twin = read(how, model)
    plain = read(how, make())
    assert attributes(twin) == attributes(plain)
    for actual, expected in zip(twin.parameters(), plain.parameters(), strict=True):
        assert_bits(actual, expected)
        assert type(actual) is nn.Parameter and actual.requires_grad == expected.requires_grad
    batch = rank_data((4, 5), rank)
    for each in (twin, plain):
        mean_square(each, batch).backward()
    for actual, expected in zip(twin.parameters(), plain.parameters(), strict=True):
        assert (actual.grad is None) == (expected.grad is None)
        if actual.grad is not None:
            assert_bits(actual.grad, expected.grad)
    mean_square(model, batch).backward()  # the sharded one is as it was
    assert hasattr(model, "summon_full_params")


@STAGES
@pytest.mark.parametrize("make", [sequential, OwnState])
def test_a_file_names_nothing_of_this_package(anywhere, stage, make):
    model = sharded(anywhere, make, stage)
    with model.summon_full_params(writeback=False):
        data = pickle.dumps(model)
    names = [str(value) for _, value, _ in pickletools.genops(data)]
    assert not [name for name in names if "zero_ext" in name]


@STAGES
def test_it_is_read_without_running_code(anywhere, stage):
    model = sharded(anywhere, sequential, stage)
    file = io.BytesIO()
    with model.summon_full_params(writeback=False):
        torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals(CLASSES):
        back = torch.load(file, weights_only=True)
    for actual, expected in zip(back.parameters(), sequential().parameters(), strict=True):
        assert_bits(actual, expected)


def test_a_part_of_it_is_plain_too(anywhere):
    model = sharded(anywhere, OwnState, 3)
    with model.summon_full_params(writeback=False):
        part = pickle.loads(pickle.dumps(model.layers[1]))
    assert set(part.__dict__) == set(pickle.loads(pickle.dumps(nn.Linear(2, 3))).__dict__)
    assert_bits(part.weight, OwnState().layers[1].weight)


def test_a_traced_module_that_copies_itself(anywhere):
    model = torch.fx.symbolic_trace(sequential())
    zero_ext.shard(model, 2, mesh=anywhere)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        mean_square(twin, rank_data((4, 5), 0)).backward()
        assert {type(p.grad) for p in twin.parameters()} == {torch.Tensor}


def test_hooks_of_the_user_stay_removable_after_unwrap(anywhere):
    model = sequential()
    handle = model[0].register_forward_hook(double)
    zero_ext.unwrap(zero_ext.shard(model, 3, mesh=anywhere))
    assert attributes(model) == attributes(sequential())
    handle.remove()
    assert not model[0]._forward_hooks
