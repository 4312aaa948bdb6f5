"""Muon: torch.optim.Muon's bits, for any ranks and stages, and what travels for them."""

import copy
import functools

import pytest
import torch
from harness import assert_bits, mean_square, rank_data
from matrices import Matrices, One, OneProcess, assert_same_parameters, straddling, train
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import zero_ext
from zero_ext.engine.registry import find
from zero_ext.optim import Muon, muon_groups

SETTINGS = {"lr": 0.02, "weight_decay": 0.1}


def sharded(mesh, stage, model=None, **settings):
    model = straddling(model or Matrices(), stage, mesh)
    return model, Muon(model.parameters(), **SETTINGS, **settings)


def one_process(anywhere, world, model=Matrices, **settings) -> OneProcess:
    make = functools.partial(torch.optim.Muon, **SETTINGS, **settings)
    return OneProcess(1 if anywhere is None else world, make, model)


def assert_same(model, optimizer, plain) -> None:
    """Also the momentum."""
    assert_same_parameters(model, plain.model)
    for (name, p), theirs in zip(model.named_parameters(), plain.model.parameters(), strict=True):
        momentum = zero_ext.full_state(optimizer, p, "momentum_buffer")
        assert_bits(momentum, plain.optimizer.state[theirs]["momentum_buffer"], name)


