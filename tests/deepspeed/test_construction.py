"""zero.Init: a model is built in pieces, with its own initialisation; what else scripts call."""

import pytest
import torch
from harness import assert_bits
from test_initialize import initialized
from test_models import TwoLayers, assert_close, steps_of_both
from torch import nn

import zero_ext
import zero_ext.deepspeed as deepspeed


class Net(nn.Module):
    """With an initialisation of its own, a tied weight, torch's attention and a scalar."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.own = nn.Parameter(torch.randn(7))
        self.register_buffer("mask", torch.eye(5))
        self.apply(self._initialise)

    def _initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x) * self.scale + self.own.sum()


def tokens_of(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(11, (4, 5), generator=generator)


def run(engine, rank, steps=2):
    losses = []
    for step in range(steps):
        tokens = tokens_of(rank, step)
        logits = engine(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def config_of(stage, **others):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
        **others,
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_was_built_in_pieces_is_the_same(anywhere, rank, world, stage):
    if anywhere is None and world > 1:
        pytest.skip("pieces are of the whole process group")
    torch.manual_seed(3)
    plain = Net()
    torch.manual_seed(3 + rank)  # rank 0's values are everyone's
    with deepspeed.zero.Init(config_dict_or_path=config_of(stage), remote_device="cpu"):
        model = Net()
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        assert p.shape == expected[name].shape
        if p.numel() > 1:
            assert p.untyped_storage().nbytes() == 4
            piece = p._zero_ext_piece
            assert piece.numel() == -(-p.numel() // world) and not piece.isnan().any()
            for write in (p.zero_, p.normal_, lambda p=p: p.copy_(torch.ones_like(p))):
                with pytest.raises(RuntimeError), torch.no_grad():
                    write()
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        for name, p in model.named_parameters():
            assert_bits(p, expected[name], name)
        with torch.no_grad():
            model.own.zero_()  # lost: nobody is the modifier
    with deepspeed.zero.GatheredParameters(model.blocks[1].weight, modifier_rank=0):
        if rank == 0:
            model.blocks[1].weight.data.fill_(0.25)
    with torch.no_grad():
        plain.blocks[1].weight.fill_(0.25)
    assert model.head.weight is model.embedding.weight
    # The optimizer was made of the cut parameters.
    given = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, plain)]
    config = config_of(stage)
    del config["optimizer"]
    mine, theirs = (
        deepspeed.initialize(model=m, optimizer=o, config=config, mesh=anywhere)[0]
        for m, o in zip((model, plain), given, strict=True)
    )
    assert_bits(mine.mask, torch.eye(5))
    assert run(mine, rank) == run(theirs, rank)
    for (name, p), q in zip(
        mine.module.named_parameters(), theirs.module.parameters(), strict=True
    ):
        assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q), name)


def test_settings_of_init(anywhere, rank, world):
    if anywhere is None and world > 1:
        pytest.skip("pieces are of the whole process group")
    with deepspeed.zero.Init(enabled=False):
        assert not hasattr(nn.Linear(3, 5).weight, "_zero_ext_piece")
    torch.manual_seed(0)
    before = nn.Linear(3, 5)
    weight = before.weight.detach().clone()
    deepspeed.zero.Init(module=before, dtype=torch.bfloat16)
    assert before.weight.dtype == torch.bfloat16 and before.weight.shape == (5, 3)
    with deepspeed.zero.GatheredParameters(before.weight):
        assert_bits(before.weight, weight.bfloat16())
    apply = nn.Module.apply
    with pytest.raises(KeyError), deepspeed.zero.Init():
        raise KeyError
    assert nn.Module.apply is apply
    outside = nn.Sequential(nn.Linear(3, 5))
    assert not outside[0].weight.isnan().any()


def test_activation_checkpoints_and_the_accelerator():
    layer = nn.Linear(5, 5)
    x = torch.ones(2, 5, requires_grad=True)
    calls = []

    def forward(x, factor):
        calls.append(1)
        return torch.tanh(layer(x)) * factor

    deepspeed.checkpointing.configure(None, partition_activations=False)
    assert deepspeed.checkpointing.is_configured()
    deepspeed.checkpointing.checkpoint(forward, x, 2.0).sum().backward()
    gradient, x.grad = x.grad, None
    (torch.tanh(layer(x)) * 2).sum().backward()
    assert_bits(gradient, x.grad)
    assert len(calls) == 2
    factor = torch.tensor(2.0, requires_grad=True)
    x.grad, before = None, len(calls)
    deepspeed.checkpointing.non_reentrant_checkpoint(forward, x, factor=factor).sum().backward()
    assert_bits(gradient, x.grad)
    assert len(calls) == before + 2 and factor.grad == torch.tanh(layer(x)).sum()
    with pytest.raises(ValueError, match="no model parallelism"):
        deepspeed.checkpointing.configure(object())
    accelerator = deepspeed.get_accelerator()
    assert accelerator is deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        assert accelerator.current_device_name() == "cpu" and accelerator.device_count() == 1
        assert accelerator.communication_backend_name() == "gloo"
        accelerator.synchronize()
        accelerator.empty_cache()
        accelerator.set_device(0)
        assert accelerator.memory_allocated() == accelerator.max_memory_allocated(0) == 0
        with pytest.raises(AttributeError, match="has no 'warp_size'"):
            _ = accelerator.warp_size


SGD = {"type": "SGD", "params": {"lr": 0.1}}


def engine_of(mesh, model):
    return initialized(mesh, model, 3, SGD, gradient_accumulation_steps=1)


def test_contexts_inside_contexts(anywhere, rank, world):
    if anywhere is None and world > 1:
        pytest.skip("pieces are of the whole process group")
    torch.manual_seed(5)
    with deepspeed.zero.Init():

        class Inside(TwoLayers):
            pass

        with deepspeed.zero.Init():
            inner = Inside()
        assert inner.first.weight.isnan().all()
        outer = Inside()
        engine = engine_of(anywhere, inner)
        with deepspeed.zero.Init():
            third = nn.Linear(4, 3)
        one = nn.Linear(1, 1)
    apart = nn.Linear(4, 3)
    assert not apart.weight.isnan().any() and outer.second.weight.isnan().all()
    assert third.weight.isnan().all() and not one.weight.isnan().any()
    steps_of_both(engine, plain := TwoLayers(), anywhere, rank)
    assert_close(engine, plain)
    with deepspeed.zero.GatheredParameters(outer.parameters()):
        for p, q in zip(outer.parameters(), TwoLayers().parameters(), strict=True):
            assert_bits(p.detach(), q.detach())


class Elder(nn.Module):
    """Each class changes what its elders have made, in their constructors."""

    def __init__(self):
        super().__init__()
        self.elder = nn.Parameter(torch.ones(5))
        self.elder.data = self.elder.data + 1


class Younger(Elder):
    def __init__(self):
        super().__init__()
        self.younger = nn.Parameter(torch.ones(7))
        self.elder.data.mul_(2)
        with torch.no_grad():
            self.younger += self.elder[0]


def test_constructors_that_change_inherited_parameters(anywhere, world):
    if anywhere is None and world > 1:
        pytest.skip("pieces are of the whole process group")
    with deepspeed.zero.Init():
        model = Younger()
        nested = nn.ModuleDict({"a": Younger()})
    for each in (model, nested["a"]):
        assert each.elder.isnan().all() and each.younger.isnan().all()
        with deepspeed.zero.GatheredParameters([each.elder, each.younger]):
            assert each.elder.tolist() == [4.0] * 5 and each.younger.tolist() == [5.0] * 7


def test_an_engine_that_is_made_inside_the_context(anywhere, rank, world):
    if anywhere is None and world > 1:
        pytest.skip("pieces are of the whole process group")
    with deepspeed.zero.Init():
        model = TwoLayers()
        engine = engine_of(anywhere, model)
    assert engine.id == 3
    steps_of_both(engine, plain := TwoLayers(), anywhere, rank)
    assert_close(engine, plain)
