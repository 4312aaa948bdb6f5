"""Methods and attributes of a wrapped optimizer beside ``step``."""

import contextlib
import copy
import itertools

import pytest
import torch
from harness import assert_bits
from setups import readable
from torch import nn

import zero_ext
from zero_ext.optim import adoption
from zero_ext.optim.groups import settings_of


class Averaging(torch.optim.SGD):
    """Trains on one point and is evaluated on another, as schedule-free optimizers are."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.factor = 2.0
        self.defaults["training"] = True
        for group in self.param_groups:
            group.setdefault("training", True)

    @torch.no_grad()
    def _swap(self, training):
        for group in self.param_groups:
            for p in group["params"]:
                if group["training"] != training and "x" in self.state[p]:
                    self._exchange(p, self.state[p]["x"])
            group["training"] = training
        return self

    def _exchange(self, p, x):
        y = p.clone()
        p.copy_(x)
        x.copy_(y)

    def train(self):
        return self._swap(True)

    def eval(self):
        return self._swap(False)

    def reset(self):
        self.state.clear()

    def rates(self):
        return {group["lr"] for group in self.param_groups}

    @contextlib.contextmanager
    def evaluated(self):
        self.eval()
        try:
            yield "evaluated"
        finally:
            self.train()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("x", p.clone())
                    p.sub_(group["lr"] * self.factor * p.grad)
                    self.state[p]["x"].lerp_(p, 0.25)


class AveragingByData(Averaging):
    """Writes past autograd's counts of versions."""

    def _exchange(self, p, x):
        y = p.data.clone()
        p.data.view(-1).mul_(0).add_(x.view(-1))
        x.copy_(y)


class AveragingByReplacement(Averaging):
    def _exchange(self, p, x):
        y = p.data
        p.data = x.clone()
        x.copy_(y)


class Curved(torch.optim.SGD):
    """Has its curvature from gradients of its own, between two steps."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.state["updates"] = 0

    @torch.no_grad()
    def update_hessian(self, weight=0.5):
        self.state["updates"] += 1
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("h", torch.ones_like(p)).lerp_(p.grad**2, weight)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(
                        group["lr"]
                        * p.grad
                        / self.state[p].setdefault("h", torch.ones_like(p)).sqrt().add(1)
                    )


class Clamped(torch.optim.SGD):
    """A method with an argument that writes to some parameters, and to all at once."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def clamp(self, bound):
        every = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_clamp_max_(every[:1], bound)
        torch._foreach_mul_(every, 0.5)


def _steps(run, ranks, steps=1) -> None:
    """In plain torch, ``ranks`` are all; else one."""
    module, optimizer = run
    for step in range(steps):
        for rank in ranks:
            (module(torch.full((2, 7), 1.0 + step + rank)).sum() / len(ranks)).backward()
        if hasattr(optimizer, "update_hessian"):
            optimizer.update_hessian(weight=0.25)
        optimizer.step()
        optimizer.zero_grad()


def _module() -> nn.Module:
    module = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 3))
    for k, parameter in enumerate(module.parameters()):
        nn.init.constant_(parameter, 0.25 + k / 8)
    return module


def _runs(kind, mesh, rank, stage=2, adopted=False):
    """Both, each with the ranks whose data it sees."""
    plain, module = _module(), zero_ext.shard(_module(), stage, mesh=mesh, bucket_mb=1e-4)
    if adopted:
        optimizer = adoption.adopt(kind(list(module.parameters())))
    else:
        optimizer = zero_ext.optim.wrap(kind, module.parameters())
    every = range(1 if mesh is None else mesh.size())
    return ((module, optimizer), [rank]), ((plain, kind(plain.parameters())), every)


