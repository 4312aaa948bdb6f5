"""Models built on the meta device: initialised unit by unit, never whole on one rank."""

import pytest
import torch
from harness import DIRECT, MLP, Tied, gather_objects, mean_square, rank_batches
from memory_formula import peer_bytes, ranges_of
from reference import OneProcess
from setups import MLP_INPUT, assert_same_values, train_batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef

import zero_ext
from zero_ext.engine.registry import find

SEPARATE = 1e-6  # MiB: every module is a unit


def on_meta(model_fn):
    with torch.device("meta"):
        return model_fn()


class Marked(nn.Linear):
    """Its values say which rank initialised it, how often, and which of its parameters they are."""

    def __init__(self, *args, rank: int = 0, **kwargs):
        self.rank = rank
        self.times = 0
        super().__init__(*args, **kwargs)

    def reset_parameters(self):
        self.times += not self.weight.is_meta
        with torch.no_grad():
            self.weight.copy_(
                torch.arange(self.weight.numel()).view_as(self.weight) + 1000 * self.rank
            )
            if self.bias is not None:
                self.bias.fill_(1000 * self.rank + 0.5)


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    with model.summon_full_params():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_values(model: nn.Module, mesh) -> dict[str, torch.Tensor]:
    """All ranks' values, which must be the same."""
    values = whole_values(model)
    for other in gather_objects(values, mesh.get_group()) if mesh is not None else []:
        assert all(torch.equal(other[name], values[name]) for name in values)
    return values


# Values


def test_a_model_may_be_sharded_inside_the_meta_device(anywhere):
    with torch.device("meta"):
        model = zero_ext.shard(nn.Linear(7, 13), 3, mesh=anywhere)
    assert all(p.device.type != "meta" for p in model.parameters())


@pytest.mark.parametrize("bucket_mb", [SEPARATE, 25.0])
def test_every_rank_has_rank_0s_initialisation(anywhere, rank, world, bucket_mb):
    model = on_meta(lambda: nn.ModuleList(Marked(7, 13, rank=rank) for _ in range(3)))
    zero_ext.shard(model, 3, mesh=anywhere, bucket_mb=bucket_mb)
    for name, value in whole_values(model).items():
        weight = torch.arange(7 * 13.0).view(13, 7)
        assert torch.equal(value, weight if name.endswith("weight") else torch.full((13,), 0.5))
    assert [layer.times for layer in model] == [1, 1, 1]
    assert {p.device for p in model.parameters()} == {torch.zeros(0).device}


def test_ranks_keep_their_own_initialisation_if_they_are_told_to(anywhere, rank, world):
    """sync_module_states=False: each range is its owner's."""
    model = on_meta(lambda: nn.ModuleList(Marked(8, 16, bias=False, rank=rank) for _ in range(2)))
    zero_ext.shard(model, 3, mesh=anywhere, bucket_mb=SEPARATE, sync_module_states=False)
    for value in whole_values(model).values():
        handle, i = find(model[0].weight)
        bounds = handle.engine.bounds(i)
        flat = torch.arange(128.0)
        for owner in range(world):
            flat[bounds[owner] : bounds[owner + 1]] += 1000 * owner
        assert torch.equal(value.flatten(), flat)


def test_tied_parameters_stay_tied(anywhere):
    model = on_meta(Tied)
    zero_ext.shard(model, 3, mesh=anywhere, units=nn.Linear)
    assert model.head.weight is model.embedding.weight
    assert find(model.head.weight) is not None
    values = same_values(model, anywhere)
    assert set(values) == {"embedding.weight", "middle.weight", "middle.bias"}
    assert not any(value.isnan().any() for value in values.values())
    model(torch.arange(11)).sum().backward()
    assert model.head.weight.grad is not None


def test_a_module_whose_parameters_lie_in_two_units_is_initialised_in_two_parts(anywhere):
    """The biases are cut and released before the tied weight gets its values."""
    layers = on_meta(lambda: nn.ModuleList(Marked(7, 7) for _ in range(2)))
    layers[1].weight = layers[0].weight
    zero_ext.shard(layers, 3, mesh=anywhere, bucket_mb=SEPARATE)
    assert layers[1].weight is layers[0].weight
    values = whole_values(layers)
    assert torch.equal(values["0.weight"], torch.arange(49.0).view(7, 7))
    assert torch.equal(values["0.bias"], torch.full((7,), 0.5))
    assert torch.equal(values["1.bias"], torch.full((7,), 0.5))