@pytest.mark.parametrize("micros", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_and_momentum_have_torch_s_bits(anywhere, rank, world, stage, micros):
    model, optimizer = sharded(anywhere, stage)
    plain = one_process(anywhere, world)
    train(model, optimizer, rank, range(4), micros)
    plain.train(range(4), micros)
    assert_same(model, optimizer, plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"nesterov": False, "momentum": 0.3},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "momentum": 0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_setting_is_torch_s(anywhere, rank, world, settings):
    model, optimizer = sharded(anywhere, 2, **settings)
    plain = one_process(anywhere, world, **settings)
    for each in (optimizer, plain.optimizer):  # schedules change groups
        first, second = each.param_groups[0], {"lr": torch.tensor(0.005), "weight_decay": 0}
        each.add_param_group({"params": [first["params"].pop(1)], **second})
    train(model, optimizer, rank, range(3))
    plain.train(range(3))
    assert_same(model, optimizer, plain)


class Fused(nn.Module):
    """``parts`` matrices in one parameter, or each in its own."""

    def __init__(self, fused: bool, parts: int = 3):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(5 * parts, 13)
        pieces = [weight] if fused else weight.split(5)
        self.weights = nn.ParameterList(nn.Parameter(piece.clone()) for piece in pieces)

    def forward(self, x):
        return torch.tanh(x @ torch.cat([*self.weights]).t())


@pytest.mark.parametrize("stage", [0, 3])
def test_split_updates_the_parts_of_a_fused_matrix_as_matrices(anywhere, rank, world, stage):
    model, optimizer = sharded(anywhere, stage, Fused(True), split=3)
    plain = one_process(anywhere, world, functools.partial(Fused, False))
    train(model, optimizer, rank, range(3))
    plain.train(range(3))
    ours = zero_ext.full_tensor(model.weights[0])
    assert_bits(ours, torch.cat([*plain.model.weights]).detach())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_more_ranks_than_matrices(anywhere, rank, world, stage):
    model, optimizer = sharded(anywhere, stage, One())
    plain = one_process(anywhere, world, One)
    train(model, optimizer, rank, range(2))
    plain.train(range(2))
    assert_same(model, optimizer, plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_waves_bound_what_owners_have_and_change_no_bit(anywhere, rank, world, stage):
    model, optimizer = sharded(anywhere, stage, owner_mb=4 * 90 / 2**20)
    plain = one_process(anywhere, world)
    train(model, optimizer, rank, range(2))
    plain.train(range(2))
    assert_same(model, optimizer, plain)
    other, at_once = sharded(anywhere, stage)
    train(other, at_once, rank, range(1))
    waves, wave = (
        o.zero_core.owners.waves([find(p)[1] for p in m.parameters()])
        for o, m in ((optimizer, model), (at_once, other))
    )
    assert len(wave) == 1 < len(waves)
    if len(waves) > 2:  # two are under way at a time
        assert optimizer.stats()["bytes_peak_owners"] < at_once.stats()["bytes_peak_owners"]


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_traffic_is_two_bytes_each_way_for_what_its_owner_lacks(mesh, rank, world, stage):
    model, optimizer = sharded(mesh, stage)
    train(model, optimizer, rank, range(3))
    expected = 0
    for p in model.parameters():
        owned = optimizer.zero_core.owners.owns(find(p)[1])
        if stage == 0:  # every rank has what an owner needs
            expected += 2 * p.numel() * (world - 1) if owned else 0
        else:
            held = optimizer.state[p]["momentum_buffer"].to_local().numel()
            expected += 2 * (p.numel() - held if owned else held)
    assert optimizer.stats()["bytes_sent_for_owners"] == 3 * expected


@pytest.mark.parametrize("stage", [1, 3])
def test_masters_in_host_memory_change_no_bit(anywhere, rank, world, stage):
    plain = one_process(anywhere, world)
    plain.train(range(3))
    model = straddling(Matrices(), stage, anywhere, offload_policy=CPUOffloadPolicy())
    optimizer = Muon(model.parameters(), **SETTINGS)
    train(model, optimizer, rank, range(2))
    zero_ext.offload_states(model)
    zero_ext.reload_states(model)
    train(model, optimizer, rank, range(2, 3))
    assert_same_parameters(model, plain.model)
    owned = straddling(Matrices(), stage, anywhere, offload_policy=CPUOffloadPolicy())
    wrapped = zero_ext.optim.wrap(torch.optim.Muon, owned.parameters(), **SETTINGS)
    train(owned, wrapped, rank, range(3))
    assert_same_parameters(owned, plain.model)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_ranks_may_list_parameters_in_orders_of_their_own(mesh, rank, world):
    model = straddling(Matrices(), 2, mesh)
    parameters = [*model.parameters()][:: 1 if rank % 2 else -1]
    plain = one_process(mesh, world)
    plain.train(range(2))
    optimizer = Muon(parameters, **SETTINGS)
    train(model, optimizer, rank, range(2))
    assert_same(model, optimizer, plain)
    owned = straddling(Matrices(), 2, mesh)
    parameters = [*owned.parameters()][:: 1 if rank % 2 else -1]
    train(owned, zero_ext.optim.wrap(torch.optim.Muon, parameters, **SETTINGS), rank, range(2))
    assert_same_parameters(owned, plain.model)


def test_a_skipped_step_touches_nothing(anywhere, rank, world):
    model, optimizer = sharded(anywhere, 3)
    plain = one_process(anywhere, world)
    train(model, optimizer, rank, range(2))
    sent = optimizer.stats()["bytes_sent_for_owners"]
    factor = float("inf") if rank == 0 else 1  # the other ranks learn of it
    (mean_square(model, rank_data((3, 13), rank)) * factor).backward()
    with pytest.warns(UserWarning, match="NaN"):
        optimizer.step()
    optimizer.zero_grad()
    plain.train(range(2))
    assert_same(model, optimizer, plain)
    assert optimizer.stats()["bytes_sent_for_owners"] == sent
    train(model, optimizer, rank, range(2, 4))
    plain.train(range(2, 4))
    assert_same(model, optimizer, plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_half_precision_with_an_overflow(anywhere, rank, stage):
    """Masters are what torch makes of the gradients, and a step that overflows touches nothing."""
    model = straddling(Matrices().half(), stage, anywhere)
    scaler = zero_ext.LossScaler("dynamic", init_scale=2.0**30, hysteresis=1, backoff_factor=2**-20)
    optimizer = Muon(model.parameters(), **SETTINGS, loss_scaler=scaler, max_grad_norm=0.1)
    masters = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
    theirs = torch.optim.Muon(masters.values(), **SETTINGS)
    for step in range(4):
        loss = mean_square(model, rank_data((3, 13), rank, step, dtype=torch.float16))
        optimizer.scale(loss).backward()
        optimizer.step()
        if optimizer.skipped_steps <= step:
            for name, p in model.named_parameters():
                masters[name].grad = zero_ext.full_grad(p)  # which max_grad_norm has scaled
            theirs.step()
        for name, p in model.named_parameters():
            assert_bits(zero_ext.full_tensor(p), masters[name], name)
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    assert theirs.state[masters["last"]]["momentum_buffer"].any()


class WithUnused(Matrices):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3, 5))


def test_parameters_that_do_not_train_and_those_that_users_write(anywhere, rank, world):
    frozen, plain = WithUnused(), one_process(anywhere, world, WithUnused)
    for each in (frozen, plain.model):
        each.layers[1].weight.requires_grad_(False)
    model, optimizer = sharded(anywhere, 2, frozen)
    train(model, optimizer, rank, range(2))
    plain.train(range(2))
    written = torch.full((13, 13), 0.25)
    zero_ext.set_full_param(model.layers[0].weight, written)
    with torch.no_grad():
        plain.model.layers[0].weight.copy_(written)
    for each in (model, plain.model):
        each.layers[1].weight.requires_grad_(True)
    train(model, optimizer, rank, range(2, 4))
    plain.train(range(2, 4))
    assert_same_parameters(model, plain.model)


def test_states_go_to_and_come_from_torch(anywhere, rank, world, path):
    model, optimizer = sharded(anywhere, 3)
    plain = one_process(anywhere, world)
    train(model, optimizer, rank, range(2))
    zero_ext.checkpoint.save(path, model, optimizer)
    plain.train(range(4))
    again, its = sharded(anywhere, 1, Matrices(seed=1))
    zero_ext.checkpoint.load(path, again, its)
    train(again, its, rank, range(2, 4))
    assert_same(again, its, plain)
    # From torch's state_dict, which has no other state.
    started = one_process(anywhere, world)
    started.train(range(2))
    torchs = started.optimizer.state_dict()
    other, its = sharded(anywhere, 2, started.copy())
    its.load_state_dict(torchs)
    given = its.state_dict()
    given = {**given, "state": copy.deepcopy(given["state"])}
    train(other, its, rank, range(2, 4))
    assert_same(other, its, plain)
    # And to torch.
    assert given["state"].keys() == torchs["state"].keys()
    assert all(state.keys() == {"momentum_buffer"} for state in given["state"].values())
    (ours,), (theirs,) = given["param_groups"], torchs["param_groups"]
    assert ours == {**theirs, "split": 1}
    from_ours = one_process(anywhere, world)
    from_ours.model.load_state_dict(started.model.state_dict())
    whole = {
        key: {name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()}
        for key, state in given["state"].items()
        for name, value in state.items()
    }
    from_ours.optimizer.load_state_dict({**given, "state": whole})
    from_ours.train(range(2, 4))
    for name, p in from_ours.model.named_parameters():
        assert_bits(p, plain.model.get_parameter(name), name)


def test_plain_parameters_and_torch_s_object_are_taken_over(anywhere, rank, world):
    plain = one_process(anywhere, world)
    plain.train(range(3))
    group = None if anywhere is None else anywhere.get_group()
    model = Matrices()
    optimizer = Muon(model.named_parameters(), **SETTINGS, process_group=group)
    train(model, optimizer, rank, range(3))
    assert_same(model, optimizer, plain)
    model = Matrices()
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0}
    engine, optimizer, *_ = zero_ext.initialize(
        model=model,
        optimizer=torch.optim.Muon(model.parameters(), **SETTINGS),
        config=config,
        mesh=anywhere,
    )
    assert isinstance(optimizer, Muon)
    train(engine.module, optimizer, rank, range(3))
    assert_same(engine.module, optimizer, plain)


