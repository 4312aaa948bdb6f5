"""Unusual models and unusual backwards, against one process that runs the same."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from harness import MLP, Branching, Odd, Random, Tied, assert_bits, mean_square, rank_data
from setups import (
    Way,
    add_gradients,
    all_ways,
    assert_same_gradients,
    assert_same_values,
    backward,
    backward_of_all,
    full,
    shard_and_optimizer,
    small_mlp,
    train_batch,
    values_of,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import zero_ext
from zero_ext.engine.registry import find

pytestmark = pytest.mark.dist

LR = 0.05
# Larger than the default, so that an update does not amplify the rounding of a gradient near zero.
EPS = 1e-3


def shapes(rank: int, step: int) -> torch.Tensor:
    return rank_data((2, 3, 4, 4), rank, step)


def tokens(rank: int, step: int) -> torch.Tensor:
    return Random(1 + rank + 100 * step).integers(0, 11, (3, 4))


def vectors(rank: int, step: int) -> torch.Tensor:
    return rank_data((4, 5), rank, step)


class Training:
    """The same steps on a sharded model, on this rank's data, and on one process, on all data.

    ``loss_fn(model, rank, step)`` is what one rank computes.
    """

    def __init__(self, way: Way, group, rank, world, model_fn, loss_fn, **kwargs):
        self.rank, self.world, self.loss_fn, self.number = rank, world, loss_fn, 0
        self.model, self.expected = model_fn(), model_fn()
        self.optimizer = way.optimizer(self.model, group, lr=LR, eps=EPS, **kwargs)
        self.reference = torch.optim.AdamW(self.expected.parameters(), lr=LR, eps=EPS)

    def backward(self, loss_fn=None):
        loss_fn = loss_fn or self.loss_fn
        loss_fn(self.model, self.rank, self.number).backward()
        for rank in range(self.world):
            add_gradients(self.expected, loss_fn(self.expected, rank, self.number), 1 / self.world)

    def step(self):
        for optimizer in (self.optimizer, self.reference):
            optimizer.step()
            optimizer.zero_grad()
        self.number += 1

    def run(self, steps: int = 3):
        for _ in range(steps):
            self.backward()
            assert_same_gradients(self.model, self.expected)
            self.step()
        assert_same_values(self.model, self.expected)

    def run_after_thawing(self, steps: int):
        """An optimizer alone sees what was unfrozen in its next step, and averages it then."""
        self.backward()
        self.step()
        self.run(steps - 1)

    def on_both(self, change):
        for model in (self.model, self.expected):
            change(model)


def loss_of(batch_fn):
    return lambda model, rank, step: mean_square(model, batch_fn(rank, step))


# Parameters


class Phase(nn.Module):
    """The gradient of ``imaginary`` is a negated view."""

    def __init__(self):
        super().__init__()
        self.real, self.imaginary = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return (torch.complex(self.real, self.imaginary).conj() * x).imag


@pytest.mark.host
@all_ways
def test_gradients_whose_memory_is_not_their_value(way, group, rank, world):
    def loss(model, rank, step):
        return model(torch.complex(torch.tensor(2.0 + rank), torch.tensor(3.0 + step)))

    training = Training(way, group, rank, world, Phase, loss)
    training.run(2)
    parameter = training.expected.imaginary
    loss(training.expected, 0, 0).backward()
    assert parameter.grad.is_neg()

    training.expected.zero_grad()
    training.model.real.register_hook(lambda g: torch._efficientzerotensor(g.shape))
    training.expected.real.register_hook(torch.zeros_like)
    training.on_both(lambda model: model.imaginary.register_hook(torch._neg_view))
    training.run(2)


@pytest.mark.host
@all_ways
@pytest.mark.parametrize("kind", ["fake", "wrapper"])
def test_gradients_without_memory_are_refused_by_name(way, kind, group, rank, world):
    training = Training(way, group, rank, world, small_mlp, loss_of(vectors))

    def spoil(g):
        return FakeTensorMode().from_tensor(g) if kind == "fake" else TwoTensor(g, g)

    handle = training.model.layers[1].bias.register_hook(spoil)
    with pytest.raises(RuntimeError, match=r"gradient of '.*' has no memory of its own"):
        training.loss_fn(training.model, rank, 0).backward()
    handle.remove()
    training.run(2)


class WritesToOutputs(nn.Module):
    """What a linear layer gives for three dimensions is a view, whose node goes with a write."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])

    def forward(self, x):
        for n, layer in enumerate(self.layers):
            y = layer(x.unsqueeze(0))
            if n == 0:
                y.mul_(1.25)
            elif n == 1:
                torch.relu_(y)
            elif n == 2:
                y[..., 0] = 0
            x = y.squeeze(0)
        return x