def test_values_that_exist_are_not_initialised_again(anywhere):
    """A model may be on the meta device in part: a loaded weight, say, beside a new bias."""
    layers = on_meta(lambda: nn.ModuleList(Marked(7, 7) for _ in range(2)))
    layers[0].weight = nn.Parameter(torch.full((7, 7), 3.0))
    zero_ext.shard(layers, 3, mesh=anywhere, bucket_mb=SEPARATE)
    values = whole_values(layers)
    assert torch.equal(values["0.weight"], torch.full((7, 7), 3.0))
    assert torch.equal(values["0.bias"], torch.full((7,), 0.5))


def test_dtypes_of_model_and_policy(anywhere):
    """The masters have the values before their rounding."""
    thirds = 1 / 3

    def fill(module):
        for p in module.parameters(recurse=False):
            p.fill_(thirds)

    model = on_meta(lambda: MLP(13))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    zero_ext.shard(model, 3, mesh=anywhere, mp_policy=policy, param_init_fn=fill)
    for value in whole_values(model).values():
        assert torch.equal(value, torch.full_like(value, thirds, dtype=torch.bfloat16))
    for p in model.parameters():
        handle, i = find(p)
        master = handle.engine.master_slice(i)
        assert torch.equal(master, torch.full_like(master, thirds, dtype=torch.float32))


# What else a model has


class WithBuffers(nn.Module):
    def __init__(self, width: int = 5):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.norm = nn.BatchNorm1d(width)
        self.table = Table(width)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) + self.table.values


