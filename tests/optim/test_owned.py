"""Optimizers that update each parameter by itself: one process's bits, for any ranks and stages."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from harness import ONE_UNIT_EACH, assert_bits, mean_square, rank_data
from matrices import Matrices, One, OneProcess, assert_same_parameters, straddling, train
from own_optimizers import EachByItself
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy

import zero_ext
from zero_ext import checkpoint
from zero_ext.engine.registry import find
from zero_ext.optim.whole import Whole

STEPS = 8


class Lamb(EachByItself):
    """The update's norm is that of the parameter (You et al. 2020, Algorithm 2)."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, lr, betas=betas, weight_decay=weight_decay)

    def update(self, p, state, group):
        first, second = group["betas"]
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        state["m"].lerp_(p.grad, 1 - first)
        state["v"].lerp_(p.grad * p.grad, 1 - second)
        m = state["m"] / (1 - first ** state["step"])
        v = state["v"] / (1 - second ** state["step"])
        update = m / (v.sqrt() + 1e-6) + group["weight_decay"] * p
        ratio = p.norm() / update.norm().clamp_min(1e-12)
        p.sub_(group["lr"] * ratio * update)


class Factors(EachByItself):
    """As Shampoo: a factor for each dimension of a matrix. It replaces its parameters' data."""

    def update(self, p, state, group):
        g = p.grad.reshape(p.shape[0] if p.dim() else 1, -1)
        if not state:
            state["left"] = torch.eye(g.shape[0], dtype=torch.float64, device=p.device)
            state["right"] = torch.eye(g.shape[1], device=p.device)
        state["left"] += (g @ g.T).double()
        state["right"] += g.T @ g
        left = torch.linalg.inv(state["left"]).float()
        update = left @ g @ torch.linalg.inv(state["right"])
        p.data = p.data - group["lr"] * update.reshape(p.shape)


class Quantised(EachByItself):
    """A momentum in 8 bits of each block of 16, for parameters of 64 elements and more."""

    def update(self, p, state, group):
        momentum, numel = state.get("momentum"), p.numel()
        if momentum is None:
            momentum = torch.zeros(numel, device=p.device)
        elif momentum.dtype == torch.int8:
            momentum = (momentum.float().view(-1, 16) * state["scale"]).flatten()[:numel]
        momentum = 0.9 * momentum + p.grad.flatten()
        p.sub_(group["lr"] * momentum.view_as(p))
        if numel >= 64:
            blocks = nn.functional.pad(momentum, (0, -numel % 16)).view(-1, 16)
            state["scale"] = blocks.abs().amax(1, keepdim=True).clamp_min(1e-9) / 127
            momentum = (blocks / state["scale"]).round().to(torch.int8).flatten()
        state["momentum"] = momentum


class TensorRate(EachByItself):
    """Makes a tensor of its rate, which it may not be given as a number afterwards. Counts under a
    name, as MADGRAD does, which its rate and its roots follow."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, eps=torch.tensor(1e-6, device="cpu"))
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], device="cpu")
        self.state["k"] = torch.tensor([0])

    def step(self, closure=None):
        super().step()
        self.state["k"] += 1

    def update(self, p, state, group):
        if not isinstance(group["lr"], torch.Tensor):
            raise TypeError("lr is no tensor any more")
        rate = group["lr"] * (self.state["k"].item() + 1) ** 0.5
        if not state:
            state.update(x0=p.clone(), s=torch.zeros_like(p), rows=p.new_zeros(p.shape[0], 1))
        state["s"] += rate * p.grad
        state["rows"] += rate * p.grad.square().mean(1, keepdim=True)
        roots = state["rows"].pow(1 / 3) + group["eps"]
        p.copy_(state["x0"] - state["s"] / roots)


KINDS = {
    "Muon": (torch.optim.Muon, {"lr": 0.02, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05, "foreach": False}),
    "LAMB": (Lamb, {}),
    "factors": (Factors, {"lr": 0.01}),
    "8 bits": (Quantised, {"lr": 0.05}),
    "named": (TensorRate, {"lr": 0.01}),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def sharded(mesh, stage, kind, model=None, **more):
    model = straddling(model or Matrices(), stage, mesh)
    made, settings = KINDS[kind]
    return model, zero_ext.optim.wrap(made, model.parameters(), **settings, **more)


def one_process(anywhere, world, kind, model=Matrices) -> OneProcess:
    made, settings = KINDS[kind]
    return OneProcess(1 if anywhere is None else world, functools.partial(made, **settings), model)


@EVERY_KIND
@pytest.mark.parametrize(
    ("stage", "micros"),
    [(0, 4), (1, 1), (2, 4), (3, 1)]
    + [pytest.param(s, m, marks=pytest.mark.slow) for s, m in ((0, 1), (1, 4), (2, 1), (3, 4))],
)
def test_parameters_have_the_bits_of_one_process(anywhere, rank, world, kind, stage, micros):
    model, optimizer = sharded(anywhere, stage, kind)
    assert isinstance(optimizer.zero_core.states, Whole)
    plain = one_process(anywhere, world, kind)
    train(model, optimizer, rank, range(STEPS), micros)
    plain.train(range(STEPS), micros)
    assert_same_parameters(model, plain.model)


class Sums(Matrices):
    """The mean over samples of sums of products, whose gradients are those of the samples' mean."""

    def forward(self, samples):
        return (samples @ torch.cat([p.reshape(-1) for p in self.parameters()])).mean()


