"""The user's own hooks on sharded parameters and on optimizers: they run, see what plain PyTorch
shows them, and break nothing.
"""

import pytest
import torch
from harness import assert_bits, mean_square
from setups import (
    Way,
    assert_same_gradients,
    assert_same_values,
    backward,
    backward_of_all,
    both_ways,
    shard_and_optimizer,
    small_mlp,
    train_batch,
)
from torch import nn

import zero_ext

pytestmark = pytest.mark.dist

before_or_after = pytest.mark.parametrize("when", ["before", "after"])


def shard_with_hooks(way: Way, group, when: str, attach, dtype=torch.float32):
    """A sharded model to which ``attach`` added hooks, before or after it was sharded."""
    model = small_mlp(dtype)
    if when == "before":
        attach(model)
    optimizer = way.optimizer(model, group)
    if when == "after":
        attach(model)
    return model, optimizer


def own_gradients(rank: int, dtype, *, step: int = 0) -> dict[str, torch.Tensor]:
    """What one process gets from this rank's batch alone."""
    model = small_mlp(dtype)
    backward(model, rank, step)
    return {name: p.grad for name, p in model.named_parameters()}


@both_ways
@before_or_after
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hook_sees_this_ranks_gradient_in_its_own_dtype(way, when, dtype, group, rank):
    seen = {}

    def attach(model):
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, name=name: seen.update({name: grad.clone()}))

    model, _ = shard_with_hooks(way, group, when, attach, dtype)
    for step in range(2):  # in the second, .grad holds a sum that the hook must not see
        seen.clear()
        backward(model, rank, step)
        expected = own_gradients(rank, dtype, step=step)
        assert seen.keys() == expected.keys()
        for name, gradient in expected.items():
            assert type(seen[name]) is torch.Tensor
            assert_bits(seen[name], gradient, name)


@both_ways
@before_or_after
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_post_accumulate_hook_sees_the_plain_gradient(way, when, dtype, group, rank):
    """Of this micro-batch alone: earlier ones are in the library's sum."""
    seen = {}

    def attach(model):
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.update({name: (type(p.grad), p.grad.clone())})
            )

    model, _ = shard_with_hooks(way, group, when, attach, dtype)
    for step in range(2):
        seen.clear()
        backward(model, rank, step)
        for name, gradient in own_gradients(rank, dtype, step=step).items():
            kind, value = seen[name]
            assert kind is torch.Tensor
            assert_bits(value, gradient, name)


@both_ways
@before_or_after
def test_what_a_hook_returns_is_the_gradient(way, when, group, rank, world):
    def attach(model):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: 3 * grad)

    model, optimizer = shard_with_hooks(way, group, when, attach)
    expected = small_mlp()
    attach(expected)
    reference = torch.optim.AdamW(expected.parameters())
    for step in range(2):
        backward(model, rank, step)
        backward_of_all(expected, world, step)
        assert_same_gradients(model, expected)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_same_values(model, expected)


@both_ways
@before_or_after
def test_what_a_post_accumulate_hook_writes_is_the_gradient(way, when, group, rank, world):
    def attach(model):
        def double(parameter):
            parameter.grad.mul_(2)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(double)

    model, _ = shard_with_hooks(way, group, when, attach)
    expected = small_mlp()
    backward(model, rank)
    backward_of_all(expected, world)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.grad.mul_(2)
    assert_same_gradients(model, expected)


@both_ways
def test_post_accumulate_hook_that_drops_the_gradient_leaves_the_parameter_alone(way, group, rank):
    model = small_mlp()
    optimizer = way.optimizer(model, group)

    def drop(parameter):
        parameter.grad = None

    model.layers[0].weight.register_post_accumulate_grad_hook(drop)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, rank)
    assert model.layers[0].weight.grad is None
    assert model.layers[0].bias.grad is not None
    optimizer.step()
    assert_bits(model.layers[0].weight, before[0])
    assert not torch.equal(model.layers[0].bias, before[1])


@shard_and_optimizer
def test_removed_hook_runs_no_more(way, group, rank):
    model = small_mlp()
    _optimizer = way.optimizer(model, group)
    calls = []
    weight = model.layers[0].weight
    handles = [
        weight.register_hook(lambda grad: calls.append("hook")),
        weight.register_post_accumulate_grad_hook(lambda p: calls.append("post")),
    ]
    backward(model, rank)
    for handle in handles:
        handle.remove()
    backward(model, rank)
    assert calls == ["hook", "post"]