def test_wrong_arguments_change_nothing():
    model = nn.Sequential(nn.Linear(3, 5))
    zero_ext.shard(model, 2)
    with pytest.raises(ValueError, match=r"matrices, and '0.bias' has shape \(5,\)"):
        Muon(model.parameters())
    with pytest.raises(ValueError, match="owner_mb must be positive"):
        Muon([model[0].weight], owner_mb=0)
    with pytest.raises(ValueError, match="momentum should be >= 0"):
        Muon([model[0].weight], momentum=-1)
    for split in (0, 2, 1.0):
        with pytest.raises(ValueError, match=rf"'0.weight' has 5 rows, and split={split}"):
            Muon([{"params": model[0].weight, "split": split}])
    optimizer = Muon([model[0].weight])
    with pytest.raises(ValueError, match=r"'0.bias' has shape \(5,\)"):
        optimizer.add_param_group({"params": model[0].bias})
    with pytest.raises(ValueError, match="a parameter has shape"):
        optimizer.add_param_group({"params": iter([nn.Parameter(torch.ones(2, 2, 2))])})
    assert len(optimizer.param_groups) == 1
    for name, wrong in (("ns_steps", 100), ("ns_coefficients", (1, 2))):
        right = optimizer.param_groups[0][name]
        model(torch.ones(1, 3)).sum().backward()
        optimizer.param_groups[0][name] = wrong
        before = zero_ext.full_state(optimizer, model[0].weight, "momentum_buffer").clone()
        with pytest.raises(ValueError, match=name):
            optimizer.step()
        after = zero_ext.full_state(optimizer, model[0].weight, "momentum_buffer")
        assert_bits(after, before, name)
        optimizer.param_groups[0][name] = right
        optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