@pytest.mark.parametrize("kind", [*KINDS, "zero_ext's Muon"])
@pytest.mark.parametrize("stage", [1, 2])
def test_micro_batches_give_what_one_batch_of_their_samples_does(
    anywhere, rank, world, device, kind, stage
):
    """The same bits where sums are exact: of whole numbers over 1, 2 or 4 ranks. Else each average
    is rounded more often, and Muon rounds matrices to bf16."""
    trained = []
    for micros in (1, 4):
        model = Sums().to(device)
        if kind in KINDS:
            model, optimizer = sharded(anywhere, stage, kind, model)
        else:
            model = straddling(model, stage, anywhere)
            optimizer = zero_ext.optim.Muon(model.parameters(), lr=0.02)
        numel = sum(p.numel() for p in Sums().parameters())
        for step in range(2):
            samples = (8 * rank_data((8, numel), rank, step)).round().to(device)
            for part in samples.chunk(micros):
                (model(part) / micros).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([zero_ext.full_tensor(p) for p in model.parameters()])
    for one, four in zip(*trained, strict=True):
        if world & (world - 1) == 0:
            assert torch.equal(one, four)
        else:
            torch.testing.assert_close(one, four, rtol=1e-2, atol=1e-3)


@EVERY_KIND
def test_training_goes_on_from_a_checkpoint(anywhere, rank, world, path, kind):
    model, optimizer = sharded(anywhere, 3, kind)
    plain = one_process(anywhere, world, kind)
    train(model, optimizer, rank, range(2))
    zero_ext.checkpoint.save(path, model, optimizer)
    state_dict = optimizer.state_dict()
    plain.train(range(2))
    # The class's own state_dict() has the same values, in the same order.
    own = plain.optimizer.state_dict()["state"]
    assert state_dict["state"].keys() == own.keys()
    for key, state in own.items():
        for name, value in (state if isinstance(state, dict) else {}).items():
            found = state_dict["state"][key][name]
            assert_bits(torch.as_tensor(found), torch.as_tensor(value), f"{key} {name}")
    plain.train(range(2, STEPS))
    again, its = sharded(anywhere, 1, kind, Matrices(seed=1))
    zero_ext.checkpoint.load(path, again, its)
    train(again, its, rank, range(2, STEPS))
    assert_same_parameters(again, plain.model)
    # And from one process's state_dict.
    started = one_process(anywhere, world, kind)
    started.train(range(2))
    other, its = sharded(anywhere, 2, kind, started.copy())
    its.load_state_dict(started.optimizer.state_dict())
    train(other, its, rank, range(2, STEPS))
    assert_same_parameters(other, plain.model)


def test_more_ranks_than_matrices(anywhere, rank, world):
    for kind, stage in itertools.product(KINDS, range(4)):
        model, optimizer = sharded(anywhere, stage, kind, One())
        plain = one_process(anywhere, world, kind, One)
        train(model, optimizer, rank, range(2))
        plain.train(range(2))
        assert_same_parameters(model, plain.model)


