"""Other wrappers that reduce gradients, around what is sharded and inside of it: named errors."""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from harness import mean_square, rank_batches, rank_data
from setups import both_ways, full_gradients, values_of
from torch import nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import zero_ext

pytestmark = [
    pytest.mark.dist,
    pytest.mark.host,
    pytest.mark.usefixtures("no_stale_meshes"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.last = nn.Linear(13, 7)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Parent(nn.Module):
    def __init__(self, net):
        super().__init__()
        torch.manual_seed(1)
        self.before, self.net = nn.Linear(7, 7), net

    def forward(self, x):
        return self.net(self.before(x))


def flattened(use_orig_params):
    return lambda module, group: FullyShardedDataParallel(
        module, group, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )


def over(function):
    return lambda module, group: function(module, mesh=DeviceMesh.from_group(group, "cpu"))


WRAPPERS = {
    "DistributedDataParallel": lambda m, group: DistributedDataParallel(m, process_group=group),
    "DataParallel": lambda m, _: DataParallel(m),
    "FullyShardedDataParallel": flattened(False),
    "FullyShardedDataParallel of its own parameters": flattened(True),
    "fully_shard": over(fully_shard),
    "replicate": lambda m, group: replicate(m, process_group=group),
    "replicate of FSDP": over(replicate_with_fsdp),
}
all_wrappers = pytest.mark.parametrize("name", WRAPPERS)


@pytest.fixture(params=["alone", "together"])
def ranks(request, rank, world, group):
    """A group of this rank alone, or of all."""
    if request.param == "together":
        return group
    return [dist.new_group([each]) for each in range(world)][rank]


def refused(name, rank, reads_released=False):
    """``replicate`` makes a DistributedDataParallel. One that reads a released parameter gets the
    error of that, which names the unit."""
    name = {"replicate": r"\w+ \(or replicate\)|\w+DataParallel"}.get(name, name.split()[0])
    unit = r", unit '(first|last)\.weight … \1\.bias'" if reads_released else ""
    text = rf"^zero_ext \[rank {rank}{unit}\]: .*({name}).* was put around parameters .* without "
    return pytest.raises(RuntimeError, match=text)


def sharded(stage, group):
    units = nn.Linear if stage == 3 else None
    mesh = DeviceMesh.from_group(group, "cpu")
    return zero_ext.shard(Net(), stage, mesh=mesh, units=units, bucket_mb=1e-6)


def trained(model, rank, optimizer=None):
    """The values after two steps. Each rank has data of its own."""
    optimizer = optimizer or zero_ext.optim.AdamW(model.parameters())
    for step in range(2):
        mean_square(model, rank_data((3, 7), rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@all_wrappers
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("inside", ["itself", "a child", "a parent"])
def test_a_wrapper_around_what_is_sharded_raises_in_the_next_forward(
    inside, stage, name, ranks, rank, group
):
    """Or when it is made, where it reads released parameters."""
    model = sharded(stage, ranks)
    parent = Parent(model)
    module = {"itself": model, "a child": model.last, "a parent": parent}[inside]
    x = torch.ones(2, 7)
    if name == "DataParallel":  # on the CPU it calls the module
        torch.testing.assert_close(DataParallel(parent)(x), parent(x))
        return
    optimizer = zero_ext.optim.SGD(model.parameters())
    # One rank alone releases nothing, and ``replicate`` of a child does nothing yet.
    reads = stage == 3 and ranks is group and (name, inside) != ("replicate", "a child")
    with refused(name, rank, reads):
        wrapped = WRAPPERS[name](module, ranks)
        loss = (model if inside == "a child" else wrapped)(x).sum()
        assert name == "replicate"  # which does nothing before its first forward
        loss.backward()
        optimizer.step()


@all_wrappers
def test_a_wrapped_module_is_not_sharded(name, ranks, rank):
    wrap, kind = WRAPPERS[name], name.split()[0]
    mesh = DeviceMesh.from_group(ranks, "cpu")
    wrapped = wrap(Net(), ranks)
    with pytest.raises(ValueError, match=f"^zero_ext: the module is wrapped in {kind}, "):
        zero_ext.shard(wrapped, 2, mesh=mesh)
    with pytest.raises(ValueError, match=f"^zero_ext: submodule 'net' is wrapped in {kind}, "):
        zero_ext.shard(Parent(wrapped), 2, mesh=mesh)
    wrapped(torch.ones(2, 7)).sum().backward()  # works as before


@both_ways
def test_parameters_that_another_wrapper_reduces_are_not_sharded(way, group, rank):
    model = Net()
    _ddp = DistributedDataParallel(model, process_group=group)
    with pytest.raises(ValueError, match="reduced by DistributedDataParallel already"):
        way.optimizer(model, group)
    for use_orig_params in (False, True):
        model = flattened(use_orig_params)(Net(), group)._fsdp_wrapped_module
        with pytest.raises(TypeError, match=r"'.*' is flattened by FullyShardedDataParallel"):
            way.optimizer(model, group)
    for cut in (fully_shard, replicate_with_fsdp):
        model = over(cut)(Net(), group)
        with pytest.raises(ValueError, match=r"'.*' is a DTensor that .*without fully_shard\(\)"):
            way.optimizer(model.first, group)


@pytest.mark.parametrize("name", ["DistributedDataParallel", "replicate"])
@pytest.mark.parametrize("inside", ["a parent", "a child"])
def test_a_wrapper_around_what_an_optimizer_alone_shards_raises_in_the_step(
    inside, name, ranks, rank
):
    model = Net()
    optimizer = zero_ext.optim.AdamW(model.named_parameters(), stage=1, process_group=ranks)
    before = values_of(model)
    wrapped = WRAPPERS[name](Parent(model) if inside == "a parent" else model.last, ranks)
    if inside == "a child":
        wrapped, model.last = nn.Sequential(model), wrapped
    with refused(name, rank):
        wrapped(torch.ones(2, 7)).sum().backward()
        optimizer.step()
    after = values_of(model)
    assert all(map(torch.equal, before.values(), after.values()))


def test_an_optimizer_of_what_replicate_has_taken_is_found_in_the_step(group, rank):
    """Before its first forward, ``replicate`` has done nothing to the parameters."""
    model = replicate(Net(), process_group=group)
    optimizer = zero_ext.optim.AdamW(model.named_parameters(), stage=1, process_group=group)
    with refused("replicate", rank):
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_modules_are_no_exception(stage, group, rank):
    x = torch.ones(2, 7)
    with refused("DistributedDataParallel", rank, stage == 3):
        torch.compile(DistributedDataParallel(sharded(stage, group), process_group=group))(x)
    with refused("DistributedDataParallel", rank, stage == 3):
        DistributedDataParallel(torch.compile(sharded(stage, group)), process_group=group)(x)
    with refused("fully_shard", rank, stage == 3):
        over(fully_shard)(torch.compile(sharded(stage, group)), group)(x)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ddp_may_leave_out_what_is_sharded(stage, group, rank, world):
    """Its documented way: the parent's own parameters are averaged by DDP, the others here."""
    parent = Parent(sharded(stage, group))
    plain = copy.deepcopy(Parent(Net()))
    names = {name for name, _ in parent.named_parameters() if name.startswith("net.")}
    buffers = {f"net.{name}" for name, _ in parent.net.named_buffers()}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parent, names | buffers)
    ddp = DistributedDataParallel(parent, process_group=group)
    mean_square(ddp, rank_data((3, 7), rank)).backward()
    for batch in rank_batches((3, 7), world)[0]:
        (mean_square(plain, batch) / world).backward()
    torch.testing.assert_close(parent.before.weight.grad, plain.before.weight.grad)
    for name, gradient in full_gradients(parent.net).items():
        torch.testing.assert_close(gradient, plain.net.get_parameter(name).grad)


def test_plain_modules_again_and_other_uses_of_torchs_registry(group, rank):
    model = sharded(2, group)
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        over(fully_shard)(plain, group)
    assert FullyShardedDataParallel.fsdp_modules(Parent(model)) == []
    assert get_model_state_dict(model).keys() == Net().state_dict().keys()
    for layer in (model.first, model.last):  # activation checkpointing
        checkpoint(layer)
    with pytest.raises(AssertionError, match=re.compile("once", re.IGNORECASE)):
        checkpoint(model.first)
    expected = sharded(2, group)
    assert_equal(trained(model, rank), trained(expected, rank))
    zero_ext.unwrap(model)
    over(fully_shard)(model, group)(torch.ones(2, 7))
