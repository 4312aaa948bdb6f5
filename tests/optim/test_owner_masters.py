"""Masters that owners keep: what a step sends, and that no edit of a master is missed."""

import pytest
import torch
from harness import assert_bits, gather_objects
from matrices import Matrices, OneProcess, assert_same_parameters, straddling, train
from own_optimizers import EachByItself

import zero_ext
from zero_ext.engine.registry import find
from zero_ext.optim import owners as owner_masters


class ByNorm(EachByItself):
    """A class that fails when told to leaves its parameter half updated."""

    fails = False

    def update(self, p, state, group):
        state["sum"] = state.get("sum", 0) + p.grad
        if type(self).fails:
            p.zero_()
            raise ArithmeticError("out of range")
        p.sub_(group["lr"] * state["sum"] / state["sum"].norm())


def _sharded(mesh, stage, model=None):
    model = straddling(model or Matrices(), stage, mesh)
    return model, zero_ext.optim.wrap(ByNorm, model.parameters())


def _plain(mesh) -> OneProcess:
    return OneProcess(1 if mesh is None else mesh.size(), ByNorm)


def _held(parameter, optimizer) -> int:
    bounds = find(parameter)[0].engine.bounds(find(parameter)[1])
    return bounds[optimizer.zero_core.owners.rank + 1] - bounds[optimizer.zero_core.owners.rank]


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_sends_gradients_there_and_masters_back(mesh, rank, stage):
    model, optimizer = _sharded(mesh, stage)
    sent = []
    for step in range(3):
        train(model, optimizer, rank, range(step, step + 1))
        sent.append(optimizer.stats()["bytes_sent_for_owners"] - sum(sent))
    owners = optimizer.zero_core.owners
    owned = [p for p in model.parameters() if owners.owns(find(p)[1])]
    away = [p for p in model.parameters() if not owners.owns(find(p)[1])]
    there = sum(_held(p, optimizer) for p in away)
    back = sum(p.numel() - _held(p, optimizer) for p in owned)
    assert sent == [4 * (2 * there + back), *[4 * (there + back)] * 2]
    if mesh.size() == 1:  # nothing is kept where nothing travels
        assert optimizer.stats()["bytes_owner_masters"] == 0
    else:
        assert optimizer.stats()["bytes_owner_masters"] == 4 * sum(p.numel() for p in owned)
    # One master that was edited travels again, and no other.
    weight = model.layers[0].weight
    zero_ext.set_full_param(weight, zero_ext.full_tensor(weight) * 2)
    train(model, optimizer, rank, range(1))
    again = optimizer.stats()["bytes_sent_for_owners"] - sum(sent)
    assert again == 4 * (there + back + (_held(weight, optimizer) if weight in set(away) else 0))


