"""What users do to parameters, gradients and optimizers that are sharded, against one process."""

import contextlib
import copy
import io

import pytest
import torch
from harness import MLP, assert_bits, rank_data
from setups import (
    MLP_INPUT,
    Way,
    assert_same_gradients,
    assert_same_values,
    backward,
    backward_of_all,
    both_ways,
    full,
    full_gradients,
    full_master,
    shard_and_optimizer,
    small_mlp,
)
from torch import nn

import zero_ext
from zero_ext.engine.registry import find

pytestmark = pytest.mark.dist

LR = 0.05


def make(way: Way, group, dtype=torch.float32, **kwargs):
    """A sharded model and its optimizer, a plain model and torch's: of the same values."""
    model, expected = small_mlp(dtype), small_mlp(dtype)
    optimizer = way.optimizer(model, group, lr=LR, **kwargs)
    return model, optimizer, expected, torch.optim.AdamW(expected.parameters(), lr=LR, **kwargs)


class Steps:
    """The same training on both sides, step by step."""

    def __init__(self, way: Way, group, rank: int, world: int, **kwargs):
        self.rank, self.world, self.number = rank, world, 0
        self.model, self.optimizer, self.expected, self.reference = make(way, group, **kwargs)

    def backward(self, micro: int = 0):
        backward(self.model, self.rank, self.number, micro)
        backward_of_all(self.expected, self.world, self.number, micro)

    def step(self):
        self.optimizer.step()
        self.reference.step()
        self.optimizer.zero_grad()
        self.reference.zero_grad()
        self.number += 1

    def run(self, steps: int = 1):
        for _ in range(steps):
            self.backward()
            self.step()

    def on_both(self, change):
        with torch.no_grad():
            change(self.model)
            change(self.expected)

    def check(self):
        assert_same_values(self.model, self.expected)


@pytest.fixture
def steps(way, group, rank, world) -> Steps:
    return Steps(way, group, rank, world)


# Writes to parameters


def multiply(model):
    for parameter in model.parameters():
        parameter.mul_(0.5)


def copy_into_data(model):
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(rank_data(parameter.shape, 100 + seed))


def replace_data(model):
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = rank_data(parameter.shape, 200 + seed)


def write_one_element(model):
    for parameter in model.parameters():
        parameter.view(-1)[-1] = 3.0


def load(model):
    state = {
        name: rank_data(value.shape, 300 + seed)
        for seed, (name, value) in enumerate(model.state_dict().items())
    }
    model.load_state_dict(state)


def clamp(model):
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).clamp(-0.1, 0.1), model.parameters()
    )


@both_ways
@pytest.mark.parametrize(
    "change", [multiply, copy_into_data, replace_data, write_one_element, load, clamp]
)
def test_next_step_starts_from_what_was_written(steps, change):
    steps.run(2)
    steps.on_both(change)
    steps.run(2)
    steps.check()


@both_ways
def test_write_between_backward_and_step_is_stepped_from(steps):
    steps.backward()
    steps.on_both(multiply)
    steps.step()
    steps.run()
    steps.check()


@both_ways
def test_write_before_the_first_step_reaches_the_master(steps):
    steps.on_both(copy_into_data)
    steps.run(2)
    steps.check()


@both_ways
def test_written_elements_reach_the_fp32_master_and_others_keep_their_bits(way, group, rank):
    model = small_mlp(torch.bfloat16)
    optimizer = way.optimizer(model, group, zero_ext.optim.SGD, lr=0.0)
    for parameter in model.parameters():
        find(parameter)[0].engine.master_slice(find(parameter)[1]).mul_(1 + 2**-12)
    masters = [full_master(p) for p in model.parameters()]
    written = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), written, strict=True):
            values.view(-1)[::2] = 0.375
            parameter.copy_(values)

    backward(model, rank)
    optimizer.step()  # with a learning rate of 0 it changes nothing else

    for parameter, master in zip(model.parameters(), masters, strict=True):
        expected = master.clone()
        expected.view(-1)[::2] = 0.375
        assert_bits(full_master(parameter), expected)


@both_ways
def test_ema_swap_and_back_keeps_every_bit_of_the_master(way, group, rank):
    model, twin = small_mlp(torch.bfloat16), small_mlp(torch.bfloat16)
    optimizer = way.optimizer(model, group, lr=LR)
    twin_optimizer = way.optimizer(twin, group, lr=LR)
    for step in range(4):
        for m, o in ((model, optimizer), (twin, twin_optimizer)):
            backward(m, rank, step)
            o.step()
            o.zero_grad()
        live = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: 0.5 * value for name, value in live.items()})
        with torch.no_grad():
            model(rank_data(MLP_INPUT, rank, dtype=torch.bfloat16))
        model.load_state_dict(live)
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert_bits(parameter, expected)
        assert_bits(full_master(parameter), full_master(expected))


