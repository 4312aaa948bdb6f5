"""Stage 3 with host_copies: gathers stay within a host, and no value differs for it."""

import copy
import random

import pytest
import torch
from edited_models import ACTIONS, BF16, GROUP, HOSTS, OPTIMIZERS, Edits, batch_of, sharded, step
from harness import MLP, Odd, Tied, assert_bits, mean_square, rank_data
from memory_formula import ranges_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_ext
from zero_ext.engine.registry import find

pytestmark = [pytest.mark.dist, pytest.mark.host]


@pytest.fixture
def on_hosts(rank, monkeypatch):
    """Shards a model with copies on these hosts; None: all ranks are on one."""

    def make_on(hosts, make, mesh, optimizer="AdamW", **options):
        number = 0 if hosts is None else HOSTS[hosts](rank)
        monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", str(1 + number))
        options = {"host_copies": True, "prefetch_mb": 0, **options}
        return sharded(make, 3, mesh, optimizer, **options)

    return make_on


class Views(Edits):
    """As well, each rank writes to its own part by views that state_dict() lent, now or earlier."""

    lent = None

    def lend(self):
        self.lent = self.model.state_dict()

    def write_lent(self):
        if self.lent is None:
            self.lend()
        local = self.lent[self.pick()].to_local()
        local.mul_(1.5)

    def give_back(self):
        self.lent = None


VIEWS = ["lend", "write_lent", "write_lent", "give_back"]


def gathered(model):
    """The bits of all parameters, as gathers of this rank bring them."""
    bits = {}

    def note(module, args):
        for name, parameter in module.named_parameters(prefix=names[module], recurse=False):
            bits[name] = parameter.detach().clone()

    names = {module: name for name, module in model.named_modules()}
    hooks = [module.register_forward_pre_hook(note) for module in names]
    with torch.no_grad():
        model(batch_of(model, 0))
    for hook in hooks:
        hook.remove()
    return bits


def assert_same(model, other, what):
    mine, theirs = gathered(model), gathered(other)
    assert mine.keys() == theirs.keys()
    for name, bits in mine.items():
        assert_bits(bits, theirs[name], f"{what} {name}")


@pytest.mark.parametrize(
    "seed", [*range(4), *[pytest.param(s, marks=pytest.mark.slow) for s in range(4, 40)]]
)
def test_random_programs_have_the_bits_of_one_host(on_hosts, mesh, rank, seed, shared_path):
    draw = random.Random(seed)
    hosts, optimizer = draw.choice([*HOSTS]), draw.choice([*OPTIMIZERS])
    make = draw.choice([lambda: MLP(57, layers=3), lambda: Odd(BF16), lambda: Tied(13)])
    runs = []
    for k, each in enumerate([hosts, None]):
        model, stepper = on_hosts(each, make, mesh, optimizer)
        runs.append(Views(model, stepper, rank, random.Random(seed), shared_path / f"{k}"))
    for turn in range(16):
        action = draw.choice([*ACTIONS, *VIEWS, "step", "step", "step"])
        for run in runs:
            run.run(action)
        torch.distributed.barrier()  # what a rank writes to its own part, others may read
        assert_same(*(run.model for run in runs), f"{hosts} {optimizer} {turn} {action}")
        torch.distributed.barrier()


@pytest.mark.world(min=4, max=4)
@pytest.mark.parametrize("hosts", ["each alone", "in turn", "one apart"])
def test_replicas_have_copies_of_their_own(on_hosts, rank, hosts, shared_path):
    """Two replicas of two ranks, with ranks on several hosts each."""
    shape = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    runs = []
    for k, each in enumerate([hosts, None]):
        model, stepper = on_hosts(each, lambda: Odd(BF16), shape)
        runs.append(Views(model, stepper, rank, random.Random(7), shared_path / f"{k}"))
    for turn, action in enumerate(["step", "step", "write", "step", "load", "step", "set", "step"]):
        for run in runs:
            run.run(action)
        torch.distributed.barrier()
        assert_same(*(run.model for run in runs), f"{turn} {action}")
        torch.distributed.barrier()


@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-4, 10.0])
def test_an_update_sends_marks_and_changes_and_a_gather_nothing(on_hosts, mesh, rank, world, lr):
    model, optimizer = on_hosts("each alone", lambda: MLP(57, layers=3), mesh, bucket_mb=25)
    optimizer.param_groups[0]["lr"] = lr
    assert model.stats()["units"] == 1
    [(in_range, _, _)] = ranges_of(model, [[n for n, _ in model.named_parameters()]], world, 3)
    for _ in range(3):
        before = own_part(model, in_range, rank)
        sent = model.stats()["bytes_to_hosts"]
        step(model, optimizer, rank)
        changed = (before != own_part(model, in_range, rank)).sum().item()
        marks = GROUP // 8 * -(-in_range // GROUP)
        expected = (world - 1) * (8 + min(2 * in_range, marks + 2 * changed))
        assert model.stats()["bytes_to_hosts"] - sent == expected
    assert (changed == 0) == (lr == 0.0)
    assert model.stats()["gathers"] > 0
    assert model.stats()["gathers_between_hosts"] == 0


