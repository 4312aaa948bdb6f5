"""Models of the kinds that DeepSpeed's own tests train, against plain torch."""

import collections
from typing import Any, NamedTuple

import pytest
import torch
from setups import train_batch
from test_initialize import STAGES, initialized
from torch import nn
from torch.nn import functional

import zero_ext
import zero_ext.deepspeed as deepspeed

SGD = {"type": "SGD", "params": {"lr": 0.1}}


class TwoLayers(nn.Module):
    """Each kind below changes the forward alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(5, 13), nn.Linear(13, 7)
        self.id = 3  # a user's own attribute

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class ReturnsItsBias(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.bias


class UsesAReturnedParameter(TwoLayers):
    def __init__(self):
        super().__init__()
        self.first = ReturnsItsBias(5, 13)

    def forward(self, x):
        x, bias = self.first(x)
        return self.second(torch.tanh(x) * bias)


class UsesTheWeightOfAnother(TwoLayers):
    def forward(self, x):
        x = torch.tanh(super().forward(x))
        return functional.linear(x, self.second.weight.T)


class UsesALayerTwice(TwoLayers):
    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.first(x))[:, :5]
        return self.second(self.first(x))


class Delegating(nn.Module):
    """What it does not have, its module has."""

    def __init__(self, module):
        super().__init__()
        self.wrapped = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x):
        return self.wrapped(x)


class HasAWrapper(TwoLayers):
    def __init__(self):
        super().__init__()
        self.second = Delegating(self.second)


class Output(NamedTuple):
    value: Any
    more: Any


Plain = collections.namedtuple("Plain", "value more")
CONTAINERS = {
    "dict": lambda y: {"value": y, "more": None},
    "NamedTuple": lambda y: Output(y, 3),
    "namedtuple": lambda y: Plain(y, "x"),
    "tuple": lambda y: (y, y.sum()),
    "list": lambda y: [y],
    "nested": lambda y: {"value": [(y,)]},
}


class Contained(TwoLayers):
    def __init__(self, kind):
        super().__init__()
        self.kind = CONTAINERS[kind]

    def forward(self, x):
        return self.kind(super().forward(x))


def value_of(output):
    while not isinstance(output, torch.Tensor):
        output = output["value"] if isinstance(output, dict) else output[0]
    return output


MAKERS = {
    "plain": TwoLayers,
    "returns a parameter": UsesAReturnedParameter,
    "another's weight": UsesTheWeightOfAnother,
    "a layer twice": UsesALayerTwice,
    "a wrapper": HasAWrapper,
    **{kind: lambda kind=kind: Contained(kind) for kind in CONTAINERS},
}


def peers_of(mesh, rank):
    return [rank] if mesh is None else range(mesh.size())


def assert_close(engine, plain) -> None:
    for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(zero_ext.full_tensor(p), q.detach(), rtol=1e-5, atol=1e-6)


def steps_of_both(engine, plain, mesh, rank, steps=2) -> None:
    peers = peers_of(mesh, rank)
    torchs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        engine.backward(value_of(engine(train_batch(rank, step))).square().mean())
        engine.step()
        torchs.zero_grad()
        for peer in peers:
            (value_of(plain(train_batch(peer, step))).square().mean() / len(peers)).backward()
        torchs.step()


# Quick tests see every kind with stage 3, which reads what a forward returns.
KINDS = [
    pytest.param(stage, kind, marks=() if stage == 3 or kind == "plain" else pytest.mark.slow)
    for stage in (0, 1, 2, 3)
    for kind in MAKERS
]


@pytest.mark.parametrize(("stage", "kind"), KINDS)
def test_kinds_of_models(anywhere, rank, stage, kind):
    engine = initialized(anywhere, MAKERS[kind](), stage, SGD, gradient_accumulation_steps=1)
    plain = MAKERS[kind]()
    with torch.no_grad():  # as before the training, and between its steps
        engine.eval()
        torch.testing.assert_close(
            value_of(engine(train_batch(rank))), value_of(plain(train_batch(rank)))
        )
        engine.train()
    steps_of_both(engine, plain, anywhere, rank)
    assert_close(engine, plain)
    assert engine.id == 3


@STAGES
def test_a_module_that_is_added_later(anywhere, rank, stage):
    engine = initialized(anywhere, TwoLayers(), stage, SGD, gradient_accumulation_steps=1)
    torch.manual_seed(6)
    engine.module.late = late = nn.Linear(7, 7, bias=False)
    batch, plain = train_batch(rank), TwoLayers()
    with pytest.raises(RuntimeError, match=r"'late\.weight' would be neither reduced nor stepped"):
        engine(batch)
    late.requires_grad_(False)
    torch.testing.assert_close(engine.module.late(engine(batch)), late(plain(batch)))
    del engine.module.late
    steps_of_both(engine, plain, anywhere, rank)
    assert_close(engine, plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize("made_by", ["file", "user"])
def test_an_empty_group(anywhere, rank, precision, empty, made_by):
    model = TwoLayers()
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    groups[1 - empty]["params"] = list(model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
        precision: {"enabled": True},
    }
    if precision == "fp32":
        del config[precision]
    optimizer = None
    if made_by == "user":
        del config["optimizer"]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=groups, config=config, mesh=anywhere
    )
    dtype = next(engine.parameters()).dtype
    engine.backward(engine(train_batch(rank, dtype=dtype)).float().square().mean())
    engine.step()
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    assert sizes == [4 * empty, 4 * (1 - empty)]
    assert engine.get_lr() == [0.1, 0.1] and engine.was_step_applied()


@STAGES
def test_generation_between_steps(anywhere, rank, stage):
    engine, plain = (
        initialized(anywhere, TwoLayers(), stage, SGD, gradient_accumulation_steps=1),
        TwoLayers(),
    )
    for _ in range(2):
        with deepspeed.zero.unwrap_model_for_generation(engine) as model, torch.no_grad():
            assert isinstance(model, TwoLayers)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
            if rank == 0:  # a rank may generate more than others
                for _ in range(3):
                    model(train_batch(0))
        steps_of_both(engine, plain, anywhere, rank)
    assert_close(engine, plain)
