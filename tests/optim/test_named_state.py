"""State under a name, ``optimizer.state["k"]``, which belongs to no parameter."""

import copy
import functools

import pytest
import torch
from torch import nn

import zero_ext
from zero_ext.optim import adoption


class TensorCount(torch.optim.Optimizer):
    """Counts in a tensor, from the first step on, and has no other state."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    def _count(self) -> float:
        self.state.setdefault("k", torch.tensor([0]))
        self.state["k"] += 1
        return self.state["k"].item()

    @torch.no_grad()
    def step(self, closure=None):
        count = self._count()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(self.state[p]["sum"], alpha=group["lr"] / count)


class IntCount(TensorCount):
    """Counts in a Python number, which each step replaces."""

    def _count(self) -> float:
        self.state["k"] = self.state.get("k", 0) + 1
        return self.state["k"]


class MadeCounts(TensorCount):
    """Has a dict of numbers and a list from construction on."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, lr)
        self.state["counts"] = {"steps": 0, "rates": [0.5, 2.0]}

    def _count(self) -> float:
        counts = self.state["counts"]
        counts["steps"] += 1
        counts["rates"] = [*counts["rates"][1:], counts["rates"][0] + 0.25]
        return counts["steps"] * counts["rates"][0]


KINDS = (TensorCount, IntCount, MadeCounts)


def _module() -> nn.Linear:
    module = nn.Linear(7, 3)
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.25)
    return module


def _steps(module, optimizer, ranks, steps) -> None:
    """In plain torch, ``ranks`` are all; else one."""
    for step in range(steps):
        for rank in ranks:
            loss = module(torch.full((2, 7), 1.0 + step + rank)).sum()
            (loss / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _named(optimizer) -> dict:
    return {
        k: v.cpu() if isinstance(v, torch.Tensor) else v
        for k, v in optimizer.state.items()
        if not isinstance(k, torch.Tensor)
    }


class Placed(TensorCount):
    """Keeps tensors on the parameters' device beside some on the CPU, and a count of each."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].setdefault("count", torch.zeros((), device=p.device))
                count += 1
                here, there = (torch.ones(2, device=d) for d in (p.device, "cpu"))
                self.state["k"] = here
                self.state["deep"] = {"here": [here, 1], "there": there}
                p.sub_(p.grad)


def _devices(optimizer) -> list[str]:
    named = [
        optimizer.state["k"],
        *optimizer.state["deep"]["here"],
        optimizer.state["deep"]["there"],
    ]
    counts = [
        optimizer.state[p]["count"] for group in optimizer.param_groups for p in group["params"]
    ]
    return [v.device.type for v in (*named, *counts) if isinstance(v, torch.Tensor)]


def _made(kind, mesh, stage=2, adopted=False):
    module = zero_ext.shard(_module(), stage, mesh=mesh)
    if adopted:
        return module, adoption.adopt(kind(list(module.parameters())))
    return module, zero_ext.optim.wrap(kind, module.parameters())


def _plain(kind):
    module = _module()
    return module, kind(module.parameters())


def _assert_same(sharded, plain) -> None:
    for mine, theirs in zip(sharded[0].parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(zero_ext.full_tensor(mine), theirs.detach())
    assert _named(sharded[1]) == _named(plain[1])


def _world_of(mesh) -> int:
    return 1 if mesh is None else mesh.size()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_is_shown_saved_and_loaded(anywhere, rank, path, stage):
    for kind in KINDS:
        plain = _plain(kind)
        one, two, three = (_made(kind, anywhere, stage, adopted) for adopted in (False, True, True))
        every = range(_world_of(anywhere))
        assert _named(one[1]) == _named(two[1]) == _named(plain[1])
        _steps(*plain, every, 2)
        _steps(*one, [rank], 2)
        _assert_same(one, plain)
        folder = path.with_name(kind.__name__)
        zero_ext.checkpoint.save(folder, *one)
        saved = copy.deepcopy(one[1].state_dict())
        assert {k for k in saved["state"] if isinstance(k, str)} == _named(plain[1]).keys()
        _steps(*two, [rank], 3)  # another count, which loading replaces
        zero_ext.checkpoint.load(folder, *two)
        three[0].load_state_dict(one[0].state_dict())
        three[1].load_state_dict(saved)
        _steps(*plain, every, 2)
        for each in (one, two, three):
            _steps(*each, [rank], 2)
            _assert_same(each, plain)


@pytest.mark.parametrize("stage", [2, 3])
def test_tensors_stay_on_the_device_where_they_were(anywhere, rank, path, stage):
    """Also a state of a parameter that has no value for each element."""
    one, two, three = (_made(Placed, anywhere, stage) for _ in range(3))
    _steps(*one, [rank], 1)
    parameter = next(one[0].parameters())
    assert _devices(one[1]) == [parameter.device.type] * 2 + ["cpu"] + [parameter.device.type] * 2
    zero_ext.checkpoint.save(path, *one)
    zero_ext.checkpoint.load(path, *two)
    three[1].load_state_dict(copy.deepcopy(one[1].state_dict()))
    assert _devices(two[1]) == _devices(three[1]) == _devices(one[1])
    for each in (two, three):  # and an optimizer goes on with them
        _steps(*each, [rank], 1)


def test_users_change_and_empty_it_as_in_torch(anywhere, rank):
    def change(optimizer, value):
        optimizer.state["k"] = copy.deepcopy(value)

    def empty_all(optimizer):
        optimizer.state.clear()

    def empty_one(optimizer):
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {}

    def load_without(optimizer):
        state_dict = copy.deepcopy(optimizer.state_dict())
        del state_dict["state"]["k"]
        optimizer.load_state_dict(state_dict)

    for kind, edit in (
        (TensorCount, functools.partial(change, value=torch.tensor([4]))),
        (IntCount, functools.partial(change, value=4)),
        (IntCount, empty_all),
        (IntCount, empty_one),
        (TensorCount, load_without),
    ):
        sharded, plain = _made(kind, anywhere), _plain(kind)
        for each, which in ((sharded, [rank]), (plain, range(_world_of(anywhere)))):
            _steps(*each, which, 2)
            edit(each[1])
            _steps(*each, which, 2)
        _assert_same(sharded, plain)


def test_an_own_optimizer_keeps_what_users_put_there(anywhere, rank):
    module, optimizer = _made(torch.optim.SGD, anywhere)
    optimizer.retire()
    optimizer = zero_ext.optim.AdamW(module.parameters())
    optimizer.state["note"] = [1, 2]
    saved = copy.deepcopy(optimizer.state_dict())
    _steps(module, optimizer, [rank], 1)
    optimizer.state["note"] = 7
    optimizer.load_state_dict(saved)
    assert _named(optimizer) == {"note": [1, 2]}
