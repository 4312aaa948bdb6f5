"""States of parameters that share a unit and not an optimizer, or came to it one after another."""

import pytest
import torch
import torch.distributed as dist
from harness import assert_bits, rank_data
from torch import nn

import zero_ext
from zero_ext.engine.registry import find
from zero_ext.optim import SGD, AdamW, Muon

IN_FP32, IN_BF16, IN_INT8 = ({"state_dtype": kind} for kind in ("fp32", "bf16", "int8"))


class Mixed(nn.Module):
    """One unit. Nothing is padded on 1 to 4 ranks, and the matrices have blocks."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("a", (48, 128)), ("b", 1536), ("c", (96, 64)), ("d", 1536)):
            value = torch.randn(shape, generator=generator, device="cpu").to(
                torch.get_default_device()
            )
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        return sum((p * p).sum() * x.mean() for p in self.parameters())


def _sharded(mesh, stage=2):
    return zero_ext.shard(Mixed(), stage, mesh=mesh)


def _train(model, optimizers, rank, steps=3) -> None:
    for step in range(steps):
        model(rank_data((2, 3), rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _held(parameter) -> int:
    handle, i = find(parameter)
    if handle.replicated:
        return parameter.numel()
    bounds, rank = handle.engine.bounds(i), dist.get_rank(handle.groups.mesh.get_group())
    return bounds[rank + 1] - bounds[rank]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_holds_states_of_its_own_parameters_alone(anywhere, rank, stage):
    for make, nbytes in (
        (lambda m: [Muon([m.a, m.c]), AdamW([m.b, m.d])], {"a": 4, "b": 8, "c": 4, "d": 8}),
        (lambda m: [AdamW([m.a, m.b]), AdamW([m.d, m.c])], dict.fromkeys("abcd", 8)),
        (lambda m: [AdamW([m.c], **IN_BF16)], {"c": 4}),
        (lambda m: [AdamW([m.c, m.b], **IN_INT8)], {"c": 2 * 260 / 256, "b": 8}),
        (lambda m: [AdamW([{"params": [p]} for p in (m.d, m.a)])], {"a": 8, "d": 8}),
    ):
        model = _sharded(anywhere, stage)
        optimizers = make(model)
        held = model.stats()["bytes_optimizer_state"]
        expected = {n: k * _held(model.get_parameter(n)) for n, k in nbytes.items()}
        assert held == sum(expected.values()), expected
        _train(model, optimizers, rank, 1)
        assert model.stats()["bytes_optimizer_state"] == held


@pytest.mark.parametrize("settings", [IN_FP32, IN_BF16, IN_INT8], ids=lambda s: s["state_dtype"])
def test_bits_do_not_depend_on_what_lies_together(anywhere, rank, settings):
    def in_two(m):
        return [AdamW([m.d, m.a], **settings), AdamW([m.b, m.c], **settings)]

    def one_after_another(m):
        optimizer = AdamW([m.c], **settings)
        for p in (m.a, m.d, m.b):
            optimizer.add_param_group({"params": [p]})
        first, *others = optimizer.param_groups
        for group in others:  # the parts stay
            first["params"] += group["params"]
            group["params"] = []
        return [optimizer]

    expected = _sharded(anywhere)
    together = [AdamW(expected.parameters(), **settings)]
    _train(expected, together, rank)
    for make in (in_two, one_after_another):
        model = _sharded(anywhere)
        optimizers = make(model)
        _train(model, optimizers, rank)
        for name, p in model.named_parameters():
            other = expected.get_parameter(name)
            assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(other), name)
            (optimizer,) = (o for o in optimizers if p in o.state)
            for key in ("exp_avg", "exp_avg_sq"):
                ours = zero_ext.full_state(optimizer, p, key)
                assert_bits(ours, zero_ext.full_state(together[0], other, key), f"{name} {key}")


def test_a_parameter_that_moves_to_another_optimizer_begins_anew(anywhere, rank):
    model = _sharded(anywhere)
    first, second = SGD([model.a, model.b], lr=0.1, momentum=0.9), AdamW([model.c])
    _train(model, [first, second], rank)
    first.param_groups[0]["params"] = [model.a]
    second.add_param_group({"params": [model.b]})
    assert zero_ext.full_state(second, model.b, "exp_avg").abs().sum() == 0
    before = zero_ext.full_state(first, model.a, "momentum_buffer")
    _train(model, [second], rank, 1)
    assert zero_ext.full_state(second, model.b, "exp_avg").abs().sum() > 0
    assert_bits(zero_ext.full_state(first, model.a, "momentum_buffer"), before)
