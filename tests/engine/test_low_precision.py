"""Parameters of classes with FSDP2's hooks around a gather: what forwards compute with is what the
hooks make, with the bits of one process, and everything else is as for a plain parameter."""

import pytest
import torch
import torch.distributed.fsdp as torchs
from float8_weights import Float8, Float8Weight, RoundedLinear, SentAsItIs, with_float8_weights
from harness import ONE_UNIT_EACH, assert_bits, mean_square, rank_batches, rank_data
from reference import OneProcess, fma_gradients, gradients_of, whole
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.utils.checkpoint import checkpoint

import zero_ext
from zero_ext import fsdp
from zero_ext.engine.registry import find
from zero_ext.tensor.shard_tensor import ShardTensor

SHAPE = (3, 7)
BF16, F32 = torch.bfloat16, torch.float32

pytestmark = [
    pytest.mark.usefixtures("no_stale_meshes"),
    pytest.mark.dist,
    pytest.mark.world(min=2),
]


class Linear(nn.Linear):
    seen: tuple[Tensor, ...] = ()  # the weight of the last forward

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (self.weight,)
        return super().forward(x)


class Model(nn.Module):
    """Weights of 399, 1,083 and 247 elements."""

    def __init__(self, linear: type[nn.Linear] = Linear, widths=(7, 57, 19, 13)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(linear, widths[:-1], widths[1:]))
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
            x = torch.tanh(x)
        return x


def float8_model(**options) -> Model:
    return with_float8_weights(Model(), **options)


def by_layer(model: Model, **options) -> Model:
    return zero_ext.shard(model, 3, units=nn.Linear, bucket_mb=ONE_UNIT_EACH, **options)


def checkpointed(model: Model) -> Model:
    model.checkpoints = True
    return model