@both_ways
def test_training_on_the_averaged_weights_starts_from_them_in_fp32(way, group, rank):
    model = small_mlp(torch.bfloat16)
    optimizer = way.optimizer(model, group, zero_ext.optim.SGD, lr=0.0)
    backward(model, rank)
    optimizer.step()
    averaged = {name: value * 0.3 for name, value in model.state_dict().items()}
    model.load_state_dict(averaged)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert_bits(full_master(parameter), averaged[name].float(), name)


@pytest.mark.parametrize("way", [Way("shard", 1), Way("shard", 2)], ids=str)
def test_load_state_dict_with_assign_is_refused_by_name(way, group, rank):
    """It puts other Parameters in the place of those that are sharded."""
    model = small_mlp()
    _optimizer = way.optimizer(model, group)
    state = {name: rank_data(v.shape, 300) for name, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match=r"'layers\.0\.weight' was replaced by another one"):
        backward(model, rank)


# Gradients


@both_ways
def test_gradients_edited_in_place_are_stepped_with(steps):
    steps.backward()
    steps.on_both(lambda model: [p.grad.mul_(0.25) for p in model.parameters()])
    assert_same_gradients(steps.model, steps.expected)
    steps.step()
    steps.check()


@both_ways
def test_edited_gradients_are_added_to_by_the_next_backward(steps):
    steps.backward(0)
    steps.on_both(lambda model: [p.grad.mul_(4) for p in model.parameters()])
    steps.backward(1)
    assert_same_gradients(steps.model, steps.expected)
    steps.step()
    steps.check()


@both_ways
@pytest.mark.parametrize("first", ["fresh", "after a backward"])
def test_gradient_replaced_by_a_plain_tensor_is_stepped_with(steps, first):
    def replace(model):
        for seed, parameter in enumerate(model.parameters()):
            parameter.grad = rank_data(parameter.shape, 50 + seed)

    if first != "fresh":
        steps.backward()
    steps.on_both(replace)
    steps.step()
    steps.check()


@both_ways
def test_plain_gradient_is_added_to_by_the_next_backward(steps):
    def replace(model):
        for seed, parameter in enumerate(model.parameters()):
            parameter.grad = rank_data(parameter.shape, 50 + seed)

    steps.on_both(replace)
    steps.backward()
    assert_same_gradients(steps.model, steps.expected)
    steps.step()
    steps.check()


@both_ways
def test_gradient_replaced_by_another_shard_tensor_is_stepped_with(steps):
    steps.backward()
    for parameter in steps.model.parameters():
        parameter.grad = parameter.grad * 0.5
    for parameter in steps.expected.parameters():
        parameter.grad = parameter.grad * 0.5
    steps.step()
    steps.check()


@both_ways
def test_gradients_saved_and_restored_around_another_backward(steps):
    """A second loss is looked at in between; its gradients are put aside."""
    steps.backward(0)
    saved = [p.grad.clone() for p in steps.model.parameters()]
    steps.optimizer.zero_grad()
    backward(steps.model, steps.rank, step=7)
    for parameter, gradient in zip(steps.model.parameters(), saved, strict=True):
        parameter.grad = gradient
    assert_same_gradients(steps.model, steps.expected)
    steps.step()
    steps.check()


@both_ways
def test_parameter_whose_gradient_was_set_to_none_is_not_stepped(steps):
    steps.run()
    steps.backward()
    before = steps.model.layers[1].weight.detach().clone()

    def drop(model):
        model.layers[1].weight.grad = None

    steps.on_both(drop)
    steps.step()
    assert_bits(steps.model.layers[1].weight, before)
    steps.check()


@both_ways
def test_gradient_set_to_none_starts_afresh_in_the_next_backward(steps):
    def drop(model):
        model.layers[1].weight.grad = None

    steps.backward(0)
    steps.on_both(drop)
    steps.backward(1)
    assert_same_gradients(steps.model, steps.expected)
    steps.step()
    steps.check()


# zero_grad


def zero_by_optimizer(model, optimizer):
    optimizer.zero_grad()


def zero_by_module(model, optimizer):
    model.zero_grad()


