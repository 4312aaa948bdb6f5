"""What users write to ``p.grad``: on every rank the same, the ranks' average or None."""

import pytest
import torch
import torch.distributed as dist
from harness import mean_square, rank_data
from setups import (
    Way,
    assert_same_values,
    backward,
    backward_of_all,
    full_master,
    small_mlp,
    train_batch,
    values_of,
)

import zero_ext

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2)]

STAGES = pytest.mark.parametrize("way", [Way("shard", s) for s in range(4)], ids=str)
ON_HOST = torch.get_default_device().type == "cpu"
LR = 0.05


def gradients_by_hand(rank: int, step: int = 0):
    """As pipeline schedules do: of the inputs in one pass, of the weights in another one."""
    plain = small_mlp()
    loss = mean_square(plain, train_batch(rank, step))
    return torch.autograd.grad(loss, list(plain.parameters()))


def average(gradient: torch.Tensor, world: int) -> torch.Tensor:
    here = gradient.cpu()
    dist.all_reduce(here)
    return (here / world).to(gradient.device)


def write_own(model, rank, world):
    for parameter, gradient in zip(model.parameters(), gradients_by_hand(rank), strict=True):
        parameter.grad = gradient


def write_one_alone(model, rank, world):
    """Only one rank writes, and one parameter."""
    if rank == world - 1:
        model.layers[1].bias.grad = torch.ones(7)


def write_before_a_backward(model, rank, world):
    model.layers[1].bias.grad = rank_data([7], rank)
    backward(model, rank)


def replace_what_is_shown(model, rank, world):
    backward(model, rank)
    model.layers[1].bias.grad = rank_data([7], rank)


def set_data_of_some_that_agree(model, rank, world):
    """The first one has the same values on every rank, the other one has not."""
    model.layers[0].bias.grad = torch.ones(7)
    model.layers[1].bias.grad = torch.zeros(7)
    model.layers[1].bias.grad.data = rank_data([7], rank)


def set_to_none_alone(model, rank, world):
    backward(model, rank)
    if rank == world - 1:
        model.layers[1].bias.grad = None


def set_to_none_between_backwards(model, rank, world):
    """The others add to the first one's."""
    backward(model, rank)
    if rank == 0:
        model.layers[1].bias.grad = None
    backward(model, rank)


def add_own_values(model, rank, world):
    backward(model, rank)
    model.layers[1].bias.grad += rank_data([7], rank)


def scale_by_own_count(model, rank, world):
    """Through the alias that many scripts take."""
    backward(model, rank)
    model.layers[1].bias.grad.data.mul_(1.0 / (3 + rank))


def add_own_noise_out_of_place(model, rank, world):
    backward(model, rank)
    bias = model.layers[1].bias
    bias.grad = bias.grad.clone() + 0.1 * rank_data([1], rank)


def scale_all_at_once(model, rank, world):
    backward(model, rank)
    gradients = [p.grad for p in model.layers[1].parameters()]
    torch._foreach_mul_(gradients, [1.0, 2.0 + rank])


def copy_own_values(model, rank, world):
    backward(model, rank)
    model.layers[1].bias.grad.copy_(rank_data([7], rank))


def change_what_one_rank_has_alone(model, rank, world):
    """Before the backward of another rank, whose slices stay as they are."""
    backward(model, rank)
    if rank == 0:
        model.layers[1].bias.grad *= 0.5


def set_to_none_before_serving(model, rank, world):
    """Of the ranks without a backward there is nothing yet to set to None."""
    if rank == 0:
        backward(model, rank)
    model.layers[1].bias.grad = None


WRONG = [
    (write_own, "layers.0.weight"),
    (write_one_alone, "layers.1.bias"),
    (write_before_a_backward, "layers.1.bias"),
    (replace_what_is_shown, "layers.1.bias"),
    (set_data_of_some_that_agree, "layers.1.bias"),
    (set_to_none_alone, "layers.1.bias"),
    (set_to_none_between_backwards, "layers.1.bias"),
    (set_to_none_before_serving, "layers.1.bias"),
]


# In stage 0 each rank has all of a gradient, and may do with it what it likes, as with DDP.
CHANGED = [
    add_own_values,
    scale_by_own_count,
    add_own_noise_out_of_place,
    scale_all_at_once,
    copy_own_values,
    change_what_one_rank_has_alone,
]