@shard_and_optimizer
def test_hook_on_an_activation_changes_every_gradient_below_it(way, group, rank, world):
    def loss(model, batch):
        hidden = model.layers[0](batch)
        hidden.register_hook(lambda grad: 2 * grad)
        return model.layers[2](torch.tanh(model.layers[1](hidden))).square().mean()

    model, expected = small_mlp(), small_mlp()
    _optimizer = way.optimizer(model, group)
    backward(model, rank, loss_fn=loss)
    backward_of_all(expected, world, loss_fn=loss)
    assert_same_gradients(model, expected)


@shard_and_optimizer
def test_full_backward_hooks_see_and_replace_gradients(way, group, rank, world):
    calls = []

    def halve(module, grad_input, grad_output):
        calls.append("halve")
        return tuple(None if g is None else g / 2 for g in grad_input)

    def attach(model):
        model.layers[1].register_full_backward_hook(halve)
        model.register_full_backward_hook(lambda *args: calls.append("leave"))
        model.register_full_backward_pre_hook(lambda *args: calls.append("enter"))

    def loss(model, batch):
        return model(batch.requires_grad_()).square().mean()

    model, expected = small_mlp(), small_mlp()
    attach(model)
    _optimizer = way.optimizer(model, group)
    backward(model, rank, loss_fn=loss)
    assert calls == ["enter", "halve", "leave"]
    attach(expected)
    backward_of_all(expected, world, loss_fn=loss)
    assert_same_gradients(model, expected)


@shard_and_optimizer
def test_forward_hooks_run_around_the_sharded_module(way, group, rank):
    order = []
    model = small_mlp()
    model.register_forward_pre_hook(lambda *args: order.append("enter"))
    _optimizer = way.optimizer(model, group)
    model.register_forward_hook(lambda *args: order.append("leave"))
    backward(model, rank)
    assert order == ["enter", "leave"]


@shard_and_optimizer
def test_hook_may_read_gradients_and_counters(way, group, rank):
    """Nothing is locked while a user's code runs."""
    model = small_mlp()
    optimizer = way.optimizer(model, group)
    seen = []

    def look(grad):
        seen.append([p.grad is None for p in model.parameters()])
        zero_ext.stats(optimizer)

    model.layers[1].weight.register_hook(look)
    backward(model, rank)
    backward(model, rank, 1)
    assert len(seen) == 2


@shard_and_optimizer
def test_grad_of_a_hooked_loss_runs_no_reduction(way, group, rank):
    """torch.autograd.grad accumulates into no parameter, so there is nothing to reduce."""
    model = small_mlp()
    optimizer = way.optimizer(model, group)
    grads = torch.autograd.grad(mean_square(model, train_batch(rank)), list(model.parameters()))
    for gradient, expected in zip(grads, own_gradients(rank, torch.float32).values(), strict=True):
        assert_bits(gradient, expected)
    assert zero_ext.stats(optimizer)["backwards"] == 0
    assert all(p.grad is None for p in model.parameters())


@both_ways
@pytest.mark.parametrize("optimizer_class", [zero_ext.optim.AdamW, zero_ext.optim.SGD])
def test_step_hooks_run_around_every_step(way, optimizer_class, group, rank):
    model = small_mlp()
    optimizer = way.optimizer(model, group, optimizer_class, lr=0.1)
    before = model.layers[0].weight.detach().clone()
    order = []

    def pre(opt, args, kwargs):
        assert opt is optimizer
        order.append(("pre", torch.equal(model.layers[0].weight, before)))

    def post(opt, args, kwargs):
        order.append(("post", torch.equal(model.layers[0].weight, before)))

    handles = [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]
    backward(model, rank)
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert order == [("pre", True), ("post", False)]


@both_ways
def test_step_pre_hook_may_change_the_gradients(way, group, rank, world):
    """Clipping is often done there."""

    def clip(optimizer, args, kwargs):
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, zero_ext.optim.SGD, lr=1.0)
    reference = torch.optim.SGD(expected.parameters(), lr=1.0)
    backward(model, rank)
    backward_of_all(expected, world)
    for each in (optimizer, reference):
        each.register_step_pre_hook(clip)
        each.step()
    assert_same_values(model, expected)


@shard_and_optimizer
def test_state_dict_hooks_run(way, group):
    optimizer = way.optimizer(small_mlp(), group)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("save"))
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", "load", "loaded"]
