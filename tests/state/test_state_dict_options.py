"""Every field of torch's StateDictOptions, with each stage and over one and two dimensions.

Expected are the results of torch's functions for a plain module and a plain optimizer that have the
same values. docs/fsdp2.md has the table.
"""

import copy
import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parallel_models import Transformer
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import zero_ext

pytestmark = [pytest.mark.dist, pytest.mark.host, pytest.mark.world(min=2)]

PAGE = Path(__file__).parents[2] / "docs/fsdp2.md"
FROZEN = "layers.0.down.weight"
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
KINDS = pytest.mark.parametrize("kind", ["plain", "tp", "hybrid"])
FULL, RANK_0 = {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}
FLAT = {"flatten_optimizer_state_dict": True}
BROADCAST = {"full_state_dict": True, "broadcast_from_rank0": True}
OPTIONS: list[dict[str, bool]] = [
    {},
    FULL,
    {"cpu_offload": True},
    RANK_0,
    {"ignore_frozen_params": True},
    {"keep_submodule_prefixes": False},
    {"strict": False},
    BROADCAST,
    FLAT,
    FLAT | FULL,
    FLAT | RANK_0,
]


def random_values(model: nn.Module, seed: int) -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    names = ("parameter", "exp_avg", "exp_avg_sq")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return {
        name: {each: torch.rand(shape, generator=draw) for each in names}
        for name, shape in shapes.items()
    }


def untrained(seed: int = 0) -> nn.Module:
    model = Transformer(layers=1)
    model.get_parameter(FROZEN).requires_grad_(False)
    model.register_buffer("count", torch.tensor([3.0 + seed]))
    return model


def plain(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = untrained(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for name, values in random_values(model, seed).items():
        parameter = model.get_parameter(name)
        parameter.data.copy_(values.pop("parameter"))
        if parameter.requires_grad:
            optimizer.state[parameter] = {"step": torch.tensor(float(seed)), **values}
    return model, optimizer


def parallel(model: nn.Module, mesh) -> nn.Module:
    """Cuts rows evenly, as FSDP2's loading of whole states needs them."""
    columns = dict.fromkeys([f"layers.0.attention.{name}" for name in "qkv"], ColwiseParallel())
    rows = dict.fromkeys(["layers.0.attention.o", "layers.0.down"], RowwiseParallel())
    return parallelize_module(model, mesh, {**columns, **rows})


def sharded(kind: str, stage: int, world: int, seed: int):
    model = untrained(seed)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    if kind == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallel(model, mesh["tp"])
        mesh = mesh["dp"]
    elif kind == "plain":
        mesh = None
    zero_ext.shard(model, stage, mesh=mesh, units=nn.Linear)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    fill(model, optimizer, seed)
    return model, optimizer


def fill(model: nn.Module, optimizer, seed: int) -> None:
    for name, values in random_values(untrained(), seed).items():
        parameter = model.get_parameter(name)
        zero_ext.set_full_param(parameter, values.pop("parameter"))
        if parameter.requires_grad:
            for key, value in {"step": float(seed), **values}.items():
                zero_ext.set_full_state(optimizer, parameter, key, value)


def get(what: str, model: nn.Module, optimizer, options: StateDictOptions):
    if what == "model":
        return torchs.get_model_state_dict(model, options=options)
    return torchs.get_optimizer_state_dict(model, optimizer, options=options)


def put(what: str, model: nn.Module, optimizer, state, options: StateDictOptions) -> None:
    if what == "model":
        torchs.set_model_state_dict(model, state, options=options)
    else:
        torchs.set_optimizer_state_dict(model, optimizer, state, options=options)


def assert_same(found, expected, *, whole: bool = False) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value, whole=whole)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, whole=whole)
    elif isinstance(expected, Tensor):
        assert not (whole and isinstance(found, DTensor)) and found.shape == expected.shape
        assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, expected)
    else:
        assert found == expected


