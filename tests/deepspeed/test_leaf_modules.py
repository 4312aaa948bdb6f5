"""DeepSpeed's leaf modules: which modules each call finds, and models that need the mark there."""

import pytest
import torch
from harness import mean_square
from setups import train_batch
from test_initialize import STAGES, initialized
from torch import nn

import zero_ext
import zero_ext.deepspeed as deepspeed

utils = deepspeed.utils
SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Base(nn.Module):
    pass


class Block(Base):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(5, 5)

    def forward(self, x):
        return self.proj(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other_proj = Block(), nn.Linear(5, 5)


def marked(model) -> list[str]:
    found = {id(module) for module in utils.get_z3_leaf_modules(model)}
    return [name for name, module in model.named_modules() if id(module) in found]


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        ([nn.Linear], ["first.proj", "other_proj"]),
        (["Linear"], ["first.proj", "other_proj"]),
        ([Base], ["first"]),  # by a subclass, which a name does not stand for
        ([f"{__name__}.Block", "Base"], ["first"]),
        ([f"{__name__}.Model", nn.Conv2d], [""]),
        ((each for each in (Model, "Linear")), ["", "first.proj", "other_proj"]),
    ],
)
def test_classes_and_their_names(classes, names):
    model, classes = Model(), list(classes)
    assert marked(model) == [] and not utils.z3_leaf_module(model)
    modules = dict(model.named_modules())
    assert utils.set_z3_leaf_modules(model, iter(classes)) == [modules[name] for name in names]
    assert marked(model) == names and all(utils.z3_leaf_module(modules[name]) for name in names)
    assert utils.unset_z3_leaf_modules(model, classes) == [modules[name] for name in names]
    assert marked(model) == []


def test_names_and_their_ends():
    model = Model()
    by_name, by_suffix = utils.set_z3_leaf_modules_by_name, utils.set_z3_leaf_modules_by_suffix
    assert by_name(model, ["first.proj"]) == ([model.first.proj], [])
    assert by_name(model, ["first", "proj"], raise_if_not_found=False) == ([model.first], ["proj"])
    assert by_name(model, ["first.proj"], flag=False) == ([model.first.proj], [])
    assert marked(model) == ["first"]
    # Two ends of one name are one module.
    both = [model.first.proj, model.other_proj]
    assert by_suffix(model, ["proj", "r_proj", "x"], raise_if_not_found=False) == (both, ["x"])
    assert by_suffix(model, ["irst"], flag=False) == ([model.first], [])
    assert marked(model) == ["first.proj", "other_proj"]
    utils.set_z3_leaf_module(model.other_proj, False)
    assert marked(model) == ["first.proj"]


def test_what_is_not_there():
    model = Model()
    with pytest.raises(ValueError, match=r"the model has no module of Conv2d, Gone"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d, "Gone"])
    assert utils.set_z3_leaf_modules(model, ["Gone"], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="the model has no module of Conv2d"):
        utils.unset_z3_leaf_modules(model, [nn.Conv2d])
    with pytest.raises(ValueError, match="the model has no module named gone, away"):
        utils.set_z3_leaf_modules_by_name(model, ["first", "gone", "away"])
    with pytest.raises(ValueError, match="the model has no module whose name ends with gone"):
        utils.set_z3_leaf_modules_by_suffix(model, ["proj", "gone"])
    with pytest.raises(TypeError, match="3 is no class and no name of one"):
        utils.set_z3_leaf_modules(model, [3])
    assert marked(model) == []


class Experts(nn.Module):
    """A rank runs one of three experts; nobody runs the third."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.experts = nn.ModuleList(nn.Linear(5, 13) for _ in range(3))
        self.gate, self.last = nn.Linear(5, 13), nn.Linear(13, 7)
        self.chosen = 0

    def forward(self, x):
        return self.last(torch.tanh(self.experts[self.chosen](x)) * self.gate(x).sigmoid())


@pytest.mark.parametrize("leaf", ["marked", "in the file", "not marked"])
@STAGES
def test_each_rank_uses_another_part(anywhere, rank, stage, leaf):
    model = Experts()
    zero = {"stage": stage}
    if leaf == "marked":
        utils.set_z3_leaf_modules(model, [nn.ModuleList])
    if leaf == "in the file":
        zero["leaf_module"] = {"classes": f"{__name__}.Experts", "name_suffixes": ["experts"]}
    plain = Experts()
    torchs = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = initialized(
        anywhere, model, stage, SGD, gradient_accumulation_steps=1, zero_optimization=zero
    )
    peers = [rank] if anywhere is None else range(anywhere.size())
    for step in range(2):  # in the second step with the other expert
        model.chosen = (rank + step) % 2
        engine.backward(mean_square(engine, train_batch(rank, step)))
        engine.step()
        torchs.zero_grad()
        for peer in peers:
            plain.chosen = (peer + step) % 2
            (mean_square(plain, train_batch(peer, step)) / len(peers)).backward()
        torchs.step()
    for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(zero_ext.full_tensor(p), q, rtol=1e-5, atol=1e-6)


def test_the_logger(caplog, world):
    caplog.set_level("INFO", "zero_ext")
    utils.log_dist("to rank 5", ranks=[5])
    utils.log_dist("to all", ranks=[-1])
    utils.logger.info("plainly")
    told = [record.getMessage() for record in caplog.records]
    assert any(text.endswith("] to all") for text in told) and told[-1] == "plainly"
    assert any("to rank 5" in text for text in told) == (not torch.distributed.is_initialized())
