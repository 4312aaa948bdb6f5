"""Bytes held on each rank, from the formula, from the counters, and from the tensors themselves."""

import contextlib
import gc
import weakref

import pytest
import torch
from harness import DIRECT, DTYPES, MLP, assert_bits, gather_objects, mean_square, rank_data
from memory_formula import HELD, LINE_BYTES, ceil_to, peer_bytes, ranges_of
from process_facts import allocated_bytes
from reference import own_values, shown_master
from setups import lazily_free_bytes, take_lazily_free_pages, values_of
from torch import nn

import zero_ext
from zero_ext.engine.registry import find


def formula(model, units, world, stage, states=2, local=False) -> dict[str, int]:
    """DESIGN: 2 + 4 + 12/N (stage 1, accumulating) · 2 + 16/N (stage 2), with the padding."""
    held = dict.fromkeys(HELD, 0)
    for share, ranges, itemsize in ranges_of(model, units, world, stage):
        held["full"] += share * ranges * itemsize
        held["master"] += share * 4 if itemsize == 2 else 0
        held["grad"] += share * (ranges if local else 1) * 4
        held["optimizer_state"] += states * share * 4
    return held


def bytes_of(stats: dict[str, int]) -> dict[str, int]:
    return {what: stats[f"bytes_{what}"] for what in HELD}


# MLP(64): every size that this file uses has padding, and parameters that straddle two ranks.
NAMES = [f"layers.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
UNITS = {25.0: [NAMES], 1e-6: [[name] for name in reversed(NAMES)]}


def backwards(model, rank, step=0, dtype=torch.float32, micros=1, local=False) -> None:
    for micro in range(micros):
        waits = local and micro < micros - 1
        with model.no_sync() if waits else contextlib.nullcontext():
            mean_square(model, rank_data((3, 5), rank, step, micro, dtype)).backward()


def train_step(model, optimizer, *args, **kwargs) -> None:
    backwards(model, *args, **kwargs)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2])
@DTYPES
@pytest.mark.parametrize("bucket_mb", list(UNITS))
@pytest.mark.parametrize("local", [False, True])
def test_bytes_held_are_the_formula_to_the_byte(
    anywhere, rank, world, device, stage, dtype, bucket_mb, local
):
    """``local``: stages 0 and 1 accumulate inside no_sync, which takes the whole fp32 gradient.

    On a device gradients have memory from the first one on until zero_grad.
    """
    come_and_go = device.type != "cpu"
    model = zero_ext.shard(MLP(61, dtype=dtype), stage, mesh=anywhere, bucket_mb=bucket_mb)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    expected = formula(model, UNITS[bucket_mb], world, stage)
    expected["bucket"] = peer_bytes(model, UNITS[bucket_mb], world, stage)
    assert bytes_of(model.stats()) == expected | ({"grad": 0} if come_and_go else {})
    for step in range(2):
        train_step(model, optimizer, rank, step, dtype, micros=2 if local else 1, local=local)
    assert not come_and_go or model.stats()["bytes_grad"] == 0
    backwards(model, rank, 2, dtype, micros=2 if local else 1, local=local)

    grown = local and stage == 1 and world > 1
    expected = formula(model, UNITS[bucket_mb], world, stage, local=grown)
    if local:
        # What several backwards added up is kept once more, to undo a backward that throws; of
        # local sums, this rank's range.
        expected["grad"] += formula(model, UNITS[bucket_mb], world, stage)["grad"]
    held = bytes_of(model.stats())
    held.pop("bucket")
    expected.pop("bucket")
    assert held == expected
    assert model.stats()["bytes_held"] == sum(bytes_of(model.stats()).values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_stays_whole_is_estimated_but_not_held(anywhere, world, stage):
    model = MLP(64)
    expected = zero_ext.estimate_memory(model, world, stage)
    whole = 0
    # With stage 3 frozen parameters that could be trained are sharded as well.
    for dtype in (torch.int8, torch.float64, *([torch.bfloat16] if stage < 3 else [])):
        table = nn.Parameter(torch.ones(1000, dtype=dtype), requires_grad=False)
        model.register_parameter(f"table_{dtype.itemsize}", table)
        whole += 1000 * dtype.itemsize
    estimate = zero_ext.estimate_memory(model, world, stage)
    for what in expected:
        assert estimate[what] - expected[what] == (whole if what in ("full", "persistent") else 0)
    zero_ext.shard(model, stage, mesh=anywhere)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    stats = optimizer.stats()
    for what in ("full", "shard", "master", "optimizer_state"):
        assert stats[f"bytes_{what}"] == expected[what], what


@pytest.mark.parametrize("stage", [0, 1, 2])
@DTYPES
@pytest.mark.parametrize("bucket_mb", list(UNITS))
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_estimate_memory_is_the_formula(stage, dtype, bucket_mb, world_size):
    """For any number of ranks, before there is one."""
    model = MLP(61, dtype=dtype)
    for local in (False, True):
        estimate = zero_ext.estimate_memory(
            model, world_size, stage, bucket_mb=bucket_mb, local_accumulation=local
        )
        grown = local and stage == 1
        expected = formula(model, UNITS[bucket_mb], world_size, stage, local=grown)
        expected.pop("bucket")
        assert {what: estimate[what] for what in expected} == expected
        assert estimate["persistent"] == sum(expected.values())


def test_bytes_per_parameter_approach_2_plus_16_over_n():
    """The headline, for a model without padding; stage 3 divides all of it by the ranks, and on a
    device keeps no parameters beside their masters."""
    model = nn.Linear(1000, 1024, bias=False, dtype=torch.bfloat16, device="cpu")
    numel = model.weight.numel()
    expected = {(0, 2, True): 18, (1, 2, True): 12, (2, 2, False): 10, (2, 4, False): 6}
    expected |= {(3, 2, False): 9, (3, 4, False): 4.5, (3, 1, False): 18}
    for (stage, world_size, local), per_parameter in expected.items():
        estimate = zero_ext.estimate_memory(model, world_size, stage, local_accumulation=local)
        assert estimate["persistent"] / numel == pytest.approx(per_parameter, rel=1e-4)
    for world_size in (1, 2, 4):
        estimate = zero_ext.estimate_memory(model, world_size, 3, device="cuda", prefetch_mb=0)
        assert estimate["persistent"] / numel == pytest.approx(16 / world_size, rel=1e-4)
        assert estimate["gathered"] / numel == pytest.approx(2, rel=1e-3)


def test_each_stage_is_estimated_to_save_memory_where_most_is_frozen():
    model = nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 8)).bfloat16()
    model[0].requires_grad_(False)
    persistent = [zero_ext.estimate_memory(model, 2, stage)["persistent"] for stage in range(4)]
    assert persistent[0] > persistent[1] == persistent[2] > persistent[3]