def zero_by_assignment(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = None


def zero_by_optimizer_in_place(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def zero_by_module_in_place(model, optimizer):
    model.zero_grad(set_to_none=False)


ZERO_GRADS = [
    zero_by_optimizer,
    zero_by_module,
    zero_by_assignment,
    zero_by_optimizer_in_place,
    zero_by_module_in_place,
]


@both_ways
@pytest.mark.parametrize("zero", ZERO_GRADS)
def test_gradients_start_afresh_after_zero_grad(steps, zero):
    steps.backward(0)
    zero(steps.model, steps.optimizer)
    zero(steps.expected, steps.reference)
    assert_same_gradients(steps.model, steps.expected)
    steps.backward(1)
    assert_same_gradients(steps.model, steps.expected)
    steps.step()
    steps.check()


@both_ways
@pytest.mark.parametrize("zero", [zero_by_optimizer_in_place, zero_by_module_in_place])
def test_zeros_are_stepped_with_as_in_torch(steps, zero):
    """Moments decay and weights too: a gradient of zero is not an absent one."""
    steps.run()
    steps.backward()
    zero(steps.model, steps.optimizer)
    zero(steps.expected, steps.reference)
    steps.step()
    steps.check()


def no_sync(way: Way, model, optimizer):
    return model.no_sync() if way.name == "shard" else optimizer.no_sync()


# What a module's own zero_grad and p.grad = None do is seen by its effect on .grad, which is None
# inside no_sync(): only a sharded module's zero_grad and the optimizer's know.
LOCAL_ZERO_GRADS = {
    "shard": [
        zero_by_optimizer,
        zero_by_optimizer_in_place,
        zero_by_module,
        zero_by_module_in_place,
    ],
    "optimizer": [zero_by_optimizer, zero_by_optimizer_in_place],
}


@both_ways
@pytest.mark.parametrize("reduced_before", [False, True])
@pytest.mark.parametrize("index", range(4))
def test_zero_grad_drops_micro_batches_that_were_not_reduced(steps, way, reduced_before, index):
    if index >= len(LOCAL_ZERO_GRADS[way.name]):
        index -= 2
    zero = LOCAL_ZERO_GRADS[way.name][index]
    if reduced_before:
        steps.backward(0)
    with no_sync(way, steps.model, steps.optimizer):
        steps.backward(1)
        zero(steps.model, steps.optimizer)
        zero(steps.expected, steps.reference)
        steps.backward(2)
    steps.backward(3)
    assert_same_gradients(steps.model, steps.expected)
    steps.step()
    steps.run()
    steps.check()


@both_ways
def test_one_parameters_zeroing_leaves_the_others_sums(steps):
    steps.backward(0)
    steps.on_both(lambda model: model.layers[0].weight.grad.zero_())
    steps.backward(1)
    assert_same_gradients(steps.model, steps.expected)


# The optimizer's state


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_continues_bit_for_bit(way, group, rank, dtype):
    model, other = small_mlp(dtype), small_mlp(dtype)
    optimizer = way.optimizer(model, group, lr=LR)
    for step in range(2):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    other_optimizer = way.optimizer(other, group, lr=0.7)
    other.load_state_dict(model.state_dict())
    if dtype == torch.bfloat16:  # masters are saved by checkpoints, not by a state_dict
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            handle, i = find(a)
            source, j = find(b)
            handle.engine.master_slice(i).copy_(source.engine.master_slice(j))

    other_optimizer.load_state_dict(optimizer.state_dict())

    for name in ("exp_avg", "exp_avg_sq", "step"):
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            value = other_optimizer.state[a][name]
            assert value.dtype == torch.float32
            assert_bits(full(value), full(optimizer.state[b][name]), name)
    for m, o in ((model, optimizer), (other, other_optimizer)):
        backward(m, rank, 2)
        o.step()
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert_bits(a, b)


@both_ways
def test_loaded_state_is_a_copy(way, group, rank):
    """As after torch's load_state_dict, training one optimizer leaves the other alone."""
    model, other = small_mlp(), small_mlp()
    optimizer, other_optimizer = way.optimizer(model, group), way.optimizer(other, group)
    backward(model, rank)
    optimizer.step()
    other_optimizer.load_state_dict(optimizer.state_dict())
    before = full(other_optimizer.state[other.layers[0].weight]["exp_avg"]).clone()
    backward(model, rank, 1)
    optimizer.step()
    assert_bits(full(other_optimizer.state[other.layers[0].weight]["exp_avg"]), before)


@both_ways
@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_of_torchs_own_adamw_is_continued(way, group, rank, world, amsgrad):
    steps = Steps(way, group, rank, world, amsgrad=amsgrad)
    for step in range(2):
        backward_of_all(steps.expected, world, step)
        steps.reference.step()
        steps.reference.zero_grad()
    steps.model.load_state_dict(steps.expected.state_dict())
    steps.optimizer.load_state_dict(steps.reference.state_dict())
    steps.number = 2
    steps.run(2)
    steps.check()


@both_ways
@pytest.mark.parametrize("dampening", [0, 0.4])
def test_state_of_torchs_own_sgd_is_continued(way, group, rank, world, dampening):
    model, expected = small_mlp(), small_mlp()
    settings = {"lr": LR, "momentum": 0.9, "dampening": dampening}
    optimizer = way.optimizer(model, group, zero_ext.optim.SGD, **settings)
    reference = torch.optim.SGD(expected.parameters(), **settings)
    for step in range(2):
        backward_of_all(expected, world, step)
        reference.step()
        reference.zero_grad()
    model.load_state_dict(expected.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    backward(model, rank, 2)
    optimizer.step()
    backward_of_all(expected, world, 2)
    reference.step()
    assert_same_values(model, expected)


@both_ways
def test_state_of_an_unused_torch_optimizer_resets(steps):
    """A checkpoint of before the first step holds no state: moments start from zero again."""
    unused = copy.deepcopy(torch.optim.AdamW(small_mlp().parameters(), lr=LR).state_dict())
    steps.run(2)
    steps.optimizer.load_state_dict(copy.deepcopy(unused))
    steps.reference.load_state_dict(copy.deepcopy(unused))
    steps.run(2)
    steps.check()


@both_ways
def test_loading_state_of_another_model_changes_nothing(way, group, rank):
    model = small_mlp()
    optimizer = way.optimizer(model, group)
    backward(model, rank)
    optimizer.step()
    before = full(optimizer.state[model.layers[0].weight]["exp_avg"]).clone()
    other = MLP(hidden=6)
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    wrong = torch.optim.AdamW(other.parameters())
    wrong.step()
    with pytest.raises(ValueError, match=r"'exp_avg'.*shape \(6, 5\).*\(7, 5\)"):
        optimizer.load_state_dict(wrong.state_dict())
    assert_bits(full(optimizer.state[model.layers[0].weight]["exp_avg"]), before)


# Copies of the model


@both_ways
def test_deepcopy_is_an_independent_plain_model(way, group, rank):
    model = small_mlp()
    optimizer = way.optimizer(model, group, lr=LR)
    backward(model, rank)
    twin = copy.deepcopy(model)
    before = [p.detach().clone() for p in twin.parameters()]

    gradients = full_gradients(model)
    backward(twin, rank, step=1)  # on its own: no other rank is waited for
    for name, parameter in model.named_parameters():
        assert_bits(full(parameter.grad), gradients[name], name)
    plain = small_mlp()
    backward(plain, rank, step=1)
    for a, b in zip(twin.parameters(), plain.parameters(), strict=True):
        assert type(a) is nn.Parameter
        assert_bits(a.grad, b.grad)
    twin.zero_grad()
    assert all(p.grad is None for p in twin.parameters())
    assert all(p.grad is not None for p in model.parameters())

    optimizer.step()
    for parameter, values in zip(twin.parameters(), before, strict=True):
        assert_bits(parameter, values)
    assert all(find(p) is None for p in twin.parameters())


@both_ways
def test_deepcopy_can_be_sharded_itself(way, group, rank, world):
    model = small_mlp()
    _optimizer = way.optimizer(model, group)
    twin = copy.deepcopy(model)
    optimizer = way.optimizer(twin, group, lr=LR)
    expected = small_mlp()
    reference = torch.optim.AdamW(expected.parameters(), lr=LR)
    backward(twin, rank)
    optimizer.step()
    backward_of_all(expected, world)
    reference.step()
    assert_same_values(twin, expected)


@both_ways
def test_saved_model_loads_as_a_plain_one(way, group, rank):
    model = small_mlp()
    optimizer = way.optimizer(model, group, lr=LR)
    backward(model, rank)
    optimizer.step()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
        assert_bits(a, b)
        assert find(a) is None
    backward(loaded, rank)
    assert all(type(p.grad) is torch.Tensor for p in loaded.parameters())
    torch.optim.AdamW(loaded.parameters()).step()


@both_ways
def test_state_dict_loads_into_a_plain_model(way, group, rank):
    model = small_mlp()
    optimizer = way.optimizer(model, group, lr=LR)
    backward(model, rank)
    optimizer.step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = small_mlp()
    plain.load_state_dict(torch.load(file))
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert_bits(a, b)


# Learning rates, groups, closures


@both_ways
def test_learning_rate_set_by_hand_is_used(steps):
    steps.run()
    for optimizer in (steps.optimizer, steps.reference):
        optimizer.param_groups[0]["lr"] = 0.3
    steps.run()
    steps.check()


@both_ways
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
    ],
)
def test_scheduler_drives_the_learning_rate(steps, scheduler, recwarn):
    schedulers = [scheduler(steps.optimizer), scheduler(steps.reference)]
    for _ in range(3):
        steps.run()
        for each in schedulers:
            each.step()
        assert steps.optimizer.param_groups[0]["lr"] == steps.reference.param_groups[0]["lr"]
    steps.check()
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@both_ways
def test_closure_is_called_once_and_its_loss_returned(way, group, rank, world):
    steps = Steps(way, group, rank, world)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        steps.optimizer.zero_grad()
        backward(steps.model, rank)
        return 1.25

    assert steps.optimizer.step(closure) == 1.25
    backward_of_all(steps.expected, world)
    steps.reference.step()
    assert calls == [True]
    steps.check()


@both_ways
def test_groups_have_their_own_settings(way, group, rank, world):
    def groups(model):
        return [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.2, "eps": 1e-4},
        ]

    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, params=groups(model), lr=LR, weight_decay=0.0)
    reference = torch.optim.AdamW(groups(expected), lr=LR, weight_decay=0.0)
    for step in range(3):
        backward(model, rank, step)
        backward_of_all(expected, world, step)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
            each.param_groups[1]["lr"] *= 0.5
    assert_same_values(model, expected)


