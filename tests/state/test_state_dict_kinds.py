"""state_dict() of stage 3 while units are in memory: one kind on every rank, and no lost write."""

import threading

import pytest
import torch
from harness import MLP, assert_bits, gathers_together, mean_square, needs_own_gathers
from setups import train_batch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import zero_ext
from zero_ext.tensor.shard_tensor import ShardTensor

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2)]

SEPARATE = 1e-6  # MiB: every module is a unit
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
OFFLOAD = pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])


def sharded(mesh, dtype, offload=False) -> nn.Module:
    policy = CPUOffloadPolicy() if offload else None
    return zero_ext.shard(
        MLP(13, dtype=dtype), 3, mesh=mesh, bucket_mb=SEPARATE, offload_policy=policy
    )


def kinds(model) -> set[type]:
    return {type(value) for value in model.state_dict().values()}


def values(model) -> list[torch.Tensor]:
    """What a forward would compute with."""
    return [zero_ext.full_tensor(p).cpu() for p in model.parameters()]


def doubled(dtype) -> list[torch.Tensor]:
    """zero_ext.full_tensor() of plain parameters that were doubled."""
    return [(2 * p.detach()).float().cpu() for p in MLP(13, dtype=dtype).parameters()]


def assert_all_bits(actual, expected) -> None:
    for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_bits(a, e, f"value {k}")


@DTYPES
@OFFLOAD
def test_one_rank_keeps_a_graph(mesh, rank, dtype, offload):
    """What is written through the tensors counts in the next forward, and the graph can be used."""
    model = sharded(mesh, dtype, offload)
    loss = mean_square(model, train_batch(rank, 0, dtype=dtype))
    together = gathers_together(offload=offload)
    loss.backward(retain_graph=together or rank == 0)
    assert kinds(model) == {ShardTensor}
    for value in model.state_dict().values():
        value.mul_(2)
    model.reshard()  # before another rank gathers them
    if not together:
        plain = MLP(13, dtype=dtype)
        with torch.no_grad():
            for p in plain.parameters():
                p.mul_(2)
            batch = train_batch(rank, 1, dtype=dtype)
            assert_bits(model(batch), plain(batch), "the next forward")
            model.zero_grad()
    model.zero_grad()
    assert_all_bits(values(model), doubled(dtype))


@DTYPES
@OFFLOAD
def test_inside_a_forward(mesh, rank, dtype, offload):
    """Of the unit that computes, half is written through the tensors and half to the parameter."""
    model = sharded(mesh, dtype, offload)
    seen = []

    def write(module, args):
        state = model.state_dict()
        seen.append({type(value) for value in state.values()})
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False):
                [key] = [k for k, p in model.named_parameters() if p is parameter]
                state[key].to_local().mul_(2)  # this rank's part
                assert torch.equal(parameter, parameter)  # it can be read
                assert name in key

    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    handles = [layer.register_forward_pre_hook(write) for layer in layers]
    with torch.no_grad():
        model(train_batch(rank, 0, dtype=dtype))
    for handle in handles:
        handle.remove()
    assert len(seen) == len(layers) and all(each == {ShardTensor} for each in seen)
    assert_all_bits(values(model), doubled(dtype))


@DTYPES
def test_writes_to_both_inside_a_forward(mesh, rank, dtype):
    """Elements that were written to the parameter, and others through a tensor that is held."""
    model = sharded(mesh, dtype)
    held = model.state_dict()
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    [key] = [k for k, p in model.named_parameters() if p is layer.weight]
    begin, end = held[key].held_range
    positions = torch.arange(layer.weight.numel())
    expected = dict(MLP(13, dtype=dtype).named_parameters())[key].detach().float().clone().view(-1)
    expected[positions % 3 == 0] = 7.0
    expected[positions % 3 == 1] = 5.0

    def write(module, args):
        with torch.no_grad():
            module.weight.view(-1)[(positions % 3 == 0).to(module.weight.device)] = 7.0
            own = held[key].to_local()
            own[(positions[begin:end] % 3 == 1).to(own.device)] = 5.0

    handle = layer.register_forward_pre_hook(write)
    with torch.no_grad():
        model(train_batch(rank, 0, dtype=dtype))
    handle.remove()
    assert_bits(zero_ext.full_tensor(layer.weight).view(-1), expected, "the weight")
    assert_bits(held[key].full_tensor().float().view(-1), expected, "the tensor that is held")


def test_tensors_that_are_held_while_the_model_trains(mesh, rank):
    """They show the parameters after each step, and writes to them count."""
    model, other = sharded(mesh, torch.bfloat16), sharded(mesh, torch.bfloat16)
    held = model.state_dict()
    runs = [(m, zero_ext.optim.AdamW(m.parameters(), lr=0.1)) for m in (model, other)]
    for step in range(3):
        for m, optimizer in runs:
            mean_square(m, train_batch(rank, step, dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for (name, value), shard in zip(other.state_dict().items(), held.values(), strict=True):
            assert_bits(shard.full_tensor(), value.full_tensor(), name)
        for state in (held, other.state_dict()):
            for value in state.values():
                value.add_(0.5)
        for m, _ in runs:
            m.reshard()


def test_from_a_second_thread_while_the_model_computes(mesh, rank):
    """Its tensors stay readable, and have the values of the last step."""
    needs_own_gathers(3)
    model = sharded(mesh, torch.float32)
    expected = [p.to_local().clone() for p in model.state_dict().values()]
    stop, seen = threading.Event(), []

    def look():
        while not stop.is_set():
            state = model.state_dict()
            seen.append({type(value) for value in state.values()})
            for value, own in zip(state.values(), expected, strict=True):
                assert_bits(value.to_local(), own)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for step in range(20):
            mean_square(model, train_batch(rank, step)).backward(retain_graph=step % 3 == rank)
    finally:
        stop.set()
        thread.join()
    assert seen and all(each == {ShardTensor} for each in seen)