@pytest.mark.parametrize("world_size", [0, -2, 2.0, None])
def test_no_memory_is_estimated_for_no_ranks(world_size):
    with pytest.raises(ValueError, match="world_size must be at least 1, not"):
        zero_ext.estimate_memory(MLP(13), world_size, 2)


def gradient_sum(parameter) -> torch.Tensor:
    """This rank's slice of the buffer whose memory ``.grad`` shows under a storage of its own."""
    handle, i = find(parameter)
    return handle.engine.grad_slice(i)


def library_storages(model, optimizer) -> dict[str, dict[int, int]]:
    """Address → bytes of each storage behind what the user can reach, by what it is for."""
    storages: dict[str, dict[int, int]] = {what: {} for what in HELD}

    def add(what: str, tensor) -> None:
        storage = own_values(tensor).untyped_storage()
        storages[what][storage.data_ptr()] = storage.nbytes()

    for parameter in model.parameters():
        add("full", parameter)
        assert own_values(parameter.grad).data_ptr() == gradient_sum(parameter).data_ptr()
        add("grad", gradient_sum(parameter))
        if parameter.dtype != torch.float32:
            add("master", shown_master(parameter))
        for name, value in optimizer.state[parameter].items():
            if name != "step":
                add("optimizer_state", value)
    return storages


@pytest.mark.parametrize("stage", [1, 2])
@DTYPES
@pytest.mark.parametrize("bucket_mb", list(UNITS))
def test_counters_agree_with_the_storages_that_exist(anywhere, rank, stage, dtype, bucket_mb):
    """Every storage behind parameters, gradients, masters and state, found through the views."""
    model = zero_ext.shard(MLP(61, dtype=dtype), stage, mesh=anywhere, bucket_mb=bucket_mb)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    train_step(model, optimizer, rank, dtype=dtype)
    mean_square(model, rank_data((3, 5), rank, dtype=dtype)).backward()

    storages = library_storages(model, optimizer)
    held = bytes_of(model.stats())
    del held["bucket"]  # not reachable from Python: see the allocator's view below
    for what, expected in held.items():
        assert sum(storages[what].values()) == expected, what
    everything = [address for found in storages.values() for address in found]
    assert len(everything) == len(set(everything)), "a storage serves two purposes"