@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 3])
def test_torchs_state_dicts_on_ranks_that_own_nothing(anywhere, rank, world, stage):
    """torch lets an optimizer without states make a step first, which other ranks do not make."""
    model, optimizer = sharded(anywhere, stage, "LAMB", One())
    plain = one_process(anywhere, world, "LAMB", One)
    train(model, optimizer, rank, range(2))
    plain.train(range(2))
    options = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    expected = get_optimizer_state_dict(plain.model, plain.optimizer, options=options)
    for name in ("m", "v") if rank == 0 else ():
        assert_bits(saved["state"]["only.weight"][name], expected["state"]["only.weight"][name])
    other, its = sharded(anywhere, stage, "LAMB", plain.copy())
    set_optimizer_state_dict(
        other, its, get_optimizer_state_dict(model, optimizer), options=StateDictOptions()
    )
    assert bool(its.state) == bool(optimizer.state) is True
    train(other, its, rank, range(2, 4))
    plain.train(range(2, 4))
    assert_same_parameters(other, plain.model)


@pytest.mark.parametrize("stage", [1, 3])
def test_offloading_changes_no_bit(anywhere, rank, world, stage):
    """Masters in host memory throughout, and states that are there for a while."""
    for kind, policy in itertools.product(KINDS, (None, CPUOffloadPolicy())):
        made, settings = KINDS[kind]
        plain = one_process(anywhere, world, kind)
        if policy is not None:  # other kernels than those of a device may add up in another order
            plain.optimizer = made(plain.model.cpu().parameters(), **settings)
        plain.train(range(3))
        model = straddling(Matrices(), stage, anywhere, offload_policy=policy)
        optimizer = zero_ext.optim.wrap(made, model.parameters(), **settings)
        train(model, optimizer, rank, range(2))
        zero_ext.offload_states(model)
        assert optimizer.stats()["bytes_owner_masters"] == 0  # they are sent once more
        zero_ext.reload_states(model)
        train(model, optimizer, rank, range(2, 3))
        assert_same_parameters(model, plain.model)


def test_owners_share_the_elements(anywhere, rank):
    model, optimizer = sharded(anywhere, 2, "Muon")
    train(model, optimizer, rank, range(1))
    owners = optimizer.zero_core.owners
    assert sum(owners.loads) == sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    assert max(owners.loads) - min(owners.loads) <= largest
    for p in model.parameters():
        assert (p in optimizer.state and bool(optimizer.state[p])) == owners.owns(find(p)[1])


@pytest.mark.parametrize("stage", [2, 3])
def test_waves_bound_what_is_whole_at_a_time(anywhere, rank, world, stage):
    model, optimizer = sharded(anywhere, stage, "Muon", owner_mb=8 * 90 / 2**20)
    plain = one_process(anywhere, world, "Muon")
    train(model, optimizer, rank, range(2))
    waves = optimizer.zero_core.owners.waves([find(p)[1] for p in model.parameters()])
    assert len(waves) > 1
    for wave in waves:
        assert len(wave.mine) <= 1 or wave.mine_numel <= 90
    assert 0 < optimizer.stats()["bytes_peak_owners"] <= 3 * 8 * 169
    plain.train(range(2))
    assert_same_parameters(model, plain.model)


def test_what_a_step_leaves_alone(anywhere, rank):
    """Skipped steps, unused and frozen parameters, a parameter that users have written to."""
    model = Matrices()
    model.unused = nn.Parameter(torch.ones(3, 5))
    model.layers[1].weight.requires_grad_(False)
    model, optimizer = sharded(anywhere, 3, "Muon", model)
    train(model, optimizer, rank, range(1))
    before = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
    (mean_square(model, rank_data((3, 13), rank)) * float("nan")).backward()
    with pytest.warns(UserWarning, match="NaN"):
        optimizer.step()
    optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert_bits(zero_ext.full_tensor(p), before[name], name)
    assert optimizer.skipped_steps == 1
    assert_bits(before["unused"], torch.ones(3, 5))
    assert_bits(before["layers.1.weight"], Matrices().layers[1].weight.detach())
    zero_ext.set_full_param(model.layers[0].weight, torch.zeros(13, 13))
    model.layers[1].weight.requires_grad_(True)
    train(model, optimizer, rank, range(1, 3))
    assert zero_ext.full_tensor(model.layers[0].weight).abs().max() < 0.1  # from 0 on
    assert not torch.equal(zero_ext.full_tensor(model.layers[1].weight), before["layers.1.weight"])