@pytest.mark.host  # a device's step finds it later, without a name
@STAGES
def test_gradients_that_differ_raise_by_name_on_every_rank(way, group, rank, world):
    model = small_mlp()
    optimizer = way.optimizer(model, group, lr=LR)
    before = [full_master(p) for p in model.parameters()]
    changed = [(change, "layers.1.bias") for change in CHANGED] if way.stage > 0 else []
    for write, name in [*WRONG, *changed]:
        write(model, rank, world)
        message = rf"rank {rank}, unit .*: step\(\): \.grad of parameter '{name}' was set to "
        for _ in range(2):  # nothing else mends it
            with pytest.raises(RuntimeError, match=message):
                optimizer.step()
        if way.stage > 0:
            with pytest.raises(RuntimeError, match=rf"clip_grad_norm_\(\): \.grad of .*'{name}'"):
                optimizer.clip_grad_norm_(1.0)
        model.zero_grad()
    after = [full_master(p) for p in model.parameters()]
    assert all(map(torch.equal, after, before))
    write_own(model, rank, world)
    with pytest.raises(RuntimeError, match=r"all_reduce\(\) and divide it by"):
        optimizer.step()
    for parameter, gradient in zip(model.parameters(), gradients_by_hand(rank), strict=True):
        parameter.grad = average(gradient, world)
    optimizer.step()
    expected = small_mlp()
    backward_of_all(expected, world)
    torch.optim.AdamW(expected.parameters(), lr=LR).step()
    assert_same_values(model, expected)


@STAGES
def test_a_step_that_is_given_up_by_hand_begins_anew(way, group, rank, world):
    """Though one rank alone runs a backward afterwards."""
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, zero_ext.optim.SGD, lr=LR)
    backward(model, rank)
    for parameter in model.parameters():
        parameter.grad = None
    if rank == 0:
        backward(model, rank, 1)
    optimizer.step()
    (mean_square(expected, train_batch(0, 1)) / world).backward()
    torch.optim.SGD(expected.parameters(), lr=LR).step()
    assert_same_values(model, expected)


@STAGES
def test_the_same_values_on_all_ranks_are_the_gradient(way, group, rank, world):
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, zero_ext.optim.SGD, lr=LR)
    reference = torch.optim.SGD(expected.parameters(), lr=LR)
    for step in range(3):
        if step == 1:  # beside a backward's
            backward(model, rank, step)
        for p, e in zip(model.parameters(), expected.parameters(), strict=True):
            e.grad = rank_data(e.shape, 0, step)
            p.grad = e.grad.clone()
        if step == 2:
            optimizer.clip_grad_norm_(0.5)
            torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    assert_same_values(model, expected)


@pytest.mark.parametrize("way", [Way("shard", s) for s in range(1, 4)], ids=str)
def test_what_mends_a_changed_gradient(way, group, rank, world):
    """Equal values take the place of unequal ones, or the gradient begins anew; and equal changes
    of equal values, before and after another backward, are no error."""
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, zero_ext.optim.SGD, lr=LR)
    reference = torch.optim.SGD(expected.parameters(), lr=LR)
    mends = [
        lambda p: p.grad.zero_().add_(0.25).mul_(torch.full_like(p.grad.full_tensor(), 0.5)),
        lambda p: p.grad.copy_(torch.full(p.shape, 0.125)),
        lambda p: setattr(p, "grad", torch.full(p.shape, 0.125)),
    ]
    for step, mend in enumerate(mends):
        backward(model, rank, step)
        for p, e in zip(model.parameters(), expected.parameters(), strict=True):
            p.grad.add_(rank_data(p.shape, rank))
            mend(p)
            e.grad = torch.full(e.shape, 0.125)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    backward(model, rank, 3)
    for p in model.parameters():
        p.grad.add_(rank_data(p.shape, rank))
    optimizer.zero_grad()
    expected.zero_grad()
    for step in (4, 5):  # the second one adds to the first, which was changed
        backward(model, rank, step)
        backward_of_all(expected, world, step)
        for p, e in zip(model.parameters(), expected.parameters(), strict=True):
            noise = rank_data(p.shape, 7)
            p.grad = p.grad.clone().add_(noise).mul_(0.5)
            e.grad.add_(noise).mul_(0.5)
            p.grad.to_local().add_(0.0 * rank)  # a rank's own slice is its own
    optimizer.step()
    reference.step()
    assert_same_values(model, expected)


@pytest.mark.skipif(ON_HOST, reason="the host finds it in the step itself")
@STAGES
def test_a_device_finds_gradients_that_differ_in_the_next_step(way, group, rank, world):
    model = small_mlp()
    optimizer = way.optimizer(model, group, lr=LR)
    before = values_of(model)
    write_own(model, rank, world)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"or the gradients that were written to p\.grad"):
        _ = optimizer.skipped_steps
    assert all(torch.equal(before[name], value) for name, value in values_of(model).items())