def own_part(model, in_range, rank):
    """The bits of this rank's range: parameters begin at multiples of 16 elements."""
    full = [p.flatten().view(torch.int16) for _, p in zero_ext.iter_full_params(model)]
    flat = torch.cat([nn.functional.pad(bits, (0, -len(bits) % 16)) for bits in full])
    flat = nn.functional.pad(flat, (0, -len(flat) % in_range + in_range))
    return flat[rank * in_range : (rank + 1) * in_range].clone()


def test_a_part_that_may_be_written_to_comes_from_its_owner(on_hosts, mesh, rank):
    model, optimizer = on_hosts("each alone", lambda: MLP(57), mesh)
    units = model.stats()["units"]
    seen = [0]

    def between_hosts():
        """Gathers of a forward on all ranks that take parts from owners."""
        torch.distributed.barrier()
        gathered(model)
        torch.distributed.barrier()
        seen.append(model.stats()["gathers_between_hosts"])
        return seen[-1] - seen[-2]

    step(model, optimizer, rank)
    assert between_hosts() == 0
    lent = model.state_dict()
    assert between_hosts() == units
    step(model, optimizer, rank)
    between_hosts()
    assert between_hosts() == units  # views are lent as before
    del lent
    assert between_hosts() == units
    step(model, optimizer, rank)
    between_hosts()
    assert between_hosts() == 0


def test_copies_are_counted_as_shards(on_hosts, mesh, rank, world):
    plain, _ = on_hosts("in turn", lambda: MLP(57), mesh, host_copies=False)
    model, _ = on_hosts("in turn", lambda: MLP(57), mesh)
    own = plain.stats()["bytes_shard"]
    here = len(range(rank % 2, world, 2))
    elsewhere = world - here
    place = rank // 2
    kept = len([r for r in range(elsewhere) if r % here == place])
    assert model.stats()["bytes_shard"] == own * (1 + kept)
    assert on_hosts(None, lambda: MLP(57), mesh)[0].stats()["bytes_shard"] == own


def test_ranks_may_begin_with_values_of_their_own(on_hosts, mesh, rank):
    """Each rank owns its part of what it came with, and other ranks do not know it."""
    runs = []
    for hosts in ("in turn", None):
        torch.manual_seed(3)
        model = MLP(57)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
        runs.append(on_hosts(hosts, lambda made=model: made, mesh, sync_module_states=False))
    for turn in range(3):
        torch.distributed.barrier()
        assert_same(runs[0][0], runs[1][0], f"after {turn} steps")
        torch.distributed.barrier()
        for model, optimizer in runs:
            step(model, optimizer, rank)


@pytest.mark.parametrize("optimizer", ["AdamW", "wrap"])
def test_masters_of_fp32_parameters_are_the_parts(mesh, rank, optimizer, monkeypatch, shared_path):
    """What writes to masters writes to parts: a loaded state dict, a checkpoint, an optimizer."""
    runs = []
    for number in (rank, 0):
        monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", str(1 + number))
        torch.manual_seed(3)
        model = zero_ext.shard(MLP(7), 3, mesh=mesh, host_copies=True, bucket_mb=1e-3)
        runs.append((model, OPTIMIZERS[optimizer](model)))
    for k, (model, _) in enumerate(runs):
        zero_ext.checkpoint.save(shared_path / f"{k}", model)
    saved = [copy.deepcopy(model.state_dict()) for model, _ in runs]
    for turn in range(8):
        for k, (model, stepper) in enumerate(runs):
            if turn == 2:
                model.load_state_dict(saved[k])
            elif turn == 5:
                zero_ext.checkpoint.load(shared_path / f"{k}", model)
            else:
                mean_square(model, rank_data((4, 5), rank)).backward()
                stepper.step()
                stepper.zero_grad()
        data = rank_data((4, 5), 0)
        with torch.no_grad():
            assert_bits(runs[0][0](data), runs[1][0](data), f"turn {turn}")


def test_a_lent_master_may_be_written_to(mesh, rank, world, monkeypatch):
    """As wrapped optimizers do; the master of an fp32 parameter is its part."""
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", str(1 + rank))
    model = zero_ext.shard(nn.Linear(1083, 1, bias=False), 3, mesh=mesh, host_copies=True)
    handle, index = find(model.weight)
    handle.engine.master_slice(index).fill_(1 + rank)
    torch.distributed.barrier()
    ones = torch.ones(1, 1083)
    with torch.no_grad():
        total = model(ones).item()
    bounds = handle.engine.bounds(index)
    assert total == sum((1 + r) * (bounds[r + 1] - bounds[r]) for r in range(world))
    torch.distributed.barrier()


def test_frozen_units_have_copies_from_the_start(on_hosts, mesh, rank):
    def make():
        model = MLP(57, layers=3)
        model.layers[1].requires_grad_(False)
        return model

    runs = [on_hosts(hosts, make, mesh) for hosts in ("each alone", None)]
    for _ in range(2):
        for model, optimizer in runs:
            step(model, optimizer, rank)
    model = runs[0][0]
    assert model.stats()["gathers_between_hosts"] == 0
    for each, _ in runs:
        each.layers[1].requires_grad_(True)
    for each, before in runs:
        before.retire()
        optimizer = zero_ext.optim.AdamW(each.parameters(), lr=1e-2)
        step(each, optimizer, rank)
        step(each, optimizer, rank)
    assert_same(runs[0][0], runs[1][0], "unfrozen")
