"""How often a step and a forward cross from Python into the engine, and the work of Python."""

import gc
import sys
from collections.abc import Callable

import pytest
import torch
from harness import MLP, mean_square, rank_data
from torch import nn

import zero_ext
from zero_ext import _C

pytestmark = pytest.mark.dist


@pytest.fixture
def crossings(monkeypatch) -> Callable[[Callable[[], object]], list[str]]:
    """Which methods and properties of the engine and the optimizer's state a function uses."""
    seen = []

    def counted(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        return call

    for cls in (_C.Engine, _C.OptimizerState):
        for name, member in list(vars(cls).items()):
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                member = property(counted(name, member.fget))
            else:
                member = counted(name, getattr(cls, name))
            monkeypatch.setattr(cls, name, member)

    def during(function: Callable[[], object]) -> list[str]:
        seen.clear()
        function()
        return list(seen)

    return during


def optimizers() -> list[tuple[str, Callable]]:
    scaled = {"loss_scaler": zero_ext.LossScaler("dynamic")}
    return [
        ("AdamW", lambda p: zero_ext.optim.AdamW(p, max_grad_norm=1.0)),
        ("scaled", lambda p: zero_ext.optim.SGD(p, lr=0.1, **scaled)),
        ("wrapped", lambda p: zero_ext.optim.wrap(torch.optim.RMSprop, p, max_grad_norm=0.1)),
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_crosses_twice_and_a_forward_once_for_each_module_hook(
    anywhere, rank, stage, crossings
):
    """The first forward makes views of gradients, and the first step may make states. The second
    ones are as all others. One parameter stays frozen."""
    x = rank_data((3, 5), rank)
    for name, make in optimizers():
        model = MLP()
        model.layers[0].bias.requires_grad_(False)
        zero_ext.shard(model, stage, mesh=anywhere)
        optimizer = make(model.parameters())
        for step in range(2):
            forward = crossings(lambda model=model: model(x))
            optimizer.scale(mean_square(model, x)).backward()
            update = crossings(optimizer.step)
            assert crossings(optimizer.zero_grad) == ["zero_grad"]
            assert forward.count("before_forward") == 1, (name, step, forward)
            if torch.get_default_device().type != "cpu":
                # Reads the verdicts of this step and the one before it where they have arrived.
                assert update.count("settle") <= 2, (name, update)
                update = [crossing for crossing in update if crossing != "settle"]
            if step == 1:
                assert len(set(forward) - {"enter_forward", "leave_forward"}) == 1, (name, forward)
                assert update[0] == "prepare_step" and len(update) == 2, (name, update)


def _frames(function: Callable[[], object]) -> int:
    """How many functions of Python it calls, torch's as well. A garbage collection in it would
    add the functions that watch other tests' objects."""
    calls = []
    gc.disable()
    sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(calls)


@pytest.mark.host  # an emulated device is written in Python
def test_a_parameter_costs_python_no_more_frames_than_that(anywhere, crossings):
    """Of a constructor, of a step of a wrapped optimizer, and of one whose owners update whole
    parameters. A constructor's crossings do not depend on the number of parameters."""
    kinds = {
        "AdamW": zero_ext.optim.AdamW,
        "wrapped": lambda p: zero_ext.optim.wrap(torch.optim.RMSprop, p, foreach=True),
        "owners": lambda p: zero_ext.optim.wrap(torch.optim.Adafactor, p, foreach=True),
    }
    counts: dict[str, list[int]] = {"constructor": []}
    for several in (20, 60):
        parameters = [nn.Parameter(torch.ones(3, 5)) for _ in range(several)]
        model = zero_ext.shard(nn.ParameterList(parameters), stage=2, mesh=anywhere)
        for name, make in kinds.items():
            made: list = []

            def construct(make=make, made=made, given=parameters) -> None:
                made.append(make(given))

            if name == "AdamW":
                counts["constructor"].append(_frames(construct))
                made.pop().retire()
                assert len(crossings(construct)) <= 11  # and one for facts
            else:
                construct()
            for step in range(2):
                sum((p * p).sum() for p in model).backward()
                frames = _frames(made[-1].step)
                made[-1].zero_grad()
                if step == 1:
                    counts.setdefault(name, []).append(frames)
            made[-1].retire()
    of_each = {name: (most - least) / 40 for name, (least, most) in counts.items()}
    assert of_each["constructor"] <= 5 and of_each["AdamW"] <= 0.5, of_each
    assert of_each["wrapped"] <= 5 and of_each["owners"] <= 12, of_each


@pytest.mark.host
@pytest.mark.parametrize("stage, limit", [(2, 1), (3, 13)])
def test_a_parameter_of_a_sharded_model_costs_python_no_more_frames(anywhere, stage, limit):
    """Two parameters in a module that has hooks of its own in stage 3, and one without a module.
    What the first call does once is not counted."""
    frames: dict[str, list[int]] = {"modules": [], "flat": []}
    for several in (3, 20, 60):
        layers = nn.ModuleList([nn.Linear(3, 5) for _ in range(several)])
        flat = nn.ParameterList([nn.Parameter(torch.ones(3, 5)) for _ in range(several)])
        for name, model in (("modules", layers), ("flat", flat)):
            frames[name].append(_frames(lambda m=model: zero_ext.shard(m, stage, mesh=anywhere)))
    of_modules, of_flat = (most - least for _, least, most in frames.values())
    assert of_modules / 80 <= limit and of_flat == 0, frames