class Language(nn.Module):
    """One of each kind that ``muon_groups`` tells apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(11, 13)
        self.pos_emb = nn.Parameter(torch.randn(3, 13) / 5)
        self.inner = nn.Linear(13, 7)
        self.experts = nn.Parameter(torch.randn(2, 7, 13) / 5)
        self.gain = nn.Parameter(torch.ones(1, 13))
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, 11)

    def forward(self, tokens):
        x = self.token(tokens) + self.pos_emb
        x = torch.tanh(self.inner(x))
        return self.head(self.norm(torch.einsum("bti,eij->btj", x, self.experts)) * self.gain)


def test_muon_groups_sort_by_shape_and_module():
    groups = muon_groups(Language())
    assert [name for name, _ in groups.muon] == ["inner.weight"]
    assert groups.reasons == {
        "token.weight": "embedding",
        "pos_emb": "embedding",
        "inner.weight": "matrix",
        "inner.bias": "vector",
        "experts": "3 dimensions",
        "gain": "vector",
        "norm.weight": "vector",
        "norm.bias": "vector",
        "head.weight": "output layer",
        "head.bias": "output layer",
    }
    lines = str(groups).splitlines()
    assert lines[0].split() == ["optimizer", "parameter", "shape", "why"]
    assert lines[1].split() == ["Muon", "inner.weight", "7×13", "matrix"]
    assert len(lines) == 11
    # The same of a module whose parameters are released.
    released = muon_groups(zero_ext.shard(Language(), 3))
    assert str(released) == str(groups)

    class WithMethod(nn.Sequential):
        def get_output_embeddings(self):
            return self[1]

    reasons = muon_groups(WithMethod(nn.Linear(5, 7), nn.Linear(7, 3))).reasons
    assert (reasons["0.weight"], reasons["1.weight"]) == ("matrix", "output layer")


@pytest.mark.parametrize("stage", [1, 3])
def test_muon_and_adamw_on_one_module(anywhere, rank, world, stage, path):
    """One clip and one checkpoint for both."""

    def make(model):
        groups = muon_groups(model)
        return Muon(groups.muon, lr=0.02), zero_ext.optim.AdamW(groups.adamw, lr=0.01)

    plain, tokens = Language(), torch.arange(15).reshape(5, 3) % 11
    groups = muon_groups(plain)
    torchs = [
        torch.optim.Muon(groups.muon, lr=0.02),
        torch.optim.AdamW(groups.adamw, lr=0.01, foreach=False),
    ]
    model = straddling(Language(), stage, anywhere)
    optimizers = make(model)
    for step in range(4):
        if step == 2:
            zero_ext.checkpoint.save(path, model, optimizers)
            model = straddling(Language(), 2, anywhere)
            optimizers = make(model)
            zero_ext.checkpoint.load(path, model, optimizers)
        mean_square(model, (tokens + rank + step) % 11).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        for name, p in plain.named_parameters():
            p.grad = zero_ext.full_grad(model.get_parameter(name))
        clipped = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert torch.allclose(clipped, torch.tensor(0.05), rtol=1e-3)
        for optimizer in (*optimizers, *torchs):
            optimizer.step()
            optimizer.zero_grad()
    for name, p in groups.muon:
        assert_bits(zero_ext.full_tensor(model.get_parameter(name)), p.detach(), name)
    for name, p in groups.adamw:
        ours = zero_ext.full_tensor(model.get_parameter(name))
        torch.testing.assert_close(ours, p.detach(), rtol=1e-5, atol=1e-6, msg=name)
