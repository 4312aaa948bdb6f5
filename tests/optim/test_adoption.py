"""Adopting an optimizer: what the given object does, the sharded one does."""

import functools
import types

import pytest
import torch
from harness import assert_bits
from torch import nn

import zero_ext
from zero_ext.optim import adoption


class Bounded(torch.optim.Optimizer):
    """Keeps arguments as attributes; one of them has no default."""

    def __init__(self, params, lr, bound, powers=(1,)):
        super().__init__(params, {"lr": lr})
        self.bound, self.powers = bound, list(powers)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    g = p.grad.clamp(-self.bound, self.bound)
                    p.sub_(sum(g**power for power in self.powers), alpha=group["lr"])


def _negated(self, closure=None):
    with torch.no_grad():
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=group["lr"])


def _with_attribute_set_later(params):
    optimizer = Bounded(params, 0.5, bound=1.0)
    optimizer.bound = 0.01
    return optimizer


def _with_method_of_its_own(params):
    optimizer = torch.optim.SGD(params, lr=0.5)
    optimizer.step = types.MethodType(_negated, optimizer)
    return optimizer


def _with_schedule(params):
    optimizer = Bounded(params, 0.5, bound=0.02)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


MADE = [
    functools.partial(Bounded, lr=0.5, bound=0.01),
    functools.partial(Bounded, lr=0.5, bound=2.0, powers=(1, 2)),
    _with_attribute_set_later,
    _with_method_of_its_own,
    _with_schedule,
    functools.partial(torch.optim.Adagrad, lr=0.5, initial_accumulator_value=0.3),
]


def _step(module, optimizer) -> None:
    module(torch.full((2, 7), 3.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _adopted(team, given):
    adoption.check(given)
    return adoption.adopt(given, process_group=team.group)


def test_the_object_is_carried_over(team):
    for make in MADE:
        sharded, plain = (nn.Linear(7, 3) for _ in range(2))
        sharded.load_state_dict(plain.state_dict())
        for parameter in (*sharded.parameters(), *plain.parameters()):
            nn.init.constant_(parameter, 0.25)
        optimizer = _adopted(team, make(list(sharded.parameters())))
        reference = make(list(plain.parameters()))
        for step in range(3):
            _step(sharded, optimizer)
            _step(plain, reference)
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert_bits(zero_ext.full_tensor(ours), theirs.detach())


@pytest.mark.parametrize("own", [True, False])
def test_state_dict_hooks_are_carried_over_and_can_be_removed(team, own):
    module = nn.Linear(7, 3)
    kind = torch.optim.SGD if own else functools.partial(Bounded, bound=1.0)
    given = kind(module.parameters(), lr=0.5)
    handle = given.register_state_dict_post_hook(lambda _, state: {**state, "note": 7})
    seen = []
    given.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["note"]))
    optimizer = _adopted(team, given)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert saved["note"] == 7 and seen == [7]
    handle.remove()
    assert "note" not in optimizer.state_dict()


def test_what_belongs_to_the_whole_parameters_is_named():
    parameter = nn.Parameter(torch.ones(7, 3))
    for value, message in (
        ([parameter], "'extra' of the Bounded refers to a parameter of shape"),
        (
            {"slow": parameter.detach().clone()},
            r"'extra' of the Bounded has a tensor of shape \(7, 3\)",
        ),
        (torch.optim.SGD([parameter], lr=1.0), "'extra' of the Bounded refers to a parameter"),
        (lambda: parameter, "'extra' of the Bounded refers to a parameter"),
    ):
        given = Bounded([parameter], 0.5, bound=1.0)
        given.extra = value
        with pytest.raises(ValueError, match=message):
            adoption.check(given)
    given.extra = lambda: given.bound
    adoption.check(given)  # the object stays what it is


class Restless(Bounded):
    """Puts other parameters into its groups."""

    def step(self, closure=None):
        super().step()
        if self.bound > 1:
            self.param_groups[0]["params"] = list(self.param_groups[0]["params"])


@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler.step")
def test_the_same_object_goes_on(team):
    """With hooks that run once, a schedule made before, and its class after it retires."""
    for kind in (torch.optim.SGD, Bounded, torch.optim.Adafactor):
        module, seen = nn.Linear(7, 3), []
        given = kind(module.parameters(), lr=0.5, **({"bound": 2.0} if kind is Bounded else {}))
        given.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        schedule = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
        groups, optimizer = (
            given.param_groups,
            zero_ext.optim.adopt(given, process_group=team.group),
        )
        assert optimizer is given and isinstance(given, kind) and given.param_groups is groups
        for _ in range(2):
            _step(module, optimizer)
            schedule.step()
        assert seen == ["before"] * 2 and given.param_groups[0]["lr"] == 0.125
        optimizer.retire()
        assert type(given) is kind and not given.state


def test_code_that_replaces_its_parameters_is_an_error(team):
    module = nn.Linear(7, 3)
    optimizer = _adopted(team, Restless(module.parameters(), 0.5, bound=0.5))
    _step(module, optimizer)
    optimizer.bound = 2.0
    for _ in range(2):  # groups are the user's again
        with pytest.raises(RuntimeError, match="Restless has put other parameters or groups into"):
            _step(module, optimizer)
        assert optimizer.param_groups[0]["params"] == [*module.parameters()]


def test_a_name_that_sharded_optimizers_need_is_told():
    class Scaling(Bounded):
        def scale(self):
            pass

    with pytest.raises(TypeError, match="Scaling has an attribute 'scale', which sharded"):
        zero_ext.optim.wrap(Scaling, [nn.Parameter(torch.ones(3))], lr=0.5, bound=1.0)
