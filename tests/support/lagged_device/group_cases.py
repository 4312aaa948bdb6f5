"""What process groups of the device "lagged" do. For ranks of their own: ../test_lagged_device.py.

conftest.py says how such tests run.
"""

from __future__ import annotations

import time
from datetime import timedelta

import conftest
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import lagged_device

lagged = lagged_device.load()
# The collectives' names before torch 2.13 are deprecated.
pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::FutureWarning")]

DEVICE = torch.device("lagged", 0)
LONG = 5_000_000  # us: as good as never
DTYPES = "float32 float64 bfloat16 float16 int32 int64 uint8".split()


@pytest.fixture(autouse=True)
def clean():
    """Every test starts with nothing queued and leaves no fault behind."""
    lagged_device.set_lag(LONG)
    yield
    lagged_device.set_lag(50_000)
    assert lagged_device.faults() == []


def new_group(timeout_s: float = 20.0) -> dist.ProcessGroup:
    return dist.new_group(backend="lccl", timeout=timedelta(seconds=timeout_s))


@pytest.fixture
def lccl():
    return new_group()


def meet(world: int, name: str) -> None:
    """All ranks come here, without a stream or a process group."""
    store = dist.PrefixStore(f"{conftest.ranks.tests_done}/{name}", conftest.ranks.store)
    store.add("count", 1)
    deadline = time.monotonic() + 20
    while store.add("count", 0) < world:
        assert time.monotonic() < deadline, f"not all ranks came to {name}"
        time.sleep(0.01)


def filled(value: float, numel: int = 1000) -> torch.Tensor:
    return torch.empty(numel, device=DEVICE).fill_(value)


def values(tensor: torch.Tensor) -> set:
    return set(tensor.cpu().nan_to_num(nan=-1).tolist())


def data(rank: int, numel: int, dtype: str = "float32") -> torch.Tensor:
    """Small integers: sums of them are exact in every dtype."""
    return ((torch.arange(numel) * 7 + rank * 3) % 11).to(getattr(torch, dtype))


def on_device(*arguments) -> torch.Tensor:
    return data(*arguments).to(DEVICE)


def empty(numel: int, dtype: str = "float32") -> torch.Tensor:
    return torch.empty(numel, dtype=getattr(torch, dtype), device=DEVICE)


def everyone(world: int, numel: int, dtype: str = "float32") -> torch.Tensor:
    """All ranks' data, [world, numel]."""
    return torch.stack([data(r, numel, dtype) for r in range(world)])