@pytest.mark.parametrize("kind", ["LAMB", "named"])
def test_a_state_that_was_emptied_begins_anew(anywhere, rank, world, kind):
    """Also after it was loaded, of all parameters and of one."""
    (made, settings), (model, optimizer) = KINDS[kind], sharded(anywhere, 1, kind)
    plain = one_process(anywhere, world, kind)
    train(model, optimizer, rank, range(2))
    plain.train(range(2))
    saved, expected = (copy.deepcopy(o.state_dict()) for o in (optimizer, plain.optimizer))
    optimizer.retire()
    optimizer = zero_ext.optim.wrap(made, model.parameters(), **settings)
    plain.optimizer = made(plain.model.parameters(), **settings)
    optimizer.load_state_dict(saved)
    plain.optimizer.load_state_dict(expected)
    for one, of in ((optimizer, model), (plain.optimizer, plain.model)):
        for parameter in of.parameters():
            one.state.pop(parameter, None)
    train(model, optimizer, rank, range(2, 4))
    plain.train(range(2, 4))
    for one, of in ((optimizer, model), (plain.optimizer, plain.model)):
        one.state[of.layers[1].weight].clear()
    train(model, optimizer, rank, range(4, 6))
    plain.train(range(4, 6))
    assert_same_parameters(model, plain.model)


def test_an_optimizer_of_plain_parameters(anywhere, rank, world):
    model, plain = Matrices(), one_process(anywhere, world, "Adafactor")
    group = None if anywhere is None else anywhere.get_group()
    made, settings = KINDS["Adafactor"]
    optimizer = zero_ext.optim.wrap(made, model.parameters(), process_group=group, **settings)
    train(model, optimizer, rank, range(STEPS))
    plain.train(range(STEPS))
    assert_same_parameters(model, plain.model)


def test_an_object_is_taken_over_with_its_groups_and_schedule(anywhere, rank, world):
    model, plain = Matrices(), one_process(anywhere, world, "LAMB")
    given = Lamb(model.parameters())
    halved = torch.optim.lr_scheduler.StepLR(given, step_size=1, gamma=0.5)
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0}
    engine, optimizer, *_ = zero_ext.initialize(
        model=model, optimizer=given, config=config, mesh=anywhere
    )
    assert optimizer is given
    train(engine.module, optimizer, rank, range(2))
    halved.step()
    train(engine.module, optimizer, rank, range(2, 4))
    plain.train(range(2))
    plain.optimizer.param_groups[0]["lr"] *= 0.5
    plain.train(range(2, 4))
    assert_same_parameters(engine.module, plain.model)


def test_shapes_that_the_class_rejects_are_told_at_once():
    with pytest.raises(ValueError, match="2D"):
        zero_ext.optim.wrap(torch.optim.Muon, nn.Linear(3, 5).parameters())


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_an_error_at_one_owner_is_told_to_all(mesh, rank):
    class Failing(Lamb):
        fails = False

        def step(self, closure=None):
            if type(self).fails:
                raise ArithmeticError("out of range")
            super().step()

    model = zero_ext.shard(Matrices(), 2, mesh=mesh)
    optimizer = zero_ext.optim.wrap(Failing, model.parameters())
    train(model, optimizer, rank, range(1))
    before = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
    Failing.fails = rank == 1
    expected = ArithmeticError if rank == 1 else RuntimeError
    with pytest.raises(expected, match="out of range"):
        train(model, optimizer, rank, range(1, 2))
    for name, p in model.named_parameters():
        assert_bits(zero_ext.full_tensor(p), before[name], name)
    Failing.fails = False
    optimizer.zero_grad()
    train(model, optimizer, rank, range(2, 3))
    dist.barrier(mesh.get_group())


def test_whole_states_are_read_in_state_dicts():
    model, optimizer = sharded(None, 2, "LAMB")
    train(model, optimizer, 0, range(1))
    with pytest.raises(ValueError, match="lie whole at their parameters' owners"):
        zero_ext.full_state(optimizer, model.last, "m")


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_states_are_loaded_where_ranks_order_groups_otherwise(mesh, rank, shared_path, stage):
    def made():
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(5))
        zero_ext.shard(model, stage, mesh=mesh, units=nn.Linear, bucket_mb=ONE_UNIT_EACH)
        parameters = [*model.parameters()]
        order = parameters if rank == 0 else parameters[::-1]
        return model, zero_ext.optim.wrap(Lamb, order, lr=0.1)

    def train(model, optimizer, step):
        for layer in model:
            mean_square(layer, rank_data((3, 7), rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    train(model, optimizer, 0)
    checkpoint.save(shared_path / "saved", model, optimizer)
    again = made()
    checkpoint.load(shared_path / "saved", *again)
    for each in ((model, optimizer), again):
        train(*each, 1)
    for mine, theirs in zip(again[0].parameters(), model.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(mine), zero_ext.full_tensor(theirs))