WAYS = {
    "by layer": lambda: by_layer(float8_model()),
    "one unit": lambda: zero_ext.shard(float8_model(), 3),
    "kept": lambda: by_layer(float8_model(), reshard_after_forward=False),
    "checkpoints": lambda: checkpointed(by_layer(float8_model())),
    "checkpoints in a unit": lambda: checkpointed(zero_ext.shard(float8_model(), 3)),
    "rounded after the gather": lambda: by_layer(float8_model(kind=SentAsItIs)),
    "stage 2": lambda: zero_ext.shard(float8_model(), 2),
    "checkpoints with stage 1": lambda: checkpointed(zero_ext.shard(float8_model(), 1)),
    "fully_shard": lambda: fsdp.fully_shard(float8_model()),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_one_process_s_bits(way, world, rank):
    model = WAYS[way]()
    parameters = [*model.parameters()]
    torch.optim.SGD(parameters, lr=0.1)
    batches = rank_batches(SHAPE, world, micros=2)
    losses = []
    for k, micro in enumerate(batches):
        losses.append(mean_square(model, micro[rank]))
        losses[-1].backward(retain_graph=k == 0)
    plain = Model(RoundedLinear)
    assert_bits(losses, [mean_square(plain, micro[rank]) for micro in batches])
    expected = fma_gradients(plain, batches, world)
    for name, gradient in gradients_of(model).items():
        assert_bits(gradient, expected[name], name)
    assert all(type(layer.seen[0]) is Float8 for layer in model.layers)
    assert all(map(lambda a, b: a is b, model.parameters(), parameters))


@pytest.mark.parametrize("kind", [Float8Weight, SentAsItIs])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_one_process_s_in_every_stage(stage, dtype, kind, world, rank):
    """The class rounds what the unit computes in, and masters are fp32."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype)
    model = float8_model(kind=kind)
    zero_ext.shard(model, stage, units=nn.Linear, bucket_mb=ONE_UNIT_EACH, mp_policy=policy)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    masters = {name: p.detach().clone() for name, p in Model().named_parameters()}
    plain = Model(RoundedLinear).to(dtype)
    reference = OneProcess(plain, lambda p: torch.optim.SGD(p, lr=0.5), masters)
    for step in range(3):
        batches = rank_batches(SHAPE, world, step, dtype=dtype)
        loss = mean_square(model, batches[0][rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert_bits(loss, mean_square(reference.model, batches[0][rank]))
        reference.step(fma_gradients(reference.model, batches, world))
    assert all(type(layer.seen[0]) is Float8 for layer in model.layers)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert_bits(zero_ext.full_tensor(parameter), reference.masters[name], name)


@pytest.mark.host
@pytest.mark.parametrize("policy", [{}, {"param_dtype": BF16, "reduce_dtype": F32}])
def test_training_is_fsdp2s(policy, rank):
    """FSDP2 needs rows that the ranks divide. With a policy it rounds fp32 to float8 at once, where
    this rounds to bf16 first: at most 2**-9 of 1."""
    runs = []
    for library in (fsdp, torchs):
        model = with_float8_weights(Model(widths=(7, 12, 24, 12)))
        for layer in model.layers:
            library.fully_shard(layer, mp_policy=torchs.MixedPrecisionPolicy(**policy))
        library.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(2):
            loss = mean_square(model, rank_data(SHAPE, rank, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(type(layer.seen[0]) is Float8 for layer in model.layers)
        named = model.named_parameters()
        values = {n: (zero_ext.full_tensor if find(p) else whole)(p) for n, p in named}
        runs.append((loss.item(), {n: getattr(v, "high", v) for n, v in values.items()}))
    (ours, our_values), (theirs, their_values) = runs
    bound = 2**-9 if policy else 1e-6
    assert ours == pytest.approx(theirs, abs=bound)
    for name, value in their_values.items():
        torch.testing.assert_close(our_values[name], value, rtol=0, atol=bound, msg=name)


def test_memory_of_what_the_hooks_made_goes_with_the_unit(rank):
    model = by_layer(float8_model())
    loss = mean_square(model, rank_data(SHAPE, rank))
    assert type(model.layers[0].weight) is Float8Weight
    kept = model.layers[0].seen[0].float8
    plain = by_layer(Model())
    with pytest.raises(RuntimeError, match=r"parameter 'layers.0.weight'.* is released"):
        kept.float()
    loss.backward()
    with pytest.raises(RuntimeError, match="is released"):
        kept.float()
    mean_square(plain, rank_data(SHAPE, rank)).backward()
    assert model.stats()["gathers"] == plain.stats()["gathers"]


def test_writes_count_while_parameters_are_held(rank):
    model, plain = by_layer(float8_model()), Model(RoundedLinear)
    x = rank_data(SHAPE, rank)
    model.unshard()
    mean_square(model, x)
    for each in (model, plain):
        with torch.no_grad():
            each.layers[0].weight.mul_(3)
            each.layers[1].weight.data.mul_(2)
    assert_bits(mean_square(model, x), mean_square(plain, x))


def test_values_and_states_are_those_of_the_weight_inside(world, rank):
    model, plain = by_layer(float8_model()), Model()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert type(state[name]) is ShardTensor
        assert_bits(state[name].full_tensor(), value, name)
    changed = {name: value + 1 for name, value in plain.state_dict().items()}
    model.load_state_dict(with_float8_weights(_with_values(changed)).state_dict())
    with model.summon_full_params(), torch.no_grad():
        for name, parameter in model.named_parameters():
            assert_bits(getattr(parameter, "high", parameter).detach(), changed[name], name)
        model.layers[0].weight.mul_(2)
    changed["layers.0.weight"] *= 2
    loss = mean_square(model, rank_data(SHAPE, rank))
    rounded = Model(RoundedLinear)
    rounded.load_state_dict(changed)
    assert_bits(loss, mean_square(rounded, rank_data(SHAPE, rank)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whole_values_are_plain_and_an_unwrapped_model_has_its_class(stage, rank):
    model, plain = zero_ext.shard(float8_model(), stage), Model()
    expected = plain.state_dict()
    for name, value in zero_ext.iter_full_params(model):
        assert type(value.detach()) is Tensor
        assert_bits(value.detach(), expected[name], name)
    zero_ext.unwrap(model)
    assert type(model.layers[0].weight) is Float8Weight
    for name, parameter in model.named_parameters():
        assert_bits(getattr(parameter, "high", parameter).detach().clone(), expected[name], name)
    x = rank_data(SHAPE, rank)
    assert_bits(mean_square(zero_ext.shard(model, stage), x), mean_square(Model(RoundedLinear), x))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_may_be_replaced(stage, world, rank):
    model, plain = zero_ext.shard(float8_model(), stage), Model(RoundedLinear)
    batches = rank_batches(SHAPE, world)
    mean_square(model, batches[0][rank]).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=1.0)
    optimizer.clip_grad_norm_(1e9)
    for name, gradient in fma_gradients(plain, batches, world).items():
        assert_bits(zero_ext.full_grad(model.get_parameter(name)), gradient / 2, name)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_functional_calls_have_the_callers_values(stage, rank):
    model, plain = zero_ext.shard(float8_model(), stage, units=nn.Linear), Model()
    values = {name: value / 2 for name, value in plain.state_dict().items()}
    x = rank_data(SHAPE, rank)
    for each in (model, plain):
        each.outputs = torch.func.functional_call(each, values, (x,))
    assert_bits(model.outputs, plain.outputs)
    assert type(model.layers[0].weight) is Float8Weight


class _Product(torch.autograd.Function):
    """It keeps the low-precision weight itself, as torchao's does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class KeepingLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight) + self.bias


@pytest.mark.parametrize("kind", [Float8Weight, SentAsItIs])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_of_values_before_an_update_raises(stage, kind, world, rank):
    model, plain = with_float8_weights(Model(KeepingLinear), kind), Model(RoundedLinear)
    zero_ext.shard(model, stage, units=nn.Linear, bucket_mb=ONE_UNIT_EACH)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    batches = rank_batches(SHAPE, world, micros=2)
    early, late = (mean_square(model, micro[rank]) for micro in batches)
    early.backward()
    for name, gradient in fma_gradients(plain, batches[:1], world).items():
        assert_bits(zero_ext.full_grad(model.get_parameter(name)), gradient, name)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    torch.distributed.barrier()  # another rank may still gather


def _with_values(values: dict[str, Tensor]) -> Model:
    model = Model()
    model.load_state_dict(values)
    return model


@pytest.mark.parametrize("kind", [Float8Weight, SentAsItIs])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_frozen_weight_may_be_unfrozen(stage, kind, world, rank):
    model, plain = float8_model(kind=kind), Model(RoundedLinear)
    for each in (model, plain):
        each.layers[1].weight.requires_grad_(False)
    zero_ext.shard(model, stage, units=nn.Linear, bucket_mb=ONE_UNIT_EACH)
    for frozen in (True, False):
        for each in (model, plain):
            each.layers[1].weight.requires_grad_(not frozen)
        batches = rank_batches(SHAPE, world)
        mean_square(model, batches[0][rank]).backward()
        expected = fma_gradients(plain, batches, world)
        for name, gradient in gradients_of(model).items():
            assert_bits(gradient, expected[name], name)
        model.zero_grad()


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_has_the_same_bits(stage, rank):
    model, plain = zero_ext.shard(float8_model(), stage, mesh="alone"), Model(RoundedLinear)
    x = rank_data(SHAPE, rank)
    for each in (model, plain):
        mean_square(each, x).backward()
    for name, parameter in plain.named_parameters():
        assert_bits(model.get_parameter(name).grad, parameter.grad, name)
    lone = zero_ext.shard(float8_model(), stage)
    assert_bits(lone.layers[0](x), plain.layers[0](x), "a module inside, called alone")


def test_ranks_have_the_same_classes(rank):
    model = float8_model() if rank == 0 else Model()
    with pytest.raises(ValueError, match=r"layers.0.weight .*Float8Weight"):
        zero_ext.shard(model, 3)
    assert type(model.layers[0].weight) is (Float8Weight if rank == 0 else nn.Parameter)


def test_stages_0_to_2_need_something_that_is_trained(rank):
    model = float8_model().requires_grad_(False)
    with pytest.raises(ValueError, match=r"'layers.0.weight' .*nothing is trained"):
        zero_ext.shard(model, 2)
    zero_ext.shard(model, 3)
    assert_bits(model(rank_data(SHAPE, rank)), Model(RoundedLinear)(rank_data(SHAPE, rank)))


def test_a_hook_that_raises_leaves_the_model_usable(world, rank):
    model, plain = by_layer(float8_model()), Model(RoundedLinear)
    batches = rank_batches(SHAPE, world)
    Float8Weight.fails = 1
    with pytest.raises(RuntimeError, match="the first hook fails"):
        model(batches[0][rank])
    loss = mean_square(model, batches[0][rank])
    Float8Weight.fails = 1
    with pytest.raises(RuntimeError, match="the first hook fails"):
        loss.backward()
    mean_square(model, batches[0][rank]).backward()
    for name, gradient in gradients_of(model).items():
        assert_bits(gradient, fma_gradients(plain, batches, world)[name], name)


class OneHook(Float8Weight):
    fsdp_post_all_gather = None


class AnotherShape(Float8Weight):
    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        return outputs[0].float()[:-1], outputs


class NoPair(Float8Weight):
    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        return outputs[0].float()


class ThreeArguments(Float8Weight):
    def fsdp_pre_all_gather(self, mesh, module, mp_policy):
        return (), None


class OnlyFloat8(Float8Weight):
    def __tensor_flatten__(self):
        return [], None


def _cut(model: Model) -> None:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))["tp"]
    layer = model.layers[0]
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))