def assert_equal(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    assert tensor.device.type == "lagged"
    assert torch.equal(tensor.cpu(), expected.to(tensor.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(rank, world, lccl, dtype):
    table = everyone(world, 13, dtype)
    expected = {
        dist.ReduceOp.SUM: table.long().sum(0),
        dist.ReduceOp.MIN: table.amin(0),
        dist.ReduceOp.MAX: table.amax(0),
        dist.ReduceOp.PRODUCT: table.double().prod(0),
    }
    for op, result in expected.items():
        x = on_device(rank, 13, dtype)
        dist.all_reduce(x, op, group=lccl)
        assert_equal(x, result)
    x = on_device(rank, 13, dtype)
    dist.reduce(x, group_dst=world - 1, group=lccl)
    assert_equal(x, table.long().sum(0) if rank == world - 1 else data(rank, 13, dtype))

    table = everyone(world, 5 * world, dtype).long().sum(0).view(world, 5)
    output = empty(5, dtype)
    dist.reduce_scatter_tensor(output, on_device(rank, 5 * world, dtype), group=lccl)
    assert_equal(output, table[rank])
    output = empty(5, dtype)
    inputs = list(on_device(rank, 5 * world, dtype).split(5))
    dist.reduce_scatter(output, inputs, group=lccl)
    assert_equal(output, table[rank])


def test_sums_are_rounded_to_the_dtype_in_rank_order(rank, world, lccl):
    x = torch.full((1,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16, device=DEVICE)
    dist.all_reduce(x, group=lccl)
    assert x.item() == 256.0
    average = torch.full((1,), float(rank), device=DEVICE)
    dist.all_reduce(average, dist.ReduceOp.AVG, group=lccl)
    assert average.item() == (world - 1) / 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathers_and_broadcasts(rank, world, lccl, dtype):
    table = everyone(world, 6, dtype)
    for root in range(world):
        x = on_device(rank, 6, dtype)
        dist.broadcast(x, group_src=root, group=lccl)
        assert_equal(x, table[root])

    outputs = [empty(6, dtype) for _ in range(world)]
    dist.all_gather(outputs, on_device(rank, 6, dtype), group=lccl)
    for output, expected in zip(outputs, table, strict=True):
        assert_equal(output, expected)

    output = empty(6 * world, dtype)
    dist.all_gather_into_tensor(output, on_device(rank, 6, dtype), group=lccl)
    assert_equal(output, table.flatten())

    in_place = empty(6 * world, dtype)
    own = in_place[6 * rank : 6 * (rank + 1)]
    own.copy_(on_device(rank, 6, dtype))
    dist.all_gather_into_tensor(in_place, own, group=lccl)
    assert_equal(in_place, table.flatten())

    outputs = [empty(6, dtype) for _ in range(world)] if rank == 0 else None
    dist.gather(on_device(rank, 6, dtype), outputs, group_dst=0, group=lccl)
    if rank == 0:
        assert_equal(torch.stack(outputs), table)

    output = empty(6, dtype)
    inputs = [on_device(r + 5, 6, dtype) for r in range(world)] if rank == 0 else None
    dist.scatter(output, inputs, group_src=0, group=lccl)
    assert_equal(output, data(rank + 5, 6, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all(rank, world, lccl, dtype):
    def numel(source: int, target: int) -> int:
        return 0 if source == target else 2 * source + target  # rank 0 to rank 0: nothing

    def message(source: int, target: int) -> torch.Tensor:
        return data(10 * source + target, numel(source, target), dtype)

    inputs = [message(rank, to).to(DEVICE) for to in range(world)]
    outputs = [empty(numel(source, rank), dtype) for source in range(world)]
    dist.all_to_all(outputs, inputs, group=lccl)
    for source, output in enumerate(outputs):
        assert_equal(output, message(source, rank))

    received = [numel(source, rank) for source in range(world)]
    output = empty(sum(received), dtype)
    sent = [numel(rank, to) for to in range(world)]
    dist.all_to_all_single(output, torch.cat(inputs), received, sent, group=lccl)
    assert_equal(output, torch.cat([message(source, rank) for source in range(world)]))

    output = empty(2 * world * 3, dtype).view(2 * world, 3)
    x = on_device(rank, 2 * world * 3, dtype).view(2 * world, 3)
    dist.all_to_all_single(output, x, group=lccl)
    table = everyone(world, 2 * world * 3, dtype).view(world, world, 2, 3)
    assert_equal(output, table[:, rank].flatten(0, 1))


def test_messages(rank, world, lccl):
    after, before = (rank + 1) % world, (rank - 1) % world
    received = empty(9)
    operations = [
        dist.P2POp(dist.isend, on_device(rank, 9), group=lccl, group_peer=after),
        dist.P2POp(dist.irecv, received, group=lccl, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert_equal(received, data(before, 9))

    if rank == 0:
        for number in range(3):
            dist.send(on_device(number, 4), group_dst=1, group=lccl)
        lagged.synchronize()
    elif rank == 1:
        for number in range(3):
            x = empty(4)
            dist.recv(x, group_src=0, group=lccl)
            assert_equal(x, data(number, 4))


def test_objects_barriers_and_functional_collectives(rank, world, lccl):
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank}, group=lccl)
    assert objects == [{"rank": r} for r in range(world)]
    objects = [rank]
    dist.broadcast_object_list(objects, group_src=world - 1, group=lccl)
    assert objects == [world - 1]
    dist.barrier(lccl)

    x = on_device(rank, 4 * world)
    table = everyone(world, 4 * world)
    assert_equal(funcol.all_reduce(x, "sum", lccl) + 0, table.sum(0))
    assert_equal(funcol.all_gather_tensor(x, 0, lccl) + 0, table.flatten())
    mine = table.sum(0).view(world, 4)[rank]
    assert_equal(funcol.reduce_scatter_tensor(x, "sum", 0, lccl) + 0, mine)
    with dist._coalescing_manager(lccl, DEVICE, async_ops=True) as coalesced:
        parts = [x.clone(), x[:5].clone()]
        for part in parts:
            dist.all_reduce(part, group=lccl)
    coalesced.wait()
    assert_equal(parts[0], table.sum(0))
    assert_equal(parts[1], table.sum(0)[:5])


@pytest.mark.parametrize("wait", ["nothing", "wait", "future"])
def test_a_result_is_there_for_who_has_waited(rank, world, lccl, wait):
    reduced = filled(rank + 1.0)
    gathered = empty(world * 1000)
    works = [
        dist.all_reduce(reduced, group=lccl, async_op=True),
        dist.all_gather_into_tensor(gathered, filled(rank + 1.0), group=lccl, async_op=True),
    ]
    for work in works:
        if wait == "wait":
            work.wait()
        elif wait == "future":
            work.get_future().wait()
    everything = {float(r + 1) for r in range(world)}
    if wait == "nothing":
        assert values(reduced) == {rank + 1.0}
        assert values(gathered) == {-1.0}
    else:
        assert values(reduced) == {sum(everything)}
        assert values(gathered) == everything
    lagged.synchronize()
    assert values(reduced) == {sum(everything)}
    assert values(gathered) == everything


@pytest.mark.parametrize("wait", [False, True])
def test_an_input_overwritten_without_waiting_is_sent_changed(rank, world, lccl, wait):
    x, output = filled(rank + 1.0), empty(world * 1000)
    work = dist.all_gather_into_tensor(output, x, group=lccl, async_op=True)
    if wait:
        work.wait()
    x.fill_(50.0 + rank)
    torch.accelerator.current_stream().synchronize()
    lagged.synchronize()
    first = 1.0 if wait else 50.0
    assert values(output) == {first + r for r in range(world)}


@pytest.mark.parametrize("wait", [False, True])
def test_an_input_of_another_stream_is_sent_before_it_is_there(rank, world, lccl, wait):
    side = torch.Stream(DEVICE)
    x, output = empty(1000), empty(world * 1000)
    lagged.synchronize()
    with side:
        x.fill_(2.0)
    if wait:
        torch.accelerator.current_stream().wait_stream(side)
    dist.all_gather_into_tensor(output, x, group=lccl)
    assert values(output) == ({2.0} if wait else {-1.0})
    lagged.synchronize()


def test_memory_is_kept_until_it_is_waited_for(rank, world, lccl):
    lagged.synchronize()
    before = lagged.memory_allocated()
    x, output = filled(rank + 1.0), empty(world * 1000)
    work = dist.all_gather_into_tensor(output, x, group=lccl, async_op=True)
    del x
    assert lagged.memory_allocated() == before + 4000 * (world + 1)
    work.wait()
    assert lagged.memory_allocated() == before + 4000 * world
    assert values(output) == {r + 1.0 for r in range(world)}

    x, result = filled(rank + 1.0), empty(world * 1000)
    dist.all_gather_into_tensor(result, x, group=lccl, async_op=True)
    del x
    lagged.synchronize()
    assert values(result) == {r + 1.0 for r in range(world)}


def test_a_collective_comes_after_the_callers_stream(rank, world, lccl):
    x, output = filled(rank + 1.0), empty(world * 1000)
    work = dist.all_gather_into_tensor(output, x, group=lccl, async_op=True)
    with torch.Stream(DEVICE):
        work.wait()
        assert values(output) == {r + 1.0 for r in range(world)}


def test_calls_of_one_group_run_in_order(rank, world, lccl):
    x, output = filled(1.0), empty(world * 1000)
    dist.all_reduce(x, group=lccl, async_op=True)
    dist.all_gather_into_tensor(output, x, group=lccl, async_op=True).wait()
    assert values(output) == {float(world)}


def test_groups_run_independently(rank, world, lccl):
    """In another order on every rank, and one while the other waits for a rank."""
    lagged_device.set_lag(20_000)  # each rank waits first for what another one lets lie
    other = new_group()
    x, y = filled(1.0), filled(2.0)
    calls = [(x, lccl), (y, other)]
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in (calls if rank == 0 else reversed(calls))
    ]
    for work in works:
        work.wait()
    assert values(x) == {float(world)} and values(y) == {2.0 * world}

    late = filled(1.0)
    if rank == 0:
        first = dist.all_reduce(late, group=lccl, async_op=True)
        assert not first.is_completed()
    dist.all_reduce(y, group=other)
    assert values(y) == {2.0 * world**2}
    if rank == 0:
        assert not first.is_completed()
    meet(world, "the first group")
    if rank > 0:
        first = dist.all_reduce(late, group=lccl, async_op=True)
    first.wait(timedelta(seconds=20))
    assert first.is_completed() and first.is_success()
    assert values(late) == {float(world)}


def poll(work: dist.Work) -> None:
    deadline = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert work.is_completed()


def test_works_tell_when_they_are_done(rank, world, lccl):
    x = filled(1.0)
    work = dist.all_reduce(x, group=lccl, async_op=True)
    poll(work)
    assert work.is_success()
    if torch.__version__ >= "2.13":  # before it pybind11 cannot convert the answer
        assert work.exception() is None
    assert values(work.result()[0]) == {float(world)}


def test_ranks_that_disagree_are_told(rank, world, lccl):
    x = filled(1.0, 1000 if rank == 0 else 999)
    work = dist.all_reduce(x, group=lccl, async_op=True)
    words = r"allreduce: the ranks disagree:\n  rank 0: allreduce of Float.*sends \[4000"
    with pytest.raises(RuntimeError, match=rf"call 1\S*.*\]: {words}"):
        lagged.synchronize()
    assert work.is_completed() and not work.is_success()
    with pytest.raises(dist.DistBackendError, match=words):
        work.wait()

    if rank == 0:
        work = dist.broadcast(x, group_src=0, group=lccl, async_op=True)
    else:
        work = dist.all_reduce(x, group=lccl, async_op=True)
    with pytest.raises(RuntimeError, match=r"rank 0: broadcast of (.|\n)*rank 1: allreduce of"):
        work.wait(timedelta(seconds=20))

    y = filled(1.0)
    dist.all_reduce(y, group=lccl)
    assert values(y) == {float(world)}


def test_messages_of_other_sizes_are_told(rank, world, lccl):
    if rank == 0:
        dist.isend(filled(1.0, 3), group_dst=1, group=lccl)
    elif rank == 1:
        dist.irecv(empty(4), group_src=0, group=lccl)
    if rank < 2:
        with pytest.raises(RuntimeError, match=r"disagree: this one .* bytes, rank . .* 1[26]$"):
            lagged.synchronize()


@pytest.mark.world(2)  # slow
def test_a_peer_that_does_not_come_is_an_error_in_time(rank, world):
    group = new_group(timeout_s=1.0)
    if rank == 0:
        work = dist.all_reduce(filled(1.0), group=group, async_op=True)
        before = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"ALLREDUCE: not done within 200 ms"):
            work.wait(timedelta(milliseconds=200))
        with pytest.raises(RuntimeError, match=r"lccl \[rank 0 of .*allreduce: .*[Tt]imed out"):
            lagged.synchronize()
        assert time.monotonic() - before < 6
        with pytest.raises(dist.DistBackendError, match="allreduce"):
            work.wait()
    meet(world, "the end")


def make_group(rank: int, world: int, name: str, timeout_s: float = 20.0) -> dist.ProcessGroup:
    """As zero_ext makes the groups of an engine."""
    store = dist.PrefixStore(f"{conftest.ranks.tests_done}/{name}", conftest.ranks.group_store)
    creator = dist.Backend._plugins["LCCL"].creator_fn
    backend = creator(store, rank, world, timedelta(seconds=timeout_s))
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(store, rank, world)
    group._register_backend(torch.device("lagged"), kind, backend)
    group._set_default_backend(kind)
    return group


def test_groups_are_made_by_hand(rank, world):
    group = make_group(rank, world, "mine")
    backend = group._get_backend(DEVICE)
    assert backend.name() == "lccl" and (backend.rank(), backend.size()) == (rank, world)
    x = filled(1.0)
    group.allreduce([x]).wait()
    assert values(x) == {float(world)}


def test_a_peer_that_has_gone_is_an_error_at_once(rank, world):
    group = make_group(rank, world, "mine")
    poll(group.allreduce([filled(1.0)]))
    meet(world, "the last collective")
    if rank > 0:
        del group
    else:
        before = time.monotonic()
        group.allreduce([filled(1.0)])
        with pytest.raises(RuntimeError, match=r"lccl \[rank 0 of .*allreduce: .*"):
            lagged.synchronize()
        assert time.monotonic() - before < 6
    meet(world, "the end")


def test_an_abort_ends_what_is_under_way(rank, world):
    group = make_group(rank, world, "mine")
    poll(group.allreduce([filled(1.0)]))
    meet(world, "connected")
    if rank == 0:
        work = group.allreduce([filled(1.0)])  # no other rank comes
        before = time.monotonic()
        group._get_backend(DEVICE).abort()
        lagged.synchronize()
        assert values(filled(2.0)) == {2.0}
        assert work.exception() is None and time.monotonic() - before < 6
    meet(world, "the end")


def test_ranks_that_abort_one_after_another_read_no_error(rank, world):
    """One of them aborts and drops its group before its device has begun the last collective."""
    group = make_group(rank, world, "mine")
    poll(group.allreduce([filled(1.0)]))
    meet(world, "connected")
    lagged_device.set_lag(0 if rank == 0 else LONG)
    group.allreduce([filled(1.0)])
    meet(world, "the last collective")
    if rank == 0:
        meet(world, "others have aborted")
        time.sleep(0.2)  # what they have closed is known here
    group._get_backend(DEVICE).abort()
    del group
    lagged.synchronize()
    if rank > 0:
        meet(world, "others have aborted")
    meet(world, "the end")


@pytest.mark.world(2)  # slow
def test_a_group_that_is_not_complete_is_an_error_in_time(rank, world):
    if rank == 0:
        with pytest.raises(RuntimeError):
            make_group(0, world + 1, "mine", timeout_s=0.5)


def test_what_nccl_refuses_is_refused(rank, world, lccl):
    def refuses(words, call, *arguments, **more):
        with pytest.raises(ValueError, match=words):
            call(*arguments, **more)

    backend = lccl._get_backend(DEVICE)
    options = dist.AllreduceOptions()
    refuses("got a tensor on cpu", backend.allreduce, [torch.ones(3)], options)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3), group=lccl)
    strided = filled(1.0)[::2]
    refuses("needs contiguous tensors", backend.allreduce, [strided], options)
    complex_numbers = torch.zeros(3, dtype=torch.complex64).to(DEVICE)
    refuses("cannot send", backend.allreduce, [complex_numbers], options)
    refuses("of 4 elements into 9", dist.all_gather_into_tensor, empty(9), empty(4), group=lccl)


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["lccl", "cpu:gloo,lagged:lccl"])
def test_the_default_group_is_made_of_it(rank, world, backend):
    conftest.ranks.disconnect()
    name = f"{conftest.ranks.tests_done}/{backend}"
    store = dist.PrefixStore(name, conftest.ranks.group_store)
    timeout = timedelta(seconds=20)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        x = filled(1.0)
        dist.all_reduce(x)
        assert values(x) == {float(world)}
        if "gloo" in backend:
            y = torch.ones(3)
            dist.all_reduce(y)
            assert y.tolist() == [world] * 3
        objects = [None] * world
        dist.all_gather_object(objects, rank)
        assert objects == list(range(world))
        dist.barrier()
    finally:
        conftest.ranks.disconnect()
        conftest.ranks.connect()
