"""mp_policy as a function: norms, routers and heads in another dtype than the rest."""

import copy
import pickle

import pytest
import torch
from harness import assert_bits, rank_batches, rank_data, reference_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zero_ext

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WIDE = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
SHAPE = (4, 7)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.router = nn.Linear(7, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        mixed = [weights[:, k : k + 1] * expert(y) for k, expert in enumerate(self.experts)]
        return x + sum(mixed).tanh()


class Model(nn.Module):
    def __init__(self, blocks: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(7, 13)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_norms_and_routers(name: str, module: nn.Module) -> MixedPrecisionPolicy | None:
    if name == "":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    return WIDE if name.endswith(("norm", "router")) else None


def of_the_head(name: str, module: nn.Module) -> MixedPrecisionPolicy | None:
    """Only a part is in half precision."""
    return NARROW if isinstance(module, Block) else None


def without_casts(name: str, module: nn.Module) -> MixedPrecisionPolicy | None:
    if name.startswith("head"):
        return MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
    return NARROW if name == "blocks.1" else None


CHOICES = [of_norms_and_routers, of_the_head, without_casts]


def cast_by_hand(model: nn.Module, choice) -> nn.Module:
    """Plain PyTorch: parameters in their dtypes, and a hook around each module."""
    policies = {"": choice("", model) or MixedPrecisionPolicy()}
    for name, module in model.named_modules():
        given = choice(name, module)
        around = policies[name.rpartition(".")[0]] if name else policies[""]
        policies[name] = given or around
        policy = policies[name]
        for p in module.parameters(recurse=False):
            p.data = p.data.to(policy.param_dtype or p.dtype)
        is_unit = name == "" or (name.startswith("blocks.") and name.count(".") == 1)
        if (given or is_unit) and policy.param_dtype and policy.cast_forward_inputs:
            dtype = policy.param_dtype
            module.register_forward_pre_hook(lambda _, args, dtype=dtype: (args[0].to(dtype),))
        if (given or name == "") and policy.output_dtype:
            dtype = policy.output_dtype
            module.register_forward_hook(lambda _, __, out, dtype=dtype: out.to(dtype))
    return model


def loss_of(model, x):
    return model(x).float().square().mean()


@pytest.mark.dist
@pytest.mark.parametrize("choice", CHOICES)
@STAGES
def test_as_plain_pytorch_with_casts_by_hand(stage, choice, mesh, rank, world):
    model, plain = Model(), cast_by_hand(Model(), choice)
    names = "blocks.0", "blocks.1", "blocks.2"
    zero_ext.shard(model, stage, mesh=mesh, mp_policy=choice, units=lambda name, _: name in names)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()]
    x = rank_data(SHAPE, rank)
    assert_bits(model(x).detach(), plain(x).detach())
    model.set_gradient_divide_factor(1)
    loss_of(model, x).backward()
    expected = reference_gradients(
        lambda: cast_by_hand(Model(), choice), rank_batches(SHAPE, world), world, loss_fn=loss_of
    )
    for name, p in model.named_parameters():
        assert_bits(zero_ext.full_grad(p), expected[name], name)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_forward_has_fsdp2s_bits(group, mesh, rank, world):
    """A policy of its own for each call of fully_shard."""
    if mesh.ndim > 1 or torch.get_default_device().type != "cpu":
        pytest.skip("FSDP2 on the host, in one dimension")
    theirs, ours = Model(), Model()
    line = DeviceMesh.from_group(group, "cpu")
    for block in theirs.blocks:
        for module in (block.norm, block.router):
            fully_shard(module, mesh=line, mp_policy=WIDE)
        fully_shard(block, mesh=line, mp_policy=HALF)
    whole = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(theirs, mesh=line, mp_policy=whole)
    zero_ext.shard(ours, 3, mesh=mesh, mp_policy=of_norms_and_routers, units=Block)
    x = rank_data(SHAPE, rank)
    assert_bits(ours(x).detach(), theirs(x).detach())


@pytest.mark.dist
@pytest.mark.parametrize("choice", CHOICES)
def test_all_stages_train_with_the_same_bits(choice, mesh, rank, world):
    trained = []
    for stage in (2, 3):
        model = zero_ext.shard(Model(), stage, mesh=mesh, mp_policy=choice, bucket_mb=1e-4)
        frozen = [p for name, p in model.named_parameters() if "experts.1" in name]
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.05, max_grad_norm=0.1)
        for step in range(4):
            loss_of(model, rank_data(SHAPE, rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for p in frozen:  # frozen first, and unfrozen later: in the dtype of its policy
                p.requires_grad_(step % 2 == 1)
        trained.append({n: zero_ext.full_tensor(p) for n, p in model.named_parameters()})
    for name, value in trained[0].items():
        assert_bits(value, trained[1][name], name)


@STAGES
def test_copies_pickles_and_unwrapped_modules(stage):
    model = zero_ext.shard(Model(), stage, mp_policy=of_norms_and_routers)
    x = rank_data(SHAPE, 0)
    expected = model(x)
    for plain in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), zero_ext.unwrap(model)):
        assert plain.blocks[0].norm.weight.dtype == torch.float32
        assert plain.head.weight.dtype == torch.bfloat16
        assert not plain.blocks[0].norm._forward_hooks and not plain._forward_pre_hooks
    assert_bits(zero_ext.shard(model, stage, mp_policy=of_norms_and_routers)(x), expected)


def two_owners(name: str, module: nn.Module) -> MixedPrecisionPolicy | None:
    return HALF if name == "head" else None


def test_wrong_policies_are_named():
    tied = Model()
    tied.tail = nn.Linear(7, 13)
    tied.tail.weight = tied.head.weight
    with pytest.raises(ValueError, match=r"'tail\.weight' is a parameter of two modules"):
        zero_ext.shard(tied, mp_policy=two_owners)
    reduced = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"gives 'head' reduce_dtype=torch\.bfloat16, and the"):
        zero_ext.shard(Model(), mp_policy=lambda name, _: reduced if name == "head" else None)
    for wrong in (lambda name, module: torch.bfloat16, MixedPrecisionPolicy, "bf16"):
        with pytest.raises(TypeError, match="mp_policy must be"):
            zero_ext.shard(Model(), mp_policy=wrong)
    with pytest.raises(ValueError, match="int8"):
        wrong = MixedPrecisionPolicy(param_dtype=torch.int8)
        zero_ext.shard(Model(), mp_policy=lambda name, _: wrong if name == "head" else None)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_ranks_with_other_policies_raise(mesh, rank, world):
    def of_rank_0(name, module):
        return HALF if rank == 0 and name == "head" else None

    with pytest.raises(ValueError, match="differ between ranks"):
        zero_ext.shard(Model(), mesh=mesh, mp_policy=of_rank_0)
