"""How often a step and a forward cross from Python into the engine."""

from collections.abc import Callable

import pytest
import torch
from harness import MLP, mean_square, rank_data

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
