"""summon_full_params, unshard and reshard; and what a released parameter says to whom uses it."""

import time

import pytest
import torch
from harness import MLP, mean_square, needs_one_dimension, rank_batches, rank_data
from reference import OneProcess
from setups import MLP_INPUT, assert_same_gradients, assert_same_values, full_master, train_batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

import zero_ext
from zero_ext.engine.registry import find

SEPARATE = 1e-6  # MiB: every module is a unit
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
POLICIES = pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])


def sharded(mesh, model=None, **kwargs) -> nn.Module:
    kwargs = {"bucket_mb": SEPARATE, **kwargs}
    return zero_ext.shard(MLP(13) if model is None else model, 3, mesh=mesh, **kwargs)


def values_of(model) -> dict[str, torch.Tensor]:
    """Copies, of a plain or a gathered model."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def read(model) -> dict[str, torch.Tensor]:
    """What the ranks hold between them, without gathering the model."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in model.state_dict().items()
    }


def assert_equal(actual: dict, expected: dict) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def all_bytes(model) -> int:
    """Every unit's full parameters."""
    handle, _ = find(next(model.parameters()))
    engine = handle.engine
    itemsize = next(model.parameters()).element_size()
    return sum(engine.padded_numel(u) * itemsize for u in range(engine.stats()["units"]))


@torch.no_grad()
def write(model, by: float = 2.0) -> None:
    """The same on every rank, another value in each element."""
    for p in model.parameters():
        p.add_(torch.arange(p.numel()).view(p.shape) * by)


# Reading


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_inside_all_values_are_there_and_afterwards_the_memory_is_not(anywhere, mode):
    model = sharded(anywhere)
    before = model.stats()["bytes_held"]
    with mode(), model.summon_full_params():
        assert_equal(values_of(model), values_of(MLP(13)))
        assert model.stats()["bytes_full"] == all_bytes(model)
    assert model.stats()["bytes_held"] == before
    assert_equal(read(model), values_of(MLP(13)))