class Several(torch.nn.Module):
    """Parameters that are cut, in blocks, without elements and frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shapes = [(13, 13), (64, 65), (7,), (0, 3), (1083,), (5, 13)]
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(s)) for s in shapes)
        self.all[2].requires_grad_(False)

    def forward(self, x):
        return x * sum(p.sum() for p in self.all)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_kept_masters_are_those_of_the_estimate(anywhere, rank, world, stage):
    for bucket_mb in (400 / 2**20, 25.0):
        model = zero_ext.shard(Several(), stage, mesh=anywhere, bucket_mb=bucket_mb)
        optimizer = zero_ext.optim.wrap(ByNorm, model.parameters())
        model(rank + 1.0).backward()
        optimizer.step()
        kept = [optimizer.stats()["bytes_owner_masters"]]
        if anywhere is not None:
            kept = gather_objects(kept[0], anywhere.get_group())
        estimate = zero_ext.estimate_memory(
            Several(), len(kept), stage, bucket_mb=bucket_mb, owners=True
        )
        assert max(kept) == estimate["owner_masters"]
        assert (max(kept) > 0) == (stage > 0 and len(kept) > 1)
        others = estimate["full"] + estimate["shard"] + estimate["master"] + estimate["grad"]
        assert estimate["persistent"] == others + estimate["owner_masters"]


def _edits(model, plain, optimizer):
    """Each gives the sharded model and the plain one the same values in another way."""
    weight, expected = model.layers[1].weight, plain.model.layers[1].weight
    zero_ext.set_full_param(weight, expected.mul_(-1))
    yield
    flipped = expected.flip(0)  # the same elements elsewhere
    expected.copy_(flipped)
    with model.summon_full_params():
        weight.data.copy_(flipped)
    yield
    expected[3, 5] += 2**-20  # one element of one rank
    with model.summon_full_params():
        weight[3, 5] += 2**-20
    yield
    other = {name: p * 0.5 for name, p in plain.model.state_dict().items()}
    plain.model.load_state_dict(other)
    model.load_state_dict(other)
    yield
    optimizer.load_state_dict(optimizer.state_dict())
    yield


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_edit_of_a_master_reaches_its_owner(anywhere, rank, stage):
    (model, optimizer), plain = _sharded(anywhere, stage), _plain(anywhere)
    train(model, optimizer, rank, range(1))
    plain.train(range(1))
    with torch.no_grad():
        for step, _ in enumerate(_edits(model, plain, optimizer), 1):
            with torch.enable_grad():
                train(model, optimizer, rank, range(step, step + 1))
                plain.train(range(step, step + 1))
            assert_same_parameters(model, plain.model)


def test_what_a_user_writes_to_rounded_parameters_is_seen(anywhere, rank):
    """The step before it compares parameters and masters, and then masters and digests."""
    model = Matrices().bfloat16()
    model, optimizer = _sharded(anywhere, 2, model)
    for step in range(2):
        loss = model(torch.full((2, 13), 0.5 + rank, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        if step == 1:
            before = model.last.detach().clone()
            model.last.data.mul_(4)
        optimizer.step()
        optimizer.zero_grad()
    change = (zero_ext.full_tensor(model.last) - before.float() * 4).norm()
    torch.testing.assert_close(change, torch.tensor(0.1), rtol=1e-4, atol=1e-6)


def test_after_a_failed_update_owners_get_the_masters_again(anywhere, rank):
    (model, optimizer), plain = _sharded(anywhere, 2), _plain(anywhere)
    train(model, optimizer, rank, range(1))
    plain.train(range(1))
    before = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
    saved = optimizer.state_dict()
    ByNorm.fails = True
    try:
        with pytest.raises((ArithmeticError, RuntimeError), match="out of range"):
            train(model, optimizer, rank, range(1, 2))
    finally:
        ByNorm.fails = False
    for name, p in model.named_parameters():
        assert_bits(zero_ext.full_tensor(p), before[name], name)
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    train(model, optimizer, rank, range(1, 3))
    plain.train(range(1, 3))
    assert_same_parameters(model, plain.model)


@pytest.mark.parametrize("digest", ["host", "device"])
def test_digests_differ_where_values_do(monkeypatch, digest):
    monkeypatch.setattr(owner_masters, "_CHUNK", 16)  # sums of sums of sums
    owner_masters._factors.cache_clear()
    of = {
        "host": lambda x: owner_masters.digests_of([x])[0],
        "device": lambda x: owner_masters._digest_on_device(
            x.to(torch.get_default_device())
        ).item(),
    }[digest]
    values = torch.ones(1083, device="cpu")
    values[::2] = torch.linspace(-1, 1, 542, device="cpu")
    changed = [values.clone() for _ in range(6)]
    changed[0][1082] = -changed[0][1082]
    changed[1][[0, 2]] = changed[1][[2, 0]]
    changed[2][[1, 3]] = 0  # which an exclusive or of the words would miss
    changed[3][512:] = changed[3][512:].flip(0)
    changed[4][[2, 16 + 2]] = changed[4][[16 + 2, 2]]
    changed[5][7] = 1 + 2**-23
    found = [of(values), *map(of, changed), of(values[:-1])]
    assert len({*found}) == len(found)
    assert of(values.clone()) == found[0]
    owner_masters._factors.cache_clear()