@all_ways
def test_outputs_that_are_written_to_in_place(way, group, rank, world):
    training = Training(way, group, rank, world, WritesToOutputs, loss_of(vectors), bucket_mb=1e-5)
    training.run()


@all_ways
def test_tied_weights_have_one_sum(way, group, rank, world):
    training = Training(way, group, rank, world, Tied, loss_of(tokens))
    training.run()
    assert training.model.head.weight is training.model.embedding.weight


@all_ways
def test_zero_dimensional_empty_and_non_contiguous_parameters(way, group, rank, world):
    training = Training(way, group, rank, world, Odd, loss_of(shapes))
    strides = {name: p.stride() for name, p in training.model.named_parameters()}
    training.run()
    for name, parameter in training.model.named_parameters():
        assert (
            parameter.stride()
            == strides[name]
            == dict(training.expected.named_parameters())[name].stride()
        )
    assert training.model.unused.grad is None
    assert training.model.conv.weight.is_contiguous(memory_format=torch.channels_last)


@all_ways
def test_expanded_and_sliced_parameters_become_dense(way, group, rank, world):
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.sliced = nn.Parameter(torch.randn(5, 10)[:, ::2])
            self.backwards = nn.Parameter(torch.randn(5, 7)[:, 1:6])

        def forward(self, x):
            return x @ self.sliced @ self.backwards

    Training(way, group, rank, world, Strided, loss_of(vectors)).run()


@all_ways
def test_model_with_fewer_elements_than_ranks(way, group, rank, world):
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.scale * x

    Training(way, group, rank, world, Tiny, loss_of(vectors)).run()


@shard_and_optimizer
def test_every_parameter_in_a_unit_of_its_own(way, group, rank, world):
    training = Training(
        way, group, rank, world, Odd, loss_of(shapes), bucket_mb=1e-9, weight_decay=0.01
    )
    training.run()


@shard_and_optimizer
def test_model_without_a_trainable_parameter(way, group, rank):
    model = small_mlp().requires_grad_(False)
    optimizer = way.optimizer(model, group, lr=LR)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model(train_batch(rank))
    optimizer.step()
    optimizer.zero_grad()
    for parameter, values in zip(model.parameters(), before, strict=True):
        assert_bits(parameter, values)


@all_ways
def test_group_without_a_trainable_parameter(way, group, rank, world):
    model, expected = small_mlp(), small_mlp()

    def groups(m):
        m.layers[0].requires_grad_(False)
        return [
            {"params": list(m.layers[0].parameters()), "lr": 1.0},
            {"params": [p for layer in m.layers[1:] for p in layer.parameters()]},
        ]

    optimizer = way.optimizer(model, group, params=groups(model), lr=LR)
    reference = torch.optim.AdamW(groups(expected), lr=LR)
    frozen = expected.layers[0].weight.detach().clone()
    for step in range(2):
        backward(model, rank, step)
        backward_of_all(expected, world, step)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_bits(values_of(model)["layers.0.weight"], frozen)
    assert_same_values(model, expected)