@both_ways
def test_group_added_after_a_step_is_trained(way, group, rank, world):
    model, expected = small_mlp(), small_mlp()

    def add(m, optimizer):
        optimizer.add_param_group({"params": list(m.layers[0].parameters()), "lr": 0.2})

    first = [p for layer in model.layers[1:] for p in layer.parameters()]
    optimizer = way.optimizer(model, group, params=first, lr=LR)
    reference = torch.optim.AdamW(
        [p for layer in expected.layers[1:] for p in layer.parameters()], lr=LR
    )
    for step in range(4):
        for each in (optimizer, reference):
            each.zero_grad()
        for m in (model, expected):
            m.zero_grad()
        backward(model, rank, step)
        backward_of_all(expected, world, step)
        if step == 2:
            model.zero_grad()
            expected.zero_grad()
            add(model, optimizer)
            add(expected, reference)
            backward(model, rank, step)
            backward_of_all(expected, world, step)
        optimizer.step()
        reference.step()
    assert_same_values(model, expected)


@both_ways
def test_group_of_another_sharded_model_is_refused(way, group):
    model, other = small_mlp(), MLP(hidden=3)
    optimizer = way.optimizer(model, group)
    zero_ext.shard(other, mesh=find(model.layers[0].weight)[0].groups.mesh)
    with pytest.raises(ValueError, match="not a parameter of the sharded module"):
        optimizer.add_param_group({"params": list(other.parameters())})
    assert len(optimizer.param_groups) == 1