@pytest.mark.host
@pytest.mark.usefixtures("groups_close_at_once")
@pytest.mark.parametrize("stage", [1, 2])
def test_counters_agree_with_the_allocator(anywhere, rank, stage):
    """bytes_held, buckets included, is what malloc has handed out beyond the plain model."""
    # No buffer reaches the 4 MB from which on it begins at a huge page: to malloc the address space
    # that such an alignment skips counts as used.
    width, layers = 512, 16

    def train():
        torch.manual_seed(0)
        layer_list = [nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(layers)]
        model = zero_ext.shard(nn.Sequential(*layer_list), stage, mesh=anywhere, bucket_mb=0.5)
        optimizer = zero_ext.optim.AdamW(model.parameters())
        for step in range(2):
            mean_square(model, rank_data((2, width), rank, step, dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    train()
    gc.collect()
    before = allocated_bytes()
    trained = train()
    gc.collect()
    held = trained[0].stats()["bytes_held"]
    # Python objects and gloo's own; one range of one unit is 131 kB at 4 ranks, all are 2 MB.
    assert allocated_bytes() - before == pytest.approx(held, abs=700_000)
    assert held > 16_000_000


@pytest.mark.parametrize("stage", [1, 2])
@DTYPES
@pytest.mark.parametrize("reduction", ["exchange", "collective"])
def test_at_most_two_buckets_during_and_after_a_backward(
    anywhere, rank, world, stage, dtype, reduction
):
    """Looked at from a hook on every parameter, of a model with many units."""
    layers = 12
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40, dtype=dtype) for _ in range(layers)))
    zero_ext.shard(model, stage, mesh=anywhere, bucket_mb=1e-6, reduction=reduction)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: seen.append(model.stats()["bytes_bucket"])
        )
    for step in range(3):
        mean_square(model, rank_data((2, 40), rank, step, dtype=dtype)).backward()
        seen.append(model.stats()["bytes_bucket"])
        optimizer.step()
        optimizer.zero_grad()

    share = ceil_to(ceil_to(40 * 40, world) // world, LINE_BYTES // dtype.itemsize)
    sent = 4 if reduction == "collective" else dtype.itemsize
    received = share if reduction == "collective" else share * (world - 1)
    one = (share * world + received) * sent
    assert len(seen) == 3 * (2 * layers + 1)
    two = 2 * one if world > 1 else 0
    if reduction == "exchange":
        two = peer_bytes(model, [["0.weight"]], world, stage) or two
    assert max(seen) <= two
    if world > 1 and reduction == "exchange":
        estimate = zero_ext.estimate_memory(model, world, stage, bucket_mb=1e-6, peer_memory=DIRECT)
        assert max(seen) <= estimate["buckets"]


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_buckets_of_mixed_use_stay_within_the_estimate(mesh, rank, world):
    """A step with and one without no_sync: fp32 local sums after bf16 gradients."""
    layers = [nn.Linear(40, 40, bias=False, dtype=torch.bfloat16) for _ in range(6)]
    model = zero_ext.shard(nn.Sequential(*layers), 1, mesh=mesh, bucket_mb=1e-6)
    x = rank_data((2, 40), rank, dtype=torch.bfloat16)
    mean_square(model, x).backward()
    with model.no_sync():
        mean_square(model, x).backward()
    mean_square(model, x).backward()
    estimate = zero_ext.estimate_memory(
        model, world, 1, bucket_mb=1e-6, local_accumulation=True, peer_memory=DIRECT
    )
    assert model.stats()["bytes_bucket"] <= estimate["buckets"]


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("local", [False, True])
@DTYPES
def test_peak_is_what_is_held_and_two_buckets(mesh, rank, world, dtype, local):
    model = zero_ext.shard(MLP(61, dtype=dtype), 1, mesh=mesh, bucket_mb=1e-6)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    for step in range(3):
        train_step(model, optimizer, rank, step, dtype, micros=3 if local else 1, local=local)
    estimate = zero_ext.estimate_memory(
        model, world, 1, bucket_mb=1e-6, local_accumulation=local, peer_memory=DIRECT
    )
    undo = zero_ext.estimate_memory(model, world, 1, bucket_mb=1e-6)["grad"] if local else 0
    assert model.stats()["bytes_peak"] <= estimate["persistent"] + estimate["buckets"] + undo


@pytest.mark.parametrize("stage", [1, 2])
def test_memory_is_constant_over_50_steps(anywhere, rank, device, stage):
    """Counters, live tensors and storages in the fourth step are those in the fiftieth.

    On a device gradients may get another memory. Both buckets have served the largest unit then.
    """
    model = zero_ext.shard(MLP(61), stage, mesh=anywhere, bucket_mb=1e-3)
    optimizer = zero_ext.optim.AdamW(model.parameters())

    def look():
        gc.collect()
        tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        return bytes_of(model.stats()), tensors, sorted(storages)

    storages: set[int] = set()
    looks = []
    for step in range(50):
        mean_square(model, rank_data((3, 5), rank, step)).backward()
        optimizer.step()
        reached = library_storages(model, optimizer)
        if device.type != "cpu":
            del reached["grad"]
        storages = {address for found in reached.values() for address in found}
        del reached
        if step in (3, 49):
            looks.append(look())
        peak, held = (model.stats()[f"bytes_{what}"] for what in ("peak", "held"))
        optimizer.zero_grad()
    assert looks[0] == looks[1]
    assert peak == held


@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_the_system_takes_between_steps_is_missed_by_nobody(anywhere, rank, world, stage):
    """Sums after ``zero_grad()`` and buckets after a backward; not a gradient that a user keeps."""

    def train(takes: bool):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 7))
        zero_ext.shard(model, stage, mesh=anywhere)
        optimizer = zero_ext.optim.AdamW(model.parameters())
        for step in range(3):
            for micro in range(2):
                with model.no_sync() if micro == 0 else contextlib.nullcontext():
                    mean_square(model, rank_data((3, 1500), rank, step, micro)).backward()
            kept = own_values(model[0].weight.grad)
            values = kept.clone()
            optimizer.step()
            optimizer.zero_grad()
            if takes:
                free = lazily_free_bytes()
                take_lazily_free_pages()
                # A block of less than 4 MiB has no pages of its own.
                assert world > 2 or lazily_free_bytes() <= free - 2**22
            assert_bits(kept, values)
        return values_of(model)

    taken, untouched = train(takes=True), train(takes=False)
    for name, values in taken.items():
        assert_bits(values, untouched[name], name)