def assert_values(model: nn.Module, optimizer, seed: int, what: str) -> None:
    """What was set has the values of ``seed``."""
    for name, values in random_values(untrained(), seed).items():
        parameter = model.get_parameter(name)
        if what == "model":
            assert torch.equal(zero_ext.full_tensor(parameter), values["parameter"]), name
        elif parameter.requires_grad:
            for key in ("exp_avg", "exp_avg_sq"):
                found = zero_ext.full_state(optimizer, parameter, key)
                assert torch.equal(found, values[key]), (name, key)
            assert zero_ext.full_state(optimizer, parameter, "step") == seed
    if what == "model":
        assert model.count == 3 + seed


def test_the_page_names_every_field():
    named = re.findall(r"^\| `(\w+)` \|", PAGE.read_text().split("## StateDictOptions")[1], re.M)
    assert named == [field.name for field in dataclasses.fields(StateDictOptions)]


def needs_four_ranks(kind: str, world: int) -> None:
    if world % 2 or (kind == "hybrid" and world < 4):
        pytest.skip("two dimensions")


@KINDS
@STAGES
def test_states_are_those_of_a_plain_model(world, no_stale_meshes, kind, stage):
    needs_four_ranks(kind, world)
    own, expected = sharded(kind, stage, world, 1), plain(1)
    for fields in OPTIONS:
        options = StateDictOptions(**fields)
        for what in ("model", "optimizer"):
            found, wanted = get(what, *own, options), get(what, *expected, options)
            assert_same(found, wanted, whole=options.full_state_dict)
        if not fields:
            both = torchs.get_state_dict(*own), torchs.get_state_dict(*expected)
            assert_same(list(both[0]), list(both[1]))
    with pytest.raises(ValueError, match="full_state_dict must be True"):
        torchs.get_state_dict(*own, options=StateDictOptions(broadcast_from_rank0=True))


@KINDS
@STAGES
def test_states_are_set(world, rank, no_stale_meshes, kind, stage):
    """Its own parts, and whole ones from each rank or from rank 0."""
    needs_four_ranks(kind, world)
    target, source, whole = sharded(kind, stage, world, 1), sharded(kind, stage, world, 2), plain(3)
    cut = kind == "tp" and world > 2  # by both dimensions
    sharded_states = kind != "tp" or cut
    ways = [
        (source, 2, {}, {}),
        (whole, 3, {}, FULL),
        (source, 2, {"cpu_offload": True}, {"cpu_offload": True}),
        (whole, 3, {}, RANK_0),
        (source, 2, FLAT, FLAT),
    ]
    for what in ("model", "optimizer"):
        for from_, seed, got, fields in ways:
            state = get(what, *from_, StateDictOptions(**got))
            put(what, *target, state, StateDictOptions(**fields))
            assert_values(*target, seed, what)
        state = get(what, *whole, StateDictOptions(ignore_frozen_params=True))
        put(what, *target, state, StateDictOptions(strict=False, **FULL))
        if what == "model":
            frozen = zero_ext.full_tensor(target[0].get_parameter(FROZEN))
            assert torch.equal(frozen, random_values(untrained(), 2)[FROZEN]["parameter"])
        put(what, *target, get(what, *source, StateDictOptions()), StateDictOptions())
        state = get(what, *whole, StateDictOptions()) if rank == 0 else {}
        error = None
        if what == "optimizer" and stage > 0 and sharded_states:
            error = NotImplementedError, "broadcast_from_rank0=False"
        elif what == "model" and stage == 3 and cut:
            error = RuntimeError, "parameters that stage 3 has released"
        if error is not None:
            with pytest.raises(error[0], match=error[1]):
                put(what, *target, state, StateDictOptions(**BROADCAST))
        else:
            put(what, *target, state, StateDictOptions(**BROADCAST))
            assert_values(*target, 3, what)