# Clipping


@both_ways
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@pytest.mark.parametrize("foreach", [None, False])
def test_stock_clipping_equals_one_process(steps, max_norm, foreach):
    steps.run()
    steps.backward()
    norm = nn.utils.clip_grad_norm_(steps.model.parameters(), max_norm, foreach=foreach)
    expected = nn.utils.clip_grad_norm_(steps.expected.parameters(), max_norm)
    torch.testing.assert_close(full(norm), expected, rtol=1e-5, atol=0)  # order of summation
    assert_same_gradients(steps.model, steps.expected)
    steps.step()
    steps.check()


@both_ways
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_fused_clipping_equals_one_process(steps, max_norm):
    steps.run()
    steps.backward()
    norm = steps.optimizer.clip_grad_norm_(max_norm)
    expected = nn.utils.clip_grad_norm_(steps.expected.parameters(), max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)  # order of summation
    assert_same_gradients(steps.model, steps.expected)
    steps.step()
    steps.check()


@shard_and_optimizer
def test_clipping_by_value_equals_one_process(steps):
    steps.backward()
    nn.utils.clip_grad_value_(steps.model.parameters(), 0.01)
    nn.utils.clip_grad_value_(steps.expected.parameters(), 0.01)
    assert_same_gradients(steps.model, steps.expected)


@both_ways
def test_accumulation_with_no_sync_equals_one_process(steps, way):
    for _ in range(2):
        for micro in range(3):
            local = micro < 2
            with no_sync(way, steps.model, steps.optimizer) if local else contextlib.nullcontext():
                steps.backward(micro)
        assert_same_gradients(steps.model, steps.expected)
        steps.step()
    steps.check()