def storage_references(tensors) -> list:
    """Weak references to storages: torch's own, which expire with the C++ object."""
    return [
        torch.multiprocessing.reductions.StorageWeakRef(own_values(t).untyped_storage())
        for t in tensors
    ]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("way", ["shard", "optimizer"])
@pytest.mark.parametrize("state", ["with gradients", "zeroed", "inside no_sync"])
def test_deleting_model_and_optimizer_frees_every_buffer(anywhere, rank, stage, way, state):
    """By weak references to objects and to storages, with no collection of cycles but one."""
    if way == "optimizer" and stage == 0:
        stage = 1
    model = MLP(61, dtype=torch.bfloat16)
    if way == "shard":
        zero_ext.shard(model, stage, mesh=anywhere, bucket_mb=1e-3)
        optimizer = zero_ext.optim.AdamW(model.parameters())
    else:
        group = None if anywhere is None else anywhere.get_group()
        optimizer = zero_ext.optim.AdamW(
            model.parameters(), stage=stage, process_group=group, bucket_mb=1e-3
        )
    x = rank_data((3, 5), rank, dtype=torch.bfloat16)
    mean_square(model, x).backward()
    optimizer.step()
    tensors = [
        tensor
        for p in model.parameters()
        for tensor in (
            *(p, p.grad, gradient_sum(p), shown_master(p)),
            *list(optimizer.state[p].values())[1:],
        )
    ]
    storages = storage_references(tensors)
    objects = [weakref.ref(o) for o in (model, optimizer, *model.parameters())]
    engine = weakref.ref(optimizer.zero_core.handle)
    del tensors
    if state != "with gradients":
        optimizer.zero_grad()
    if state == "inside no_sync":
        with (model if way == "shard" else optimizer).no_sync():
            mean_square(model, x).backward()

    del model, optimizer
    gc.collect()
    assert [r() for r in objects] == [None] * len(objects)
    assert engine() is None
    assert all(reference.expired() for reference in storages)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_model_outlives_its_optimizer(anywhere, rank, stage):
    """Without the optimizer its state is freed, the model still reduces; parameters stay valid."""
    model = zero_ext.shard(MLP(61), stage, mesh=anywhere, bucket_mb=1e-3)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    train_step(model, optimizer, rank)
    assert model.stats()["bytes_optimizer_state"] > 0
    del optimizer
    gc.collect()
    assert model.stats()["bytes_optimizer_state"] == 0
    mean_square(model, rank_data((3, 5), rank)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_outlive_the_engine(anywhere, rank):
    """A drop-in optimizer is the engine's only owner: afterwards the model is a plain one again."""
    model = MLP(61)
    group = None if anywhere is None else anywhere.get_group()
    optimizer = zero_ext.optim.AdamW(model.parameters(), process_group=group)
    mean_square(model, rank_data((3, 5), rank)).backward()
    del optimizer
    gc.collect()
    assert [p.grad for p in model.parameters()] == [None] * 6
    mean_square(model, rank_data((3, 5), rank)).backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_all_ranks_hold_equally_much(mesh, group, rank):
    """Ranges are equal, whichever parameters straddle them."""
    model = zero_ext.shard(MLP(61), 2, mesh=mesh, bucket_mb=1e-3)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    train_step(model, optimizer, rank)
    held = gather_objects(bytes_of(model.stats()), group)
    assert held == [held[0]] * mesh.size()
