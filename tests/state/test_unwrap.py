"""unwrap: a sharded module is plain again, and can be sharded anew."""

import copy

import pytest
import torch
from harness import MLP, Tied, assert_bits, mean_square
from setups import train_batch
from torch import nn

import zero_ext
from zero_ext.engine.carried import Carried


def trained(model, mesh, rank, stage, steps):
    zero_ext.shard(model, stage, mesh=mesh, bucket_mb=200 / 2**20)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.05)
    for step in steps:
        dtype = next(model.parameters()).dtype
        mean_square(model, train_batch(rank, step, dtype=dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def carried_in(model) -> list:
    found = []
    for module in model.modules():
        for value in vars(module).values():
            inside = list(value.values()) if isinstance(value, dict) else [value]
            found += [v for v in inside if isinstance(getattr(v, "hook", v), Carried)]
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_module_is_plain_again(anywhere, rank, stage):
    for dtype in (torch.float32, torch.bfloat16):
        model = MLP(13).to(dtype)
        model.layers[0].bias.requires_grad_(False)
        before = {name: sorted(vars(module)) for name, module in model.named_modules()}
        optimizer = trained(model, anywhere, rank, stage, range(2))
        masters = {n: zero_ext.full_tensor(p) for n, p in model.named_parameters()}
        mean_square(model, train_batch(rank, dtype=dtype)).backward()  # dropped
        ids = [id(p) for p in model.parameters()]
        assert zero_ext.unwrap(model) is model
        assert not carried_in(model) and optimizer.param_groups == []
        assert {n: sorted(vars(m)) for n, m in model.named_modules()} == before
        assert ids == [id(p) for p in model.parameters()]
        for name, p in model.named_parameters():
            assert type(p) is nn.Parameter and p.grad is None
            assert_bits(p, masters[name].to(dtype), name)
            assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
        # Plain torch trains it, without a message to another rank.
        alone = copy.deepcopy(model)
        for each in (model, alone):
            torchs = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
            mean_square(each, train_batch(0, dtype=dtype)).backward()
            torchs.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert_bits(p, q)
        for p in model.parameters():
            p.grad = None
        # Sharded anew, with another stage, it trains like a model that was never sharded.
        fresh = copy.deepcopy(model)
        trained(model, anywhere, rank, 3 - stage, range(3))
        trained(fresh, anywhere, rank, 3 - stage, range(3))
        for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
            assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q))


def test_tied_parameters_methods_and_what_cannot_be_unwrapped(anywhere, rank):
    model = Tied()
    plain = copy.deepcopy(model)
    zero_ext.shard(model, 3, mesh=anywhere)
    zero_ext.register_forward_method(model, "extra_repr")
    zero_ext.unwrap(model)
    names = dict(model.named_parameters(remove_duplicate=False))
    for name, p in plain.named_parameters(remove_duplicate=False):
        assert_bits(names[name], p)
    assert len({id(p) for p in names.values()}) == len(list(plain.parameters()))
    assert not carried_in(model)
    assert zero_ext.unwrap(model) is model  # a plain one stays as it is
    with pytest.raises(TypeError, match="unwrap"):
        zero_ext.unwrap("model")
    zero_ext.shard(model, 3, mesh=anywhere)
    refused = pytest.raises(RuntimeError, match=r"unwrap\(\) inside summon_full_params")
    with refused, model.summon_full_params(writeback=False):
        zero_ext.unwrap(model)
    assert zero_ext.full_tensor(next(model.parameters())).shape == next(plain.parameters()).shape


def test_destroy(anywhere, rank):
    import zero_ext.deepspeed as deepspeed

    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}}
    config["zero_optimization"] = {"stage": 3}
    model = MLP(13)
    for _ in range(2):
        engine, *_ = deepspeed.initialize(model=model, config=config, mesh=anywhere)
        engine.backward(mean_square(engine, train_batch(rank)))
        engine.step()
        engine.destroy()
        assert engine.module is model and engine.optimizer is None
        with pytest.raises(RuntimeError, match=r"step\(\) needs an optimizer"):
            engine.step()
    assert not carried_in(model)