def _assert_same(sharded, plain) -> None:
    batch = torch.ones(2, 7)
    torch.testing.assert_close(sharded[0](batch), plain[0](batch))
    for mine, theirs in zip(sharded[0].parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(zero_ext.full_tensor(mine), theirs.detach())
        state = sharded[1].state[mine]
        assert state.keys() == plain[1].state[theirs].keys()
        for name, value in plain[1].state[theirs].items():
            shown = (
                state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
            )
            torch.testing.assert_close(shown, value)
    ours, theirs = (settings_of(run[1].param_groups[0]) for run in (sharded, plain))
    assert ours == theirs


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_they_reach_masters_gradients_and_settings(anywhere, rank, stage):
    for kind in (Averaging, AveragingByData, AveragingByReplacement, Curved, Clamped):
        sharded, plain = _runs(kind, anywhere, rank, stage, adopted=kind is not Averaging)
        for use in (
            lambda o: o.train() if hasattr(o, "train") else None,
            lambda o: o.eval() if hasattr(o, "eval") else None,
            lambda o: o.eval() if hasattr(o, "eval") else None,
            lambda o: o.clamp(bound=0.2) if hasattr(o, "clamp") else None,
            lambda o: o.train() if hasattr(o, "train") else None,
        ):
            for run, ranks in (sharded, plain):
                _steps(run, ranks, 2)
                use(run[1])
            _assert_same(sharded[0], plain[0])
        if kind is Curved:
            assert sharded[0][1].state["updates"] == plain[0][1].state["updates"] == 10


def test_what_users_write_is_in_it_and_contexts_swap_back(anywhere, rank):
    sharded, plain = _runs(Averaging, anywhere, rank)
    for run, ranks in (sharded, plain):
        _steps(run, ranks, 2)
        with torch.no_grad():
            run[0][0].weight.mul_(2)
        assert run[1].eval() is run[1]
    _assert_same(sharded[0], plain[0])
    for run, ranks in (sharded, plain):
        run[1].train()
        _steps(run, ranks)
    with sharded[0][1].evaluated() as value, plain[0][1].evaluated():
        assert value == "evaluated"
        _assert_same(sharded[0], plain[0])
    _assert_same(sharded[0], plain[0])
    for run, ranks in (sharded, plain):
        run[1].reset()
        assert not any(run[1].state.get(p) for p in run[0].parameters())
        _steps(run, ranks, 2)
    _assert_same(sharded[0], plain[0])


@pytest.mark.parametrize("stage", [1, 3])
def test_masters_keep_the_bits_that_half_precision_lacks(anywhere, rank, stage):
    module = zero_ext.shard(_module().bfloat16(), stage, mesh=anywhere, bucket_mb=1e-4)
    optimizer = zero_ext.optim.wrap(Averaging, module.parameters(), lr=0.0123)
    for step in range(2):
        module(torch.full((2, 7), 0.3 + step + rank, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    parameters = list(module.parameters())

    def values():
        masters = [zero_ext.full_tensor(p) for p in parameters]
        points = [optimizer.state[p]["x"] for p in parameters]
        return masters, [
            x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for x in points
        ]

    masters, points = values()
    assert not all(torch.equal(x, x.bfloat16().float()) for x in points)
    swapped, kept = (points, masters), (masters, points)
    for change, expected in ((optimizer.eval, swapped), (optimizer.train, kept)):
        change()
        for mine, theirs in zip(
            itertools.chain(*values()), itertools.chain(*expected), strict=True
        ):
            assert_bits(mine, theirs)
        with readable(module):
            for parameter, master in zip(parameters, expected[0], strict=True):
                assert_bits(parameter.detach().clone(), master.bfloat16())


def test_where_writes_are_forgotten_it_raises_and_goes_on_after(anywhere, rank):
    (run, ranks), _ = _runs(Averaging, anywhere, rank, stage=3)
    _steps(run, ranks)
    before = [zero_ext.full_tensor(p) for p in run[0].parameters()]
    with (
        run[0].summon_full_params(writeback=False),
        pytest.raises(RuntimeError, match=r"eval\(\) inside summon_full_params"),
    ):
        run[1].eval()
    run[1].eval()
    run[1].train()
    for parameter, value in zip(run[0].parameters(), before, strict=True):
        assert_bits(zero_ext.full_tensor(parameter), value)


def test_a_method_that_writes_nothing_needs_no_other_rank(anywhere, rank):
    (run, ranks), _ = _runs(Averaging, anywhere, rank)
    _steps(run, ranks)
    if rank == 0:
        assert run[1].rates() == {0.1}


def test_attributes_are_read_and_set(anywhere, rank):
    sharded, plain = _runs(Averaging, anywhere, rank)
    for run, ranks in (sharded, plain):
        assert run[1].factor == 2.0
        run[1].factor = 0.5
        run[1].own = 3
        assert (run[1].factor, run[1].own) == (0.5, 3)
        _steps(run, ranks, 2)
        run[1].load_state_dict(copy.deepcopy(run[1].state_dict()))
        assert run[1].factor == 0.5
        _steps(run, ranks)
        assert not hasattr(run[1], "absent")
    _assert_same(sharded[0], plain[0])


def test_amp_scaling_is_never_passed_on(anywhere):
    class Fused(Averaging):
        _step_supports_amp_scaling = True

    module = zero_ext.shard(_module(), 1, mesh=anywhere)
    optimizer = zero_ext.optim.wrap(Fused, module.parameters())
    assert not optimizer._step_supports_amp_scaling


def test_without_anything_to_train_they_do_nothing(anywhere):
    module = _module().requires_grad_(False)
    optimizer = zero_ext.optim.wrap(
        Averaging, zero_ext.shard(module, 2, mesh=anywhere).parameters()
    )
    optimizer.eval()
    assert optimizer.factor == 2.0


def test_attributes_that_are_set_before_anything_trains_reach_what_is_made_later():
    model = nn.Linear(3, 5).requires_grad_(False)
    zero_ext.shard(model, 1)
    weight = model.weight.detach().clone()
    optimizer = zero_ext.optim.wrap(Averaging, model.parameters(), lr=0.1)
    optimizer.factor = 5.0
    model.requires_grad_(True)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert optimizer.factor == 5.0
    assert_bits(model.weight.detach(), weight - 0.1 * 5.0 * 2.0)