@STAGES
def test_what_is_missing_is_torchs_error_unless_it_may(world, no_stale_meshes, stage):
    model, optimizer = sharded("plain", stage, world, 1)
    state, states = (get(what, *plain(3), StateDictOptions()) for what in ("model", "optimizer"))
    del state["norm.weight"], states["state"]["norm.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"norm.weight"'):
        put("model", model, optimizer, dict(state), StateDictOptions())
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'norm.weight'"):
        put("optimizer", model, optimizer, copy.deepcopy(states), StateDictOptions())
    fill(model, optimizer, 1)
    before = random_values(untrained(), 1)["norm.weight"]
    found = torchs.set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    assert found.missing_keys == ["norm.weight"]
    assert torch.equal(zero_ext.full_tensor(model.norm.weight), before["parameter"])
    full = StateDictOptions(strict=False, full_state_dict=True)
    put("optimizer", model, optimizer, copy.deepcopy(states), full)  # keeps what it has
    momentum = zero_ext.full_state(optimizer, model.norm.weight, "exp_avg")
    assert torch.equal(momentum, before["exp_avg"])
    put("optimizer", model, optimizer, states, StateDictOptions(strict=False))  # begins anew
    assert not zero_ext.full_state(optimizer, model.norm.weight, "exp_avg").any()


def test_a_state_on_rank_0_alone_is_named(world, rank, no_stale_meshes):
    """As torch's functions return it with cpu_offload. FSDP2 would wait for the other ranks."""
    model, optimizer = sharded("plain", 0, world, 1)
    whole = plain(3)
    states = get("optimizer", *whole, StateDictOptions(**RANK_0))
    with pytest.raises(ValueError, match="the optimizer states that are loaded differ between"):
        put("optimizer", model, optimizer, states, StateDictOptions(**RANK_0))
    assert_values(model, optimizer, 1, "optimizer")
    whole_ids = whole[1].state_dict()
    for stage in (1, 2, 3):
        model, optimizer = sharded("plain", stage, world, 1)
        own = optimizer.state_dict()
        with pytest.raises(ValueError, match=r"'all of it with .*' on rank 0, 'this rank's parts'"):
            optimizer.load_state_dict(whole_ids if rank == 0 else own)
        assert_values(model, optimizer, 1, "optimizer")
        if stage < 3:  # where the other ranks take no part in the call
            state = get("model", *whole, StateDictOptions(**RANK_0))
            put("model", model, optimizer, state, StateDictOptions(**RANK_0))
            model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
            with pytest.raises(RuntimeError, match="was set to other values on rank"):
                optimizer.step()


@pytest.mark.world(4)
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_checkpoints_go_both_ways_with_fsdp2_and_tensor_parallelism(
    world, no_stale_meshes, shared_path, stage
):
    """Both dimensions are two ranks; FSDP2's parameters are cut in rows, and ours flat."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(parallel(untrained(), mesh["tp"]), mesh=mesh["dp"])
    theirs = model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for what in ("model", "optimizer"):
        state = get(what, *plain(3), StateDictOptions())
        put(what, *theirs, state, StateDictOptions(**FULL))

    def states_of(pair) -> dict:
        return dict(zip(("model", "optimizer"), torchs.get_state_dict(*pair), strict=True))

    def load(pair, folder) -> None:
        states = states_of(pair)
        dcp.load(states, checkpoint_id=folder)
        torchs.set_state_dict(
            *pair, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )

    dcp.save(states_of(theirs), checkpoint_id=shared_path / "theirs")
    ours = sharded("tp", stage, world, 1)
    load(ours, shared_path / "theirs")
    for what in ("model", "optimizer"):
        assert_values(*ours, 3, what)
    fill(*ours, 4)
    dcp.save(states_of(ours), checkpoint_id=shared_path / "ours")
    load(theirs, shared_path / "ours")
    expected = plain(4)
    expected[0].count.copy_(ours[0].count)
    for what in ("model", "optimizer"):
        found = get(what, *theirs, StateDictOptions(**FULL))
        wanted = get(what, *expected, StateDictOptions())
        if what == "optimizer":
            found, wanted = found["state"], wanted["state"]
        assert_same(found, wanted, whole=True)