class Table(nn.Module):
    """A buffer and no parameter."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("values", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.values.copy_(torch.arange(len(self.values)) + (0.0 if self.values.is_meta else RANK))


RANK = 0


def test_buffers_get_memory_and_rank_0s_values(anywhere, rank, monkeypatch):
    monkeypatch.setitem(globals(), "RANK", float(rank))
    model = zero_ext.shard(on_meta(WithBuffers), 3, mesh=anywhere, bucket_mb=SEPARATE)
    assert torch.equal(model.table.values, torch.arange(5.0))
    assert torch.equal(model.norm.running_mean, torch.zeros(5))
    assert torch.equal(model.norm.running_var, torch.ones(5))
    assert model.norm.num_batches_tracked.item() == 0
    assert "table.values" not in model.state_dict()
    assert model(train_batch(rank)).shape == MLP_INPUT
    same_values(model, anywhere)  # other ranks may still be inside


class Tagged(nn.Parameter):
    pass


def test_what_parameters_are_and_carry_stays(anywhere):
    model = on_meta(lambda: MLP(7))
    model.layers[0].weight.requires_grad_(False)
    model.layers[1].weight = Tagged(torch.empty(7, 7, device="meta"))
    model.layers[1].weight.tag = "kept"
    model.layers[2].weight = nn.Parameter(torch.empty(5, 7, device="meta", dtype=torch.bfloat16))
    model.layers[2].bias = nn.Parameter(torch.empty(5, device="meta", dtype=torch.bfloat16))
    zero_ext.shard(model, 3, mesh=anywhere, bucket_mb=SEPARATE)
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True, True, True]
    assert type(model.layers[1].weight) is Tagged and model.layers[1].weight.tag == "kept"
    assert type(model.layers[0].weight) is nn.Parameter
    assert model.layers[2].weight.dtype == torch.bfloat16
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in MLP(7).named_parameters()]


def test_param_init_fn_sees_each_module_with_meta_tensors_once(anywhere):
    seen = []

    def init(module):
        seen.append(type(module))
        assert not any(t.is_meta for t in [*module.parameters(False), *module.buffers(False)])
        for p in module.parameters(recurse=False):
            p.fill_(2.0)
        for b in module.buffers(recurse=False):
            b.fill_(3)

    model = zero_ext.shard(
        on_meta(WithBuffers), 3, mesh=anywhere, bucket_mb=SEPARATE, param_init_fn=init
    )
    assert sorted(t.__name__ for t in seen) == ["BatchNorm1d", "Linear", "Linear", "Table"]
    assert all((value == 2).all() for value in whole_values(model).values())
    assert all((buffer == 3).all() for buffer in model.buffers())


def test_ignored_parameters_stay_on_the_meta_device(anywhere):
    model = on_meta(lambda: MLP(7))
    ignored = model.layers[0].weight
    zero_ext.shard(model, 3, mesh=anywhere, ignored_params=[ignored], units=nn.Linear)
    assert model.layers[0].weight is ignored and ignored.is_meta
    assert all(p is ignored or not p.is_meta for p in model.parameters())


# Refusals


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.scale = nn.Parameter(torch.ones(3))


def test_a_module_that_cannot_be_initialised_is_refused_by_name(anywhere):
    model = on_meta(lambda: nn.ModuleDict({"part": NoReset()}))
    before = dict(model.named_parameters())
    with pytest.raises(
        ValueError, match=r"'part' \(NoReset\) is on the meta device.*param_init_fn"
    ):
        zero_ext.shard(model, 3, mesh=anywhere)
    assert all(p is before[name] and p.is_meta for name, p in model.named_parameters())
    assert not hasattr(model, "summon_full_params")
    with pytest.raises(ValueError, match=r"'NoReset' \(NoReset\)"):
        zero_ext.shard(model["part"], 3, mesh=anywhere)
    zero_ext.shard(model, 3, mesh=anywhere, param_init_fn=lambda module: None)


def test_a_failure_after_the_units_were_made_leaves_no_hooks(anywhere):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.empty(3))

        def reset_parameters(self):
            raise ArithmeticError("no table")

    model = on_meta(lambda: nn.Sequential(nn.Linear(7, 7), Fails()))
    with pytest.raises(ArithmeticError, match="no table"):
        zero_ext.shard(model, 3, mesh=anywhere, bucket_mb=SEPARATE)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert find(model[0].weight) is None


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_that_keep_whole_parameters_refuse_the_meta_device(anywhere, stage):
    with pytest.raises(TypeError, match=r"'layers.0.weight' is on the meta device.*stage 3"):
        zero_ext.shard(on_meta(MLP), stage, mesh=anywhere)


# Training


@pytest.mark.parametrize("bucket_mb", [SEPARATE, 25.0])
def test_three_steps_equal_a_plain_models_from_the_same_values(anywhere, rank, world, bucket_mb):
    model = zero_ext.shard(on_meta(lambda: MLP(13)), 3, mesh=anywhere, bucket_mb=bucket_mb)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    plain = MLP(13)
    plain.load_state_dict(whole_values(model))
    reference = OneProcess(plain, lambda params: torch.optim.AdamW(params, lr=0.1))
    for step in range(3):
        batches = rank_batches(MLP_INPUT, world, step)
        mean_square(model, batches[0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.train(batches)
    with model.summon_full_params():
        assert_same_values(model, plain)


# Memory


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("built", ["on meta", "with values"])
def test_the_peak_while_wrapping_is_the_shards_and_one_unit(mesh, world, param_dtype, built):
    """What is kept of the units before, and one whole in the dtype that it came in.

    As the library counts: the memory that the model itself brings, which here is one unit more
    (meta) or everything, is not ours. The largest unit is the second of three.
    """
    model = on_meta(lambda: MLP(61)) if built == "on meta" else MLP(61)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=SEPARATE, mp_policy=policy)

    kept = peak = 0
    units = [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in (2, 1, 0)]
    # Which has no gradient yet, and no shard beside a master unless other devices read it.
    on_device = mesh.device_type != "cpu"
    for share, ranges, itemsize in ranges_of(model, units, world, 3):
        master = 4 if itemsize == 2 else 0
        kept += share * (master + (0 if on_device else 4))
        kept += 0 if on_device and master and not DIRECT else share * itemsize
        peak = max(peak, kept + share * ranges * 4)
    # What other devices read is made while the last unit is whole.
    kept += peer_bytes(model, units, world, 3)
    peak = max(peak, kept + share * ranges * 4)
    stats = model.stats()
    assert (stats["bytes_held"], stats["bytes_full"]) == (kept, 0)
    assert stats["bytes_peak"] == peak


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_model_on_the_meta_device_is_never_whole_in_memory(mesh, world):
    """Each parameter's own memory is gone when the next unit gets some."""
    alive = []
    seen = []

    class Watched(nn.Linear):
        def reset_parameters(self):
            super().reset_parameters()
            if not self.weight.is_meta:
                alive.append(StorageWeakRef(self.weight.untyped_storage()))
                seen.append(sum(not reference.expired() for reference in alive))

    model = on_meta(lambda: nn.ModuleList(Watched(13, 13) for _ in range(5)))
    zero_ext.shard(model, 3, mesh=mesh, bucket_mb=SEPARATE)
    assert seen == [1] * 5
    assert all(reference.expired() for reference in alive)
