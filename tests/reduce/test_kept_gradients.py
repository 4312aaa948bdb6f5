"""What a user has of a gradient keeps its values when the sums lose them, as in PyTorch."""

import gc

import pytest
import torch
from reference import own_values
from setups import backward, both_ways, small_mlp

import zero_ext
from zero_ext.tensor.shard_tensor import ShardTensor


def make(way, anywhere, rank):
    model = small_mlp()
    group = None if anywhere is None else anywhere.get_group()
    optimizer = way.optimizer(model, group, lr=0.05)
    backward(model, rank, 0)
    return model, optimizer


@both_ways
@pytest.mark.parametrize(
    "keep",
    [
        lambda grad: grad,
        lambda grad: grad.to_local() if isinstance(grad, ShardTensor) else grad.view(-1),
        lambda grad: grad.detach(),
    ],
    ids=["itself", "local", "detached"],
)
@pytest.mark.parametrize("drop", ["optimizer", "module", "None", "replaced", "deleted"])
def test_they_outlive_what_drops_them(way, keep, drop, anywhere, rank):
    model, optimizer = make(way, anywhere, rank)
    kept = [keep(p.grad) for p in model.parameters()]
    expected = [own_values(each).clone() for each in kept]
    if drop == "optimizer":
        optimizer.step()
        optimizer.zero_grad()
    elif drop == "module":
        model.zero_grad()
    elif drop == "deleted":
        del model, optimizer
        gc.collect()
    for parameter in model.parameters() if drop in ("None", "replaced") else ():
        parameter.grad = None if drop == "None" else torch.ones(parameter.shape)
    if drop != "deleted":
        backward(model, rank, 1)
        optimizer.step()
    for each, values in zip(kept, expected, strict=True):
        assert torch.equal(own_values(each), values)
    if drop == "deleted":
        return
    for each, parameter in zip(kept, model.parameters(), strict=True):
        assert parameter.grad is not each
        own_values(each).fill_(7.0)
        assert not (own_values(parameter.grad) == 7.0).any()


@both_ways
def test_they_are_copied_once(way, anywhere, rank):
    model, optimizer = make(way, anywhere, rank)
    kept = next(model.parameters()).grad
    expected, before = own_values(kept).clone(), None
    for step in range(1, 4):
        optimizer.zero_grad()
        backward(model, rank, step)
        shown = [id(p.grad) for p in model.parameters()]
        if step > 1:
            assert shown == before
        before = shown
    assert torch.equal(own_values(kept), expected)


@both_ways
def test_they_go_on_where_pytorchs_do(way, anywhere, rank):
    """Another backward and zero_grad(set_to_none=False) write to the same tensor."""
    model, optimizer = make(way, anywhere, rank)
    kept = [p.grad for p in model.parameters()]
    backward(model, rank, 1)
    for each, parameter in zip(kept, model.parameters(), strict=True):
        assert parameter.grad is each
    optimizer.zero_grad(set_to_none=False)
    for each, parameter in zip(kept, model.parameters(), strict=True):
        assert parameter.grad is each and not own_values(each).any()


@pytest.mark.parametrize("stage", [0, 1])
def test_they_outlive_local_sums(stage, anywhere, rank):
    """Whose memory is another one: the reduced sums move when a backward is the first local."""
    model = zero_ext.shard(small_mlp(), stage, mesh=anywhere, bucket_mb=1e-3)
    backward(model, rank, 0)
    shown = [own_values(p.grad) for p in model.parameters()]
    expected = [each.clone() for each in shown]
    kept = next(model.parameters()).grad
    model.zero_grad()
    first = own_values(kept).clone()
    assert torch.equal(first, expected[0])
    with model.no_sync():
        backward(model, rank, 1)
    backward(model, rank, 2)
    assert torch.equal(own_values(kept), first)


@pytest.mark.parametrize("stage", [0, 1])
def test_they_follow_sums_that_move(stage, anywhere, rank):
    """To where there is room for local ones: what is kept is still the gradient then."""
    model = zero_ext.shard(small_mlp(), stage, mesh=anywhere, bucket_mb=1e-3)
    twin = zero_ext.shard(small_mlp(), stage, mesh=anywhere, bucket_mb=1e-3)
    backward(model, rank, 0)
    backward(twin, rank, 0)
    kept = [p.grad for p in model.parameters()]
    aliases = [own_values(each)[:] for each in kept]
    for each in (model, twin):
        with each.no_sync():
            backward(each, rank, 1)
        backward(each, rank, 2)
    for each, alias, mine, theirs in zip(
        kept, aliases, model.parameters(), twin.parameters(), strict=True
    ):
        assert mine.grad is each
        assert torch.equal(alias, own_values(theirs.grad))


def test_they_come_back_with_offloaded_states(device, anywhere, rank):
    model = zero_ext.shard(small_mlp(), 2, mesh=anywhere)
    backward(model, rank, 0)
    kept = [own_values(p.grad)[:] for p in model.parameters()]
    expected = [each.clone() for each in kept]
    zero_ext.offload_states(model, include=["grad"])
    if device.type != "cpu":
        with pytest.raises(RuntimeError, match="offloaded"):
            max(kept, key=torch.Tensor.numel).clone()
    zero_ext.reload_states(model)
    assert all(map(torch.equal, kept, expected))
    model.zero_grad()
    assert all(map(torch.equal, kept, expected))
