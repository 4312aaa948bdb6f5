"""Methods beside ``step``, counts and named state, where owners update whole parameters."""

import contextlib
import copy

import pytest
import torch
from harness import assert_bits
from matrices import Matrices, OneProcess, assert_same_parameters, straddling, train
from own_optimizers import EachByItself
from torch import nn

import zero_ext
from zero_ext.optim import adoption
from zero_ext.optim.groups import named_in, settings_of
from zero_ext.optim.whole import Whole


class Averaging(EachByItself):
    """Trains on one point and is evaluated on another. Its rate follows counts of both kinds."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, training=True)
        self.factor = 1.0
        self.state["k"] = torch.tensor([0])

    def step(self, closure=None):
        self.state["k"] += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()

    def update(self, p, state, group):
        rate = self.factor * group["lr"] * group["steps"] / self.state["k"].item() ** 1.5
        state.setdefault("x", p.clone())
        p.sub_(rate * p.grad / (p.grad.norm() + state.get("curvature", 0)))
        state["x"].lerp_(p, 0.25)

    @torch.no_grad()
    def _swap(self, training):
        for group in self.param_groups:
            for p in group["params"]:
                if group["training"] != training and "x" in self.state[p]:
                    self.exchange(p, self.state[p]["x"])
            group["training"] = training
        return self

    def exchange(self, p, x):
        y = p.clone()
        p.copy_(x)
        x.copy_(y)

    def train(self):
        return self._swap(True)

    def eval(self):
        return self._swap(False)

    @torch.no_grad()
    def update_curvature(self, weight=0.5):
        self.state["curved"] = self.state.get("curved", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p].get("curvature", torch.zeros(()))
                    self.state[p]["curvature"] = old.lerp(p.grad.norm(), weight)

    def rates(self):
        return [group["lr"] for group in self.param_groups]

    def reset(self):
        self.state.clear()
        self.state["k"] = torch.tensor([0])

    def sizes(self):
        return [p.numel() for group in self.param_groups for p in group["params"]]

    @contextlib.contextmanager
    def evaluated(self):
        self.eval()
        yield
        self.train()

    def fail(self):
        raise ArithmeticError("no such luck")


class AveragingByReplacement(Averaging):
    def exchange(self, p, x):
        y = p.data
        p.data = x.clone()
        x.copy_(y)


class WithUnused(Matrices):
    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.unused = nn.Parameter(torch.ones(3, 5))


def _groups(model) -> list[dict]:
    """The last one gets no gradients."""
    layers = [layer.weight for layer in model.layers]
    return [
        {"params": [*layers, model.last], "lr": 0.1},
        {"params": [model.transposed], "lr": 0.2},
        {"params": [model.unused], "lr": 0.1},
    ]


def _pair(kind, mesh, stage, adopted=False):
    """A sharded model with its optimizer, and one process."""
    model = straddling(WithUnused(), stage, mesh)
    if adopted:
        optimizer = adoption.adopt(kind(_groups(model)))
    else:
        optimizer = zero_ext.optim.wrap(kind, _groups(model))
    plain = OneProcess(1 if mesh is None else mesh.size(), kind, WithUnused)
    plain.optimizer = kind(_groups(plain.model))
    assert isinstance(optimizer.zero_core.states, Whole)
    return model, optimizer, plain


def _assert_same(model, optimizer, plain) -> None:
    assert_same_parameters(model, plain.model)
    for ours, theirs in zip(optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert settings_of(ours) == settings_of(theirs)
    assert named_in(optimizer.state) == named_in(plain.optimizer.state)
    states, expected = (o.state_dict()["state"] for o in (optimizer, plain.optimizer))
    for k, state in expected.items():
        found = states[k]
        if not isinstance(state, dict):
            assert found == state
            continue
        assert found.keys() == state.keys()
        for name, value in state.items():
            assert_bits(torch.as_tensor(found[name]), torch.as_tensor(value), name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_methods_and_counts_have_the_bits_of_one_process(anywhere, rank, stage):
    for kind, adopted in ((Averaging, False), (AveragingByReplacement, True)):
        model, optimizer, plain = _pair(kind, anywhere, stage, adopted)
        steps = iter(range(100))

        def train_both(many, both=(model, optimizer, plain), steps=steps):
            of_both = [next(steps) for _ in range(many)]
            train(*both[:2], rank, of_both)
            both[2].train(of_both)
            both[2].optimizer.zero_grad()

        assert optimizer.train() is optimizer
        plain.optimizer.train()
        for use in ("eval", "eval", "train", "update_curvature", "reset", "train"):
            train_both(2)
            assert_same_parameters(model, plain.model)
            getattr(optimizer, use)()
            getattr(plain.optimizer, use)()
            _assert_same(model, optimizer, plain)
        train_both(1)
        # What users write is in what a method gets.
        zero_ext.set_full_param(model.last, torch.full((1, 7), 0.5))
        with torch.no_grad():
            plain.model.last.fill_(0.5)
        for each in (optimizer, plain.optimizer):
            each.eval()
            each.train()
            each.factor = 0.5
        train_both(2)
        assert optimizer.factor == 0.5
        _assert_same(model, optimizer, plain)


def test_methods_get_gradients(anywhere, rank):
    model, optimizer, plain = _pair(Averaging, anywhere, 2)
    for step in range(3):
        hook = optimizer.register_step_pre_hook(lambda *_: optimizer.update_curvature(weight=0.25))
        train(model, optimizer, rank, [step])
        hook.remove()
        curve = plain.optimizer.register_step_pre_hook(
            lambda *_: plain.optimizer.update_curvature(weight=0.25)
        )
        plain.train([step])
        curve.remove()
        _assert_same(model, optimizer, plain)
    assert optimizer.state["curved"] == 3


def test_counts_go_on_from_a_checkpoint(anywhere, rank, path):
    model, optimizer, plain = _pair(Averaging, anywhere, 3)
    train(model, optimizer, rank, range(2))
    plain.train(range(2))
    zero_ext.checkpoint.save(path, model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["k"] == plain.optimizer.state_dict()["state"]["k"] == 2
    plain.train(range(2, 4))
    again, its, _ = _pair(Averaging, anywhere, 1)
    train(again, its, rank, range(3))  # another count, which loading replaces
    zero_ext.checkpoint.load(path, again, its)
    train(again, its, rank, range(2, 4))
    _assert_same(again, its, plain)


def test_results_and_what_has_none(anywhere, rank, world):
    model, optimizer, plain = _pair(Averaging, anywhere, 2)
    train(model, optimizer, rank, range(1))
    plain.train(range(1))
    if anywhere is None or world == 1:
        assert optimizer.sizes() == plain.optimizer.sizes()
    else:
        message = r"sizes\(\) of Averaging returns something else for some parameters"
        with pytest.raises(TypeError, match=message):
            optimizer.sizes()
    assert optimizer.rates() == plain.optimizer.rates()
    with pytest.raises((TypeError, RuntimeError), match="returns a context manager"):
        optimizer.evaluated()
    with pytest.raises((ArithmeticError, RuntimeError), match="no such luck"):
        optimizer.fail()
    for group in (*optimizer.param_groups, *plain.optimizer.param_groups):
        group["lr"] = 0.125
    assert optimizer.rates() == [0.125] * 3
    assert not hasattr(optimizer, "absent")
    train(model, optimizer, rank, range(1, 3))
    plain.train(range(1, 3))
    _assert_same(model, optimizer, plain)


def test_without_anything_to_train_they_do_nothing(anywhere):
    model = straddling(Matrices().requires_grad_(False), 2, anywhere)
    optimizer = zero_ext.optim.wrap(Averaging, model.parameters())
    assert optimizer.factor == 1.0
    optimizer.eval()