@shard_and_optimizer
def test_embedding_with_dense_gradients(way, group, rank, world):
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(11, 5, padding_idx=0)
            self.bag = nn.EmbeddingBag(11, 5)

        def forward(self, x):
            return self.embedding(x).mean(1) * self.bag(x)

    Training(way, group, rank, world, Lookup, loss_of(tokens)).run()


@all_ways
def test_several_dtypes_in_one_model(way, group, rank, world):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(5, 7, dtype=torch.bfloat16)
            self.norm = nn.LayerNorm(7)
            self.second = nn.Linear(7, 5, dtype=torch.float16)

        def forward(self, x):
            x = self.norm(self.first(x.bfloat16()).float())
            return self.second(x.half())

    model, expected = Mixed(), Mixed()
    optimizer = way.optimizer(model, group, lr=LR)
    loss = loss_of(vectors)
    loss(model, rank, 0).backward()
    sums = {name: torch.zeros(p.shape) for name, p in expected.named_parameters()}
    for r in range(world):
        expected.zero_grad()
        loss(expected, r, 0).backward()
        for name, parameter in expected.named_parameters():
            sums[name] += parameter.grad.float() * (1 / world)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        # One more rounding where 1 / world is not a power of two.
        torch.testing.assert_close(full(parameter.grad), sums[name], rtol=1e-6, atol=1e-8)
    optimizer.step()


# Frozen and unfrozen