def test_a_model_that_was_trained_shows_its_new_values(anywhere, rank, world):
    model = sharded(anywhere)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    reference = OneProcess(MLP(13), lambda params: torch.optim.AdamW(params, lr=0.1))
    for step in range(3):
        batches = rank_batches(MLP_INPUT, world, step)
        mean_square(model, batches[0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.train(batches)
        with model.summon_full_params(writeback=False):
            assert_same_values(model, reference.model)


# Writing


@POLICIES
@pytest.mark.parametrize("writeback", [True, False])
def test_writes_are_kept_or_forgotten(anywhere, policy, writeback):
    model, plain = sharded(anywhere, mp_policy=policy), MLP(13)
    if policy is not None:
        plain.to(torch.bfloat16)
    with model.summon_full_params(writeback=writeback):
        write(model)
    if writeback:
        write(plain)
    assert_equal(read(model), values_of(plain))
    with model.summon_full_params():
        assert_equal(values_of(model), values_of(plain))


WAYS = {
    "in place": lambda p, new: p.copy_(new),
    "through .data": lambda p, new: p.data.copy_(new),
    "another .data": lambda p, new: setattr(p, "data", new.clone()),
    "one element": lambda p, new: p.view(-1)[0].fill_(3),
}


@POLICIES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("writeback", [True, False])
def test_the_next_step_starts_from_what_was_written(anywhere, rank, world, policy, way, writeback):
    """Masters follow, moments stay: as one process that writes to its fp32 values."""
    dtype = torch.float32 if policy is None else torch.bfloat16
    model = sharded(anywhere, mp_policy=policy)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    reference = OneProcess(MLP(13, dtype=torch.float32), lambda p: torch.optim.AdamW(p, lr=0.1))
    reference.model.to(dtype)

    def new_value(p):
        return torch.linspace(-1, 1, p.numel()).view(p.shape).to(dtype)

    for step in range(3):
        if step == 1:
            with torch.no_grad(), model.summon_full_params(writeback=writeback):
                for p in model.parameters():
                    WAYS[way](p, new_value(p))
            if writeback:
                rewrite(reference, WAYS[way], new_value)
            expected = values_of(reference.model)
            for name, value in read(model).items():
                torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-5)
        batches = rank_batches(MLP_INPUT, world, step, dtype=dtype)
        mean_square(model, batches[0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.train(batches)
    # Of bf16 forwards, whose roundings the small differences of the masters shift.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if policy is None else {"rtol": 0.05, "atol": 0.02}
    for name, p in model.named_parameters():
        torch.testing.assert_close(full_master(p), reference.masters[name], **tolerance)


@torch.no_grad()
def rewrite(reference: OneProcess, way, new_value) -> None:
    """The same writes in one process; a master changes only where its parameter did."""
    for name, p in reference.parameters.items():
        before = p.detach().clone()
        way(p, new_value(p))
        changed = p != before
        reference.masters[name][changed] = p.float()[changed]


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_of_different_writes_each_ranks_own_part_stays(mesh, rank, world):
    needs_one_dimension()
    model = sharded(mesh)
    with torch.no_grad(), model.summon_full_params():
        for p in model.parameters():
            p.fill_(rank + 1)
    for name, value in read(model).items():
        handle, i = find(dict(model.named_parameters())[name])
        bounds = handle.engine.bounds(i)
        expected = torch.cat(
            [torch.full((bounds[r + 1] - bounds[r],), r + 1.0) for r in range(world)]
        )
        assert torch.equal(value.flatten(), expected)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_rank_that_comes_later_reads_what_was_there_before(mesh, rank, world):
    """The others must not give it what they have written meanwhile."""
    model = sharded(mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # from now on there are offers in reserve
        mean_square(model, rank_data(MLP_INPUT, rank)).backward()
        optimizer.step()
    with torch.no_grad():
        model(rank_data(MLP_INPUT, rank))
    before = read(model)
    if rank == world - 1:
        time.sleep(0.3)
    with model.summon_full_params():
        assert_equal(values_of(model), before)
        write(model)
        expected = values_of(model)
    assert_equal(read(model), expected)


def test_frozen_parameters_are_read_and_written_too(anywhere):
    model, plain = MLP(13), MLP(13)
    model.layers[1].requires_grad_(False)
    sharded(anywhere, model)
    with model.summon_full_params():
        assert_equal(values_of(model), values_of(plain))
        write(model)
    write(plain)
    assert_equal(read(model), values_of(plain))


@pytest.mark.parametrize("writeback", [True, False])
def test_an_exception_inside_ends_it_as_its_end_does(anywhere, rank, writeback):
    model, plain = sharded(anywhere), MLP(13)
    before = model.stats()["bytes_held"]
    with pytest.raises(KeyError, match="user"), model.summon_full_params(writeback=writeback):
        write(model)
        raise KeyError("user")
    assert model.stats()["bytes_held"] == before
    if writeback:
        write(plain)
    assert_equal(read(model), values_of(plain))
    mean_square(model, train_batch(rank)).backward()


# One inside another


def test_an_inner_one_leaves_the_parameters_to_the_outer_one(anywhere):
    model, plain = sharded(anywhere), MLP(13)
    with model.summon_full_params():
        with model.summon_full_params():
            write(model)
        write(plain)
        assert_equal(values_of(model), values_of(plain))
        write(model)
    write(plain)
    assert_equal(read(model), values_of(plain))


def test_what_an_inner_one_forgets_is_its_own(anywhere):
    model, plain = sharded(anywhere), MLP(13)
    with model.summon_full_params():
        write(model)
        with model.summon_full_params(writeback=False):
            write(model, by=5)
        write(plain)
        assert_equal(values_of(model), values_of(plain))
    assert_equal(read(model), values_of(plain))


def test_an_outer_one_forgets_what_inner_ones_would_keep(anywhere):
    model = sharded(anywhere)
    with model.summon_full_params(writeback=False):
        for writeback in (True, False):
            with model.summon_full_params(writeback=writeback):
                write(model)
        model.load_state_dict({n: torch.zeros_like(v) for n, v in values_of(model).items()})
        assert all((p == 0).all() for p in model.parameters())
    assert_equal(read(model), values_of(MLP(13)))


def test_what_would_be_forgotten_by_half_is_refused(anywhere, tmp_path):
    """The masters of half-precision parameters are in no gathered unit."""
    model = sharded(anywhere)
    parameter = next(model.parameters())
    with model.summon_full_params(writeback=False):
        with pytest.raises(RuntimeError, match=r"set_full_param\(\) inside .*writeback=False"):
            zero_ext.set_full_param(parameter, torch.zeros(parameter.shape))
        with pytest.raises(RuntimeError, match=r"load\(\) of a checkpoint inside"):
            zero_ext.checkpoint.load(tmp_path, model)
    zero_ext.set_full_param(parameter, torch.zeros(parameter.shape))
    assert (zero_ext.full_tensor(parameter) == 0).all()


def test_load_state_dict_inside_leaves_the_parameters_gathered(anywhere):
    model, plain = sharded(anywhere), MLP(13)
    write(plain)
    with model.summon_full_params():
        model.load_state_dict(plain.state_dict())
        assert_equal(values_of(model), values_of(plain))
    assert_equal(read(model), values_of(plain))


# unshard and reshard


def test_unsharded_parameters_stay_until_resharded(anywhere, rank):
    model, plain = sharded(anywhere), MLP(13)
    before = model.stats()
    model.unshard()
    model.unshard()
    gathers = model.stats()["gathers"]
    mean_square(model, train_batch(rank)).backward()
    assert model.stats()["gathers"] == gathers
    model.zero_grad()
    with model.summon_full_params():
        write(model)
    write(plain)
    assert_equal(values_of(model), values_of(plain))
    write(model)
    write(plain)
    model.reshard()
    held, before = (each["bytes_held"] - each["bytes_bucket"] for each in (model.stats(), before))
    assert held == before
    assert_equal(read(model), values_of(plain))
    model.reshard()
    assert_equal(read(model), values_of(plain))


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_step_ends_unshard(mesh, rank):
    model = sharded(mesh)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    model.unshard()
    mean_square(model, train_batch(rank)).backward()
    assert model.stats()["bytes_full"] == all_bytes(model)
    optimizer.step()
    assert model.stats()["bytes_full"] == 0


@pytest.mark.parametrize("writeback", [True, False])
def test_reading_between_forward_and_backward_disturbs_neither(anywhere, rank, world, writeback):
    model, plain = sharded(anywhere), MLP(13)
    for _ in range(2):
        loss = mean_square(model, train_batch(rank))
        with model.summon_full_params(writeback=writeback):
            assert_equal(values_of(model), values_of(plain))
        loss.backward()
    for _ in range(2):
        for r in range(world):
            (mean_square(plain, train_batch(r)) / world).backward()
    assert_same_gradients(model, plain)


# Released parameters

RELEASED = r"zero_ext \[rank \d, unit 'layers.0.weight … layers.0.bias'\]: .*released"
READS = {
    "sum": lambda p: p.sum(),
    "clone": lambda p: p.clone(),
    "repr": repr,
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().cpu().numpy(),
    "norm": lambda p: p.norm(),
    "equal": lambda p: torch.equal(p, torch.ones_like(p)),
    "linear": lambda p: functional.linear(torch.ones(2, 5), p),
    "data_ptr": lambda p: p.data_ptr(),
    "to": lambda p: p.to(torch.float64),
}
WRITES = {
    "fill_": lambda p: p.fill_(0),
    "mul_": lambda p: p.mul_(2),
    "data": lambda p: p.data.add_(1),
    "copy_": lambda p: p.copy_(torch.zeros(13, 5)),
    "index": lambda p: p.__setitem__((0, 0), 1.0),
    "init": nn.init.xavier_uniform_,
}


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("use", READS)
def test_a_read_of_a_released_parameter_names_its_unit(mesh, use):
    model = sharded(mesh)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(RuntimeError, match=RELEASED):
            READS[use](model.layers[0].weight)
    assert model.stats()["bytes_full"] == 0


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("use", WRITES)
def test_a_write_to_a_released_parameter_names_its_unit(mesh, use):
    model = sharded(mesh)
    with torch.no_grad(), pytest.raises(RuntimeError, match=RELEASED):
        WRITES[use](model.layers[0].weight)
    assert_equal(read(model), values_of(MLP(13)))


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_shape_dtype_and_what_else_needs_no_values_can_be_asked_for(mesh):
    model, plain = sharded(mesh), MLP(13)
    p, e = model.layers[0].weight, plain.layers[0].weight
    assert (p.shape, p.dtype, p.device, p.stride()) == (e.shape, e.dtype, e.device, e.stride())
    assert (p.numel(), p.nelement(), p.dim(), len(p)) == (65, 65, 2, 13)
    assert (p.requires_grad, p.is_leaf, p.grad, p.is_contiguous()) == (True, True, None, True)
    assert torch.empty_like(p).shape == p.shape
    assert p.detach().shape == p.data.t().t().shape == p.shape
    assert repr(model) == repr(plain)
    assert p in set(model.parameters())


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_parameter_of_another_unit_is_refused_by_name_in_a_forward(mesh, rank):
    class Borrows(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 5)
            self.b = nn.Linear(5, 5)

        def forward(self, x):
            return functional.linear(self.b(x), self.a.weight)

    model = sharded(mesh, Borrows(), units=nn.Linear)
    x = rank_data((2, 5), rank)
    with pytest.raises(RuntimeError, match=r"the forward of Borrows reads .* another unit"):
        model(x)
    model.reshard()
    # In one unit it is there.
    together = sharded(mesh, Borrows(), units=lambda name, module: name == "b")
    plain = Borrows()
    with torch.no_grad():
        for p, value in zip(plain.parameters(), read(together).values(), strict=True):
            p.copy_(value)
    assert torch.equal(together(x), plain(x))
    together.reshard()
