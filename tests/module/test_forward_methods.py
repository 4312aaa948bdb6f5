"""``register_forward_method``: methods beside ``forward`` are forwards to a sharded model."""

import copy
import inspect
import pickle
import weakref

import pytest
import torch
from harness import (
    ResidualBlock,
    assert_bits,
    mean_square,
    rank_batches,
    rank_data,
    reference_gradients,
)
from reference import gradients_of
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import zero_ext

WIDTH = 7
SHAPE = (4, WIDTH)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def logits(self, x: Tensor) -> Tensor:
        return x * self.scale


class Autoencoder(nn.Module):
    """Nobody calls its forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.rand(WIDTH))
        self.encoder = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(2))
        self.decoder = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(2))
        self.head = Head()

    def encode(self, x: Tensor, *, recompute: bool = False) -> Tensor:
        """To a hidden state."""
        x = x + self.shift
        for block in self.encoder:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x

    def decode(self, x: Tensor, fails: bool = False) -> dict[str, Tensor]:
        for block in self.decoder:
            x = block(x)
        if fails:
            raise ArithmeticError("in the middle of it")
        return {"output": self.head.logits(x) - self.shift}

    @staticmethod
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    def both(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))["output"]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    output = model.decode(model.doubled(model.encode(batch, recompute=True)))["output"]
    return output.float().square().mean()


def sharded(stage: int, mesh=None, methods=("encode", "decode", "doubled"), **arguments):
    model = zero_ext.shard(Autoencoder(), stage, mesh=mesh, bucket_mb=1e-4, **arguments)
    for name in methods:
        zero_ext.register_forward_method(model, name)
    return model


@STAGES
def test_gradients_have_the_bits_of_one_process(anywhere, rank, world, stage):
    model = sharded(stage, anywhere, reduction="exchange")
    batches = rank_batches(SHAPE, world)
    loss_of(model, batches[0][rank]).backward()
    expected = reference_gradients(Autoencoder, batches, world, 1 / world, loss_of)
    for name, gradient in gradients_of(model).items():
        if world in (1, 2, 4):
            assert_bits(gradient, expected[name], name)
        else:
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_what_is_not_registered_says_whose_parameters_are_missing(mesh, rank):
    model = sharded(3, mesh, methods=())
    x = rank_data(SHAPE, rank)
    with pytest.raises(RuntimeError, match=r"zero_ext \[rank \d, unit 'shift.*released"):
        model.encode(x)
    zero_ext.register_forward_method(model, "encode")
    hidden = model.encode(x)
    assert not hidden.isnan().any()
    with torch.no_grad():
        assert_bits(model.encode(x), hidden.detach())


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_parameters_are_released_behind_a_method(mesh, rank):
    model = sharded(3, mesh)
    x = rank_data(SHAPE, rank)
    with torch.no_grad():
        model.decode(model.encode(x))
    assert model.stats()["bytes_full"] == 0
    loss_of(model, x).backward()
    assert model.stats()["bytes_full"] == 0
    with pytest.raises(ArithmeticError):
        model.decode(x, fails=True)
    with torch.no_grad(), pytest.raises(ArithmeticError):
        model.decode(x, fails=True)
    assert model.stats()["bytes_full"] == 0
    loss_of(model, x).backward()  # everything goes on
    assert model.stats()["bytes_full"] == 0


@STAGES
def test_a_method_of_a_submodule(anywhere, rank, world, stage):
    """Its parameters belong to the root's unit, which is gathered for it."""
    model = sharded(stage, anywhere, methods=(), reduction="exchange")
    zero_ext.register_forward_method(model.head, "logits")

    def loss(model, x):
        return model.head.logits(x).square().mean()

    batches = rank_batches(SHAPE, world)
    loss(model, batches[0][rank]).backward()
    expected = reference_gradients(Autoencoder, batches, world, 1 / world, loss)
    found = gradients_of(model)
    torch.testing.assert_close(found["head.scale"], expected["head.scale"], rtol=1e-5, atol=1e-7)
    assert found["shift"] is None


def test_a_method_may_call_another_and_the_forward(anywhere, rank):
    model = sharded(3, anywhere, methods=("encode", "decode", "both"))
    x = rank_data(SHAPE, rank)
    with torch.no_grad():
        whole = model.both(x)
        assert_bits(whole, model.decode(model.encode(x))["output"])
    plain = Autoencoder()
    torch.testing.assert_close(whole, plain.both(x).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_inputs_and_outputs_are_cast(anywhere, rank, stage):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = sharded(stage, anywhere, methods=("both",), mp_policy=policy)
    inside = []
    model.encoder[0].register_forward_pre_hook(lambda _, args: inside.append(args[0].dtype))
    assert model.both(rank_data(SHAPE, rank)).dtype == torch.float32
    assert inside == [torch.bfloat16]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_plain_and_its_methods_are_its_own(anywhere, rank, stage, how):
    model = sharded(stage, anywhere)
    x = rank_data(SHAPE, rank)
    with torch.no_grad():
        expected = model.encode(x)
        with model.summon_full_params(writeback=False):
            twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        assert_bits(twin.encode(x), expected)
        twin.shift += 1
        assert not torch.equal(twin.encode(x), expected)
        assert_bits(model.encode(x), expected)
    assert twin.encode(x).requires_grad


def test_a_model_with_methods_goes_without_a_garbage_collection(anywhere, rank):
    model = sharded(3, anywhere)
    loss_of(model, rank_data(SHAPE, rank)).backward()
    gone = weakref.ref(model)
    del model
    assert gone() is None


def test_names_and_documentation_stay(anywhere):
    model = sharded(2, anywhere)
    assert model.encode.__name__ == "encode"
    assert model.encode.__doc__ == "To a hidden state."
    assert list(inspect.signature(model.encode).parameters) == ["x", "recompute"]
    registered = model.encode
    zero_ext.register_forward_method(model, "encode")
    assert model.encode is registered


def test_functions_of_the_instance_are_methods_too(anywhere, rank):
    model = sharded(3, anywhere, methods=())
    model.shifted = lambda x: x + model.shift
    zero_ext.register_forward_method(model, "shifted")
    x = rank_data(SHAPE, rank)
    assert_bits(model.shifted(x).detach(), x + Autoencoder().shift.detach())


def test_what_cannot_be_registered_is_refused():
    model = sharded(2, None, methods=())
    for name in ("enkode", "shift"):
        with pytest.raises(ValueError, match=f"Autoencoder has no method '{name}'"):
            zero_ext.register_forward_method(model, name)
    with pytest.raises(ValueError, match="no parameter of this Autoencoder was sharded"):
        zero_ext.register_forward_method(Autoencoder(), "encode")
    alone = Autoencoder()
    zero_ext.optim.SGD(alone.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no parameter of this Autoencoder was sharded"):
        zero_ext.register_forward_method(alone, "encode")


def test_the_forward_is_one_already():
    model = zero_ext.shard(nn.Linear(3, 3), 2)
    zero_ext.register_forward_method(model, "forward")
    mean_square(model, torch.ones(2, 3)).backward()
    assert model.weight.grad is not None