class Quantised(nn.Module):
    """Frozen weights in a dtype that nothing is trained in, and trainable ones beside them."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.codes = nn.Parameter(torch.arange(35).reshape(7, 5).to(dtype), requires_grad=False)
        self.zero = nn.Parameter(torch.tensor(3).to(dtype), requires_grad=False)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7)])

    def forward(self, x):
        fixed = x @ (self.codes.float() - self.zero.float()).T / 35
        return self.layers[1](self.layers[0](x) + fixed)


@all_ways
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64], ids=str)
def test_frozen_parameters_of_other_dtypes_stay_whole(way, group, rank, world, dtype):
    training = Training(way, group, rank, world, lambda: Quantised(dtype), loss_of(vectors))
    codes = training.expected.codes.detach().clone()
    training.run()
    assert training.model.codes.dtype == dtype
    assert torch.equal(training.model.codes, codes)
    state = training.optimizer.state_dict()
    assert sorted(state["state"]) == [2, 3, 4, 5]
    training.optimizer.load_state_dict(state)
    training.run()


@pytest.mark.host  # no float8 on the lagged device
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.float8_e4m3fn], ids=str)
def test_frozen_parameters_of_other_dtypes_are_rank_0s(stage, group, mesh, rank, dtype):
    model = Quantised(dtype)
    expected = model.codes.detach().clone()
    if rank > 0:
        model.codes.data = torch.zeros(7, 5).to(dtype)
    zero_ext.shard(model, stage, mesh=mesh)
    assert torch.equal(model.codes.float(), expected.float())
    with pytest.raises(ValueError, match=r"the models .* differ"):
        model = Quantised(dtype if rank > 0 else torch.int16)
        zero_ext.shard(model, stage, mesh=mesh)


@pytest.mark.parametrize("how", ["shard", "optimizer"])
def test_a_thawed_parameter_of_another_dtype_is_refused_by_name(how, group, mesh, rank):
    model = Quantised(torch.float64)
    if how == "shard":
        zero_ext.shard(model, 2, mesh=mesh)
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = zero_ext.optim.SGD(model.named_parameters(), lr=0.1, process_group=group)
    model.codes.requires_grad_(True)
    problem = r"parameter 'codes' is torch\.float64 on .* Convert it, freeze it"
    if how == "shard":
        with pytest.raises(TypeError, match=problem):
            model(vectors(rank, 0))
    else:
        mean_square(model, vectors(rank, 0)).backward()
    with pytest.raises(TypeError, match=problem):
        optimizer.step()
    model.codes.requires_grad_(False)
    optimizer.zero_grad()
    mean_square(model, vectors(rank, 0)).backward()
    optimizer.step()


@all_ways
def test_parameter_frozen_later_is_left_alone(way, group, rank, world):
    training = Training(way, group, rank, world, small_mlp, loss_of(vectors))
    training.run(2)
    training.on_both(lambda model: model.layers[1].requires_grad_(False))
    frozen = values_of(training.model)["layers.1.weight"]
    training.run(2)
    assert_bits(values_of(training.model)["layers.1.weight"], frozen)
    training.on_both(lambda model: model.layers[1].requires_grad_(True))
    training.run(2)
    assert not torch.equal(values_of(training.model)["layers.1.weight"], frozen)


@all_ways
def test_parameter_frozen_between_backward_and_step(way, group, rank, world):
    """Its gradient is there, so it is stepped, as in torch."""
    training = Training(way, group, rank, world, small_mlp, loss_of(vectors))
    training.backward()
    training.on_both(lambda model: model.layers[1].requires_grad_(False))
    training.step()
    training.run(1)


def mlp_with_a_frozen_layer() -> MLP:
    model = small_mlp()
    model.layers[1].requires_grad_(False)
    return model


@all_ways
def test_parameter_thawed_after_sharding_is_trained(way, group, rank, world):
    training = Training(way, group, rank, world, mlp_with_a_frozen_layer, loss_of(vectors))
    training.run(2)
    training.on_both(lambda model: model.layers[1].requires_grad_(True))
    training.run_after_thawing(3)
    assert find(training.model.layers[1].weight)[0].engine.unit_of(2) >= 0


@all_ways
def test_parameter_thawed_before_the_first_step_is_trained(way, group, rank, world):
    training = Training(way, group, rank, world, mlp_with_a_frozen_layer, loss_of(vectors))
    training.on_both(lambda model: model.layers[1].requires_grad_(True))
    training.run_after_thawing(3)


@all_ways
def test_layers_thawed_one_after_the_other(way, group, rank, world):
    def frozen() -> MLP:
        model = small_mlp().requires_grad_(False)
        model.layers[2].requires_grad_(True)
        return model

    training = Training(way, group, rank, world, frozen, loss_of(vectors))
    training.run(2)
    for layer in (1, 0):
        training.on_both(lambda model, layer=layer: model.layers[layer].requires_grad_(True))
        training.run_after_thawing(2)


@all_ways
def test_parameter_thawed_in_the_middle_of_an_accumulation(way, group, rank, world):
    training = Training(way, group, rank, world, mlp_with_a_frozen_layer, loss_of(vectors))
    training.backward()
    training.on_both(lambda model: model.layers[1].requires_grad_(True))
    training.backward(lambda model, rank, step: mean_square(model, vectors(rank, 9)))
    training.step()
    training.run(1)


# Several models, several backwards


@all_ways
def test_two_sharded_models_with_one_summed_loss(way, group, rank, world):
    models, expected = [small_mlp(), MLP(hidden=4)], [small_mlp(), MLP(hidden=4)]
    optimizers = [way.optimizer(m, group, lr=LR) for m in models]
    references = [torch.optim.AdamW(m.parameters(), lr=LR) for m in expected]

    def loss(pair, rank, step):
        batch = vectors(rank, step)
        return mean_square(pair[0], batch) + mean_square(pair[1], pair[0](batch))

    for step in range(3):
        loss(models, rank, step).backward()
        for r in range(world):
            (loss(expected, r, step) / world).backward()
        for each in optimizers + references:
            each.step()
            each.zero_grad()
    for mine, theirs in zip(models, expected, strict=True):
        assert_same_values(mine, theirs)


@all_ways
def test_adversaries_that_step_in_turn(way, group, rank, world):
    """Each backward also reaches the other model, whose gradients are thrown away."""
    models, expected = [small_mlp(), MLP(hidden=4)], [small_mlp(), MLP(hidden=4)]
    optimizers = [way.optimizer(m, group, lr=LR) for m in models]
    references = [torch.optim.AdamW(m.parameters(), lr=LR) for m in expected]
    for step in range(2):
        for turn, sign in enumerate((1, -1)):
            for each in optimizers + references:
                each.zero_grad()
            batch = vectors(rank, step)
            (sign * mean_square(models[1], models[0](batch))).backward()
            for r in range(world):
                (sign * mean_square(expected[1], expected[0](vectors(r, step))) / world).backward()
            optimizers[turn].step()
            references[turn].step()
    for mine, theirs in zip(models, expected, strict=True):
        assert_same_values(mine, theirs)


@all_ways
def test_two_forwards_before_two_backwards(way, group, rank, world):
    training = Training(way, group, rank, world, small_mlp, loss_of(vectors))
    for _ in range(2):
        losses = [mean_square(training.model, vectors(rank, n)) for n in (10, 11)]
        for loss in losses:
            loss.backward()
        for r in range(world):
            for n in (10, 11):
                (mean_square(training.expected, vectors(r, n)) / world).backward()
        assert_same_gradients(training.model, training.expected)
        training.step()
    assert_same_values(training.model, training.expected)


@all_ways
def test_graph_retained_twice_adds_its_gradient_three_times(way, group, rank, world):
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group)
    loss = mean_square(model, vectors(rank, 0))
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
    for _ in range(3):
        for r in range(world):
            (mean_square(expected, vectors(r, 0)) / world).backward()
    assert_same_gradients(model, expected)
    optimizer.step()


@all_ways
def test_two_losses_over_one_graph(way, group, rank, world):
    model, expected = small_mlp(), small_mlp()
    _optimizer = way.optimizer(model, group)

    def run(m, rank, scale):
        output = m(vectors(rank, 0))
        (output.square().mean() * scale).backward(retain_graph=True)
        (output.sum() * scale).backward()

    run(model, rank, 1.0)
    for r in range(world):
        run(expected, r, 1 / world)
    assert_same_gradients(model, expected)


@all_ways
def test_gradient_penalty_in_the_loss(way, group, rank, world):
    """torch.autograd.grad with create_graph: second derivatives reach the parameters."""

    def loss(model, rank, step):
        batch = vectors(rank, step).requires_grad_()
        output = model(batch).square().mean()
        (gradient,) = torch.autograd.grad(output, batch, create_graph=True)
        return output + gradient.square().sum()

    Training(way, group, rank, world, small_mlp, loss).run()


@shard_and_optimizer
def test_gradients_of_parameters_in_the_loss(way, group, rank, world):
    def loss(model, rank, step):
        output = mean_square(model, vectors(rank, step))
        weight = model.layers[0].weight
        (gradient,) = torch.autograd.grad(output, weight, create_graph=True)
        return output + gradient.square().sum()

    Training(way, group, rank, world, small_mlp, loss).run()


@all_ways
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph(way, group, rank, world):
    """The graph of the gradients is of no use here, but the gradients are right."""

    def run(model, rank, scale):
        (mean_square(model, vectors(rank, 0)) * scale).backward(create_graph=True)

    model, expected = small_mlp(), small_mlp()
    _optimizer = way.optimizer(model, group)
    run(model, rank, 1.0)
    for r in range(world):
        run(expected, r, 1 / world)
    assert_same_gradients(model, expected)
    expected.zero_grad()


@all_ways
def test_backward_to_some_inputs_only(way, group, rank, world):
    def run(model, rank, scale):
        inputs = [model.layers[0].weight, model.layers[2].bias]
        (mean_square(model, vectors(rank, 0)) * scale).backward(inputs=inputs)

    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, lr=LR)
    reference = torch.optim.AdamW(expected.parameters(), lr=LR)
    for _ in range(2):
        run(model, rank, 1.0)
        for r in range(world):
            run(expected, r, 1 / world)
        assert_same_gradients(model, expected)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    backward(model, rank)
    backward_of_all(expected, world)
    assert_same_gradients(model, expected)
    optimizer.step()
    reference.step()
    assert_same_values(model, expected)


@all_ways
def test_backward_to_the_input_alone_reduces_nothing_twice(way, group, rank, world):
    training = Training(way, group, rank, world, small_mlp, loss_of(vectors))
    batch = vectors(rank, 0).requires_grad_()
    mean_square(training.model, batch).backward(inputs=[batch])
    assert all(p.grad is None for p in training.model.parameters())
    training.run(2)


# Parameters that some ranks do not use


@all_ways
def test_parameter_unused_on_one_rank_gets_the_others_share(way, group, rank, world):
    def loss(model, rank, step):
        taken = ("left", "right") if rank == 0 else ("left",)
        return model(rank_data((4, 6), rank, step), taken).square().mean()

    Training(way, group, rank, world, Branching, loss).run()


@all_ways
def test_branches_that_change_with_rank_and_step(way, group, rank, world):
    def loss(model, rank, step):
        taken = [name for bit, name in enumerate(("left", "right")) if (rank + step) >> bit & 1]
        return model(rank_data((4, 6), rank, step), taken).square().mean()

    Training(way, group, rank, world, Branching, loss).run(4)


@all_ways
def test_parameter_that_no_rank_used_is_not_stepped(way, group, rank, world):
    def loss(model, rank, step):
        return model(rank_data((4, 6), rank, step), ("left",)).square().mean()

    training = Training(way, group, rank, world, Branching, loss)
    before = values_of(training.model)["right.weight"]
    training.run(2)
    assert_bits(values_of(training.model)["right.weight"], before)
    assert training.optimizer.state[training.model.right.weight]["step"] == 0


@all_ways
def test_rank_whose_loss_reaches_no_parameter(way, group, rank, world):
    """It makes up for its missing backward in step()."""
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, lr=LR)
    reference = torch.optim.AdamW(expected.parameters(), lr=LR)
    active = [r for r in range(world) if r == 0 or r % 2 == 0]
    if rank in active and world == 1:
        active = [0]
    for step in range(2):
        if rank in active:
            # The reduction waits for the others' step(), which comes without a backward.
            backward(model, rank, step)
        for r in active:
            (mean_square(expected, train_batch(r, step)) / world).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_same_values(model, expected)


# Gradient checkpointing


class Checkpointed(nn.Module):
    """``used``: which layers run inside a checkpoint of their own; ``tied``: one layer twice."""

    def __init__(self, use_reentrant: bool, used=(0, 1, 2), tied: bool = False, head: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        if tied:
            self.blocks[2] = self.blocks[0]
        self.head = nn.Linear(5, 5) if head else nn.Identity()
        self.use_reentrant, self.used = use_reentrant, used

    def forward(self, x):
        x = x.requires_grad_() if not x.requires_grad else x
        for number, block in enumerate(self.blocks):
            if number in self.used:
                x = checkpoint(block, torch.tanh(x), use_reentrant=self.use_reentrant)
            else:
                x = block(torch.tanh(x))
        return self.head(x)


reentrant_or_not = pytest.mark.parametrize("use_reentrant", [True, False])


@all_ways
@reentrant_or_not
@pytest.mark.parametrize("used", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_checkpointed_blocks(way, use_reentrant, used, group, rank, world):
    Training(
        way, group, rank, world, lambda: Checkpointed(use_reentrant, used), loss_of(vectors)
    ).run()


@all_ways
@reentrant_or_not
def test_model_wholly_inside_checkpoints(way, use_reentrant, group, rank, world):
    """The outer backward reaches no parameter itself."""
    Training(
        way, group, rank, world, lambda: Checkpointed(use_reentrant, head=False), loss_of(vectors)
    ).run()


@all_ways
@reentrant_or_not
def test_whole_model_in_one_checkpoint(way, use_reentrant, group, rank, world):
    def loss(model, rank, step):
        batch = vectors(rank, step).requires_grad_()
        return checkpoint(model, batch, use_reentrant=use_reentrant).square().mean()

    Training(way, group, rank, world, small_mlp, loss).run()


@all_ways
@reentrant_or_not
def test_weights_shared_across_checkpoints(way, use_reentrant, group, rank, world):
    Training(
        way, group, rank, world, lambda: Checkpointed(use_reentrant, tied=True), loss_of(vectors)
    ).run()


@all_ways
@reentrant_or_not
def test_weight_shared_by_a_checkpoint_and_the_rest(way, use_reentrant, group, rank, world):
    Training(
        way,
        group,
        rank,
        world,
        lambda: Checkpointed(use_reentrant, used=(0, 1), tied=True),
        loss_of(vectors),
    ).run()


@all_ways
@reentrant_or_not
@pytest.mark.parametrize("tied", [False, True])
def test_checkpointing_switched_on_after_the_first_steps(
    way, use_reentrant, tied, group, rank, world
):
    training = Training(
        way,
        group,
        rank,
        world,
        lambda: Checkpointed(use_reentrant, used=(), tied=tied),
        loss_of(vectors),
    )
    training.run(2)

    def switch_on(model):
        model.used = (0, 1, 2)

    training.on_both(switch_on)
    training.run(2)


@shard_and_optimizer
@reentrant_or_not
def test_checkpoints_inside_checkpoints(way, use_reentrant, group, rank, world):
    def loss(model, rank, step):
        batch = vectors(rank, step).requires_grad_()
        return checkpoint(model, batch, use_reentrant=use_reentrant).square().mean()

    Training(way, group, rank, world, lambda: Checkpointed(use_reentrant), loss).run()


@shard_and_optimizer
@reentrant_or_not
def test_checkpoints_with_no_sync(way, use_reentrant, group, rank, world):
    training = Training(
        way, group, rank, world, lambda: Checkpointed(use_reentrant), loss_of(vectors)
    )
    for _ in range(2):
        with (training.model if way.name == "shard" else training.optimizer).no_sync():
            training.backward()
            training.backward(lambda m, rank, step: mean_square(m, vectors(rank, 20 + step)))
        training.backward(lambda m, rank, step: mean_square(m, vectors(rank, 30 + step)))
        assert_same_gradients(training.model, training.expected)
        training.step()
    assert_same_values(training.model, training.expected)


@shard_and_optimizer
def test_function_that_runs_a_backward_of_its_own(way, group, rank, world):
    """As DeepSpeed's and Megatron's checkpoint functions do: not one that torch knows."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, block):
            ctx.block = block
            ctx.save_for_backward(x)
            return block(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                torch.autograd.backward(ctx.block(x), grad)
            return x.grad, None

    def loss(model, rank, step):
        x = vectors(rank, step).requires_grad_()
        for layer in model.layers:
            x = Recompute.apply(torch.tanh(x), layer)
        return x.square().mean()

    Training(way, group, rank, world, small_mlp, loss).run()


@pytest.mark.host
@all_ways
def test_a_scripted_part_of_a_model(way, group, rank, world):
    def model():
        made = small_mlp()
        made.layers[1] = torch.jit.script(made.layers[1])
        return made

    if way.stage == 3:
        pytest.skip("its forward runs no hooks of ours")
    Training(way, group, rank, world, model, loss_of(vectors)).run()


@dataclasses.dataclass
class Node:
    value: torch.Tensor
    parent: "Node | None" = None
    children: list = dataclasses.field(default_factory=list)


class OverTrees(nn.Module):
    """Inputs and outputs that lead back to themselves."""

    def __init__(self):
        super().__init__()
        self.mlp = small_mlp()

    def forward(self, node):
        child = Node(self.mlp(node.value), parent=node)
        node.children.append(child)
        return child


class KeepsItsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = small_mlp()

    def forward(self, x):
        self.loss = self.mlp(x).square().mean()


@all_ways
def test_outputs_that_are_no_tensors(way, group, rank, world):
    def over_trees(model, rank, step):
        return model(Node(vectors(rank, step))).value.square().mean()

    Training(way, group, rank, world, OverTrees, over_trees).run(2)

    def kept(model, rank, step):
        assert model(vectors(rank, step)) is None
        return model.loss

    Training(way, group, rank, world, KeepsItsLoss, kept).run(2)


@shard_and_optimizer
def test_anomaly_detection_changes_nothing(way, group, rank, world):
    with torch.autograd.set_detect_anomaly(True):
        Training(way, group, rank, world, small_mlp, loss_of(vectors)).run(1)


@shard_and_optimizer
def test_autocast_training(way, group, rank, world):
    def loss(model, rank, step):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return mean_square(model, vectors(rank, step))

    training = Training(way, group, rank, world, small_mlp, loss)
    training.backward()
    assert_same_gradients(training.model, training.expected)
    training.step()


@shard_and_optimizer
def test_backward_on_another_thread(way, group, rank, world):
    import threading

    training = Training(way, group, rank, world, small_mlp, loss_of(vectors))
    for _ in range(2):
        thread = threading.Thread(target=training.backward)
        thread.start()
        thread.join()
        training.step()
    assert_same_values(training.model, training.expected)
    dist.barrier(group)


@shard_and_optimizer
def test_functional_call_reaches_the_sharded_parameters(way, group, rank, world):
    def loss(model, rank, step):
        parameters = dict(model.named_parameters())
        return torch.func.functional_call(model, parameters, vectors(rank, step)).square().mean()

    Training(way, group, rank, world, small_mlp, loss).run()


def test_models_of_two_stages_train_side_by_side(group, rank, world):
    trainings = [
        Training(Way("optimizer", stage), group, rank, world, small_mlp, loss_of(vectors))
        for stage in (1, 2)
    ]
    for training in trainings:
        training.backward()
    for training in trainings:
        training.step()
        assert_same_values(training.model, training.expected)
    assert zero_ext.stats(trainings[0].optimizer)["steps"] == 1


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_functional_call_of_other_values(stage):
    """Of averaged weights, say: what it puts in the parameters' places is no parameter of ours."""
    model = zero_ext.shard(MLP(), stage)
    other = MLP(layers=3)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2.0)
    values = {name: p.detach() for name, p in other.named_parameters()}
    batch = rank_data((3, 5), 0)
    frozen = {name: nn.Parameter(v, requires_grad=False) for name, v in values.items()}
    assert_bits(torch.func.functional_call(model, frozen, (batch,)), other(batch))
    with torch.no_grad():
        assert_bits(torch.func.functional_call(model, values, (batch,)), other(batch))
    inputs = batch.clone().requires_grad_()
    torch.func.functional_call(model, values, (inputs,)).sum().backward()
    assert inputs.grad is not None
    assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
    mean_square(model, batch).backward()


@pytest.mark.dist
@pytest.mark.parametrize("kind", [nn.ParameterList, nn.ParameterDict])
def test_lists_of_parameters_are_no_units(kind, mesh, rank):
    class Groups(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            values = [torch.randn(6, 6) for _ in range(2)]
            parts = [kind([v]) if kind is nn.ParameterList else kind({"w": v}) for v in values]
            self.groups = nn.ModuleList(parts)

        def forward(self, x):
            for group in self.groups:
                x = x @ (group[0] if kind is nn.ParameterList else group["w"])
            return x

    model, plain = zero_ext.shard(Groups(), 3, mesh=mesh, bucket_mb=1e-4), Groups()
    batch = rank_data((2, 6), rank)
    assert_bits(model(batch), plain(batch))