@pytest.mark.parametrize(
    ("kind", "change", "error", "match"),
    [
        (OneHook, None, TypeError, "has fsdp_pre_all_gather and no fsdp_post_all_gather"),
        (OnlyFloat8, None, TypeError, r"must wrap one tensor of its own shape \(57, 7\)"),
        (ThreeArguments, None, TypeError, "of 3 arguments. FSDP2 calls it with one, mesh"),
        (Float8Weight, Model.to_empty, TypeError, "is on the meta device. Give it values"),
        (Float8Weight, _cut, TypeError, "DTensor of a Float8Weight"),
    ],
)
def test_classes_that_cannot_be_gathered_are_named(kind, change, error, match, rank):
    model = float8_model(kind=kind)
    if change is Model.to_empty:
        model.to_empty(device="meta")
    elif change is not None:
        change(model)
    with pytest.raises(error, match=rf"rank {rank}\]: parameter 'layers.0.weight' is a.*{match}"):
        zero_ext.shard(model, 3)
    assert type(model.layers[1].weight) is kind


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        (AnotherShape, ValueError, r"returned a tensor of shape \(56, 7\), the parameter has"),
        (NoPair, TypeError, "must return a tensor and a tuple of the tensors inside it"),
    ],
)
def test_what_the_second_hook_returns_is_checked(kind, error, match, rank):
    model = zero_ext.shard(float8_model(kind=kind), 3)
    with pytest.raises(error, match=f"parameter 'layers.0.weight': .*{match}"):
        model(rank_data(SHAPE, rank))
