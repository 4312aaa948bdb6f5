"""Messages that are read straight from the sender's memory (csrc/comm/local)."""

import contextlib
import ctypes
import errno
import gc
import os
import re
import struct
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import (
    MLP,
    assert_bits,
    gather_objects,
    mean_square,
    rank_batches,
    rank_data,
    reference_gradients,
)
from launching import run_on_ranks
from reference import whole
from setups import MLP_INPUT, SMALL_BUCKET_MB

import zero_ext
from zero_ext import _C
from zero_ext.ranks.agreement import calling

pytestmark = pytest.mark.host


def connect(group, host: int = 1):
    """Collective."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(values):
        rows = torch.empty(world, values.numel(), dtype=values.dtype)
        dist.all_gather_into_tensor(rows.view(-1), values, group=group)
        return rows

    return _C.SharedHostTransport.connect(
        rank, world, timeout_ms=20_000, host=host, all_gather=all_gather
    )


def connect_all(group):
    """Between all ranks; skipped where the machine does not allow it, or ranks are on two."""
    made = connect(group)
    if not all(made is not None and made.reaches(peer) for peer in peers_of(group)):
        pytest.skip("some process cannot read another one's memory")
    return made


@pytest.fixture
def memory(group):
    return connect_all(group)


def peers_of(group) -> list[int]:
    return [r for r in range(dist.get_world_size(group)) if r != dist.get_rank(group)]


def assert_messages_between_all(memory, group) -> None:
    rank = dist.get_rank(group)
    for peer in peers_of(group):
        memory.send(torch.arange(3.0) + rank, to=peer, tag=0)
    for peer in peers_of(group):
        into = torch.zeros(3)
        memory.receive(into, from_rank=peer, tag=0).wait()
        assert_bits(into, torch.arange(3.0) + peer)
    gather_objects(rank, group)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_call_is_seen_though_the_peer_has_closed_other_transports(group, rank):
    made = [connect_all(group) for _ in range(5)]

    def close_ends():
        if rank == 1:
            made.pop(0).close()
            made.pop().close()
            gc.collect()
        gather_objects(None, group)

    close_ends()
    with calling("a call()"):
        close_ends()
        seen = _C.calls_of_local_peers()
        gather_objects(None, group)
    assert f"rank {1 - min(rank, 1)} is in a call()" in seen, seen
    gather_objects(None, group)
    if rank == 0:
        assert "rank 1 is in no call of zero_ext" in _C.calls_of_local_peers()
    gather_objects(None, group)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_other_processes_may_read_only_while_there_is_a_transport(memory, group, rank):
    """Yama's permission is one per process: it is taken back with the last transport."""
    may_read = _C.SharedHostTransport.processes_may_read
    gc.collect()  # models of other tests, whose transports a thread closes
    _C.wait_for_shutdowns(30)
    before = may_read()
    assert before >= 1  # of `memory`
    second = connect_all(group)
    assert may_read() == before + 1
    gather_objects(rank, group)
    second.close()
    assert may_read() == before
    second.close()
    assert may_read() == before
    # Neither where no rank is reached, nor where this rank allows nothing.
    assert connect(group, host=0) is None
    assert may_read() == before
    assert connect(group, host=int(rank == 0)) is None
    assert may_read() == before
    third = connect_all(group)
    assert may_read() == before + 1
    gather_objects(rank, group)
    del third
    gc.collect()
    assert may_read() == before
    assert_messages_between_all(memory, group)


@pytest.mark.dist
def test_no_process_changes_the_size_of_a_mailbox(memory, group, world):
    sizes = []

    def all_gather(values):
        for file in Path("/proc/self/fd").iterdir():
            target = ""
            with contextlib.suppress(FileNotFoundError):  # a thread closes groups of earlier tests
                target = os.readlink(file)
            if "memfd:zero_ext" in target:
                with open(file, "r+b") as mailbox:
                    before = os.fstat(mailbox.fileno()).st_size
                    for size in (0, before - 1, before + 4096):
                        with pytest.raises(PermissionError):
                            os.ftruncate(mailbox.fileno(), size)
                    sizes.append(before)
        rows = torch.empty(world, values.numel(), dtype=values.dtype)
        dist.all_gather_into_tensor(rows.view(-1), values, group=group)
        return rows

    made = _C.SharedHostTransport.connect(
        dist.get_rank(group), world, timeout_ms=20_000, host=1, all_gather=all_gather
    )
    assert made is not None and sizes and min(sizes) > 0


@pytest.mark.dist
def test_messages_come_in_order_by_sender_and_tag(memory, group, rank):
    def message(sender, receiver, tag, number):
        numel = [0, 1, 7, 13, 100_003][number]
        dtype = torch.bfloat16 if tag == 2 else torch.float32
        return rank_data((numel,), sender, receiver, 10 * tag + number, dtype)

    kinds = [(tag, number) for tag in (1, 2) for number in range(5)]
    sends = [
        memory.send(message(rank, peer, *kind), to=peer, tag=kind[0])
        for kind in kinds
        for peer in peers_of(group)
    ]
    for tag in (2, 1):  # another order than that of the messages
        for number in range(5):
            for peer in peers_of(group):
                expected = message(peer, rank, tag, number)
                into = torch.full_like(expected, 9)
                memory.receive(into, from_rank=peer, tag=tag).wait()
                assert_bits(into, expected, f"from {peer}, tag {tag}, number {number}")
    for send in sends:
        send.wait()


@pytest.mark.dist
def test_what_is_received_may_be_asked_for_before_it_is_sent(memory, group, rank):
    intos = {peer: torch.zeros(13) for peer in peers_of(group)}
    receives = [memory.receive(into, from_rank=peer, tag=7) for peer, into in intos.items()]
    gather_objects(rank, group)
    for peer in peers_of(group):
        memory.send(rank_data((13,), rank, peer), to=peer, tag=7)
    for receive in receives:
        receive.wait()
    for peer, into in intos.items():
        assert_bits(into, rank_data((13,), peer, rank))
    gather_objects(rank, group)


@pytest.mark.dist
def test_more_messages_than_a_ring_holds(memory, group, rank):
    count = 10_000  # a ring has 4,096 places
    sends = [
        memory.send(torch.tensor([rank, number]), to=peer, tag=number % 3)
        for number in range(count)
        for peer in peers_of(group)
    ]
    gather_objects(rank, group)
    into = torch.zeros(2, dtype=torch.long)
    for number in range(count):
        for peer in peers_of(group):
            memory.receive(into, from_rank=peer, tag=number % 3).wait()
            assert into.tolist() == [peer, number]
    for send in sends:
        send.wait()
    # A rank that ends writes no more answers, for which a slower one may still wait.
    goodbye = [memory.send(into, to=peer, tag=3) for peer in peers_of(group)]
    for peer in peers_of(group):
        memory.receive(torch.zeros_like(into), from_rank=peer, tag=3).wait()
    gather_objects(rank, group)
    del goodbye


@pytest.mark.dist
def test_memory_of_a_message_lives_until_it_was_read(memory, group, rank):
    for peer in peers_of(group):
        memory.send(torch.full((1000,), float(rank)), to=peer, tag=0)
    gc.collect()
    others = [torch.full((1000,), -1.0) for _ in range(100)]
    gather_objects(rank, group)
    for peer in peers_of(group):
        into = torch.zeros(1000)
        memory.receive(into, from_rank=peer, tag=0).wait()
        assert_bits(into, torch.full((1000,), float(peer)))
    assert len(gather_objects(others, group)[0]) == 100


@pytest.mark.dist
def test_what_is_posted_is_received_as_it_is_at_that_time(memory, group, rank):
    """Any number of times, by all, and by one alone; beside messages with other tags."""
    value = torch.zeros(1083)
    posts = [memory.post(value, to=peer, tag=5) for peer in peers_of(group)]
    for version in range(3):
        value.copy_(rank_data((1083,), rank, version))
        gather_objects(rank, group)
        for peer in peers_of(group):
            for _ in range(0 if (rank, version) == (0, 1) else 3):
                into = torch.zeros(1083)
                memory.receive(into, from_rank=peer, tag=5).wait()
                assert_bits(into, rank_data((1083,), peer, version))
        gather_objects(rank, group)
    assert_messages_between_all(memory, group)
    other = rank_data((7,), rank)  # the newest holds
    posts += [memory.post(other, to=peer, tag=5) for peer in peers_of(group)]
    gather_objects(rank, group)
    for peer in peers_of(group):
        into = torch.zeros(7)
        memory.receive(into, from_rank=peer, tag=5).wait()
        assert_bits(into, rank_data((7,), peer))
        with pytest.raises(RuntimeError, match="sent 28 bytes where this rank expects 4332"):
            memory.receive(torch.zeros(1083), from_rank=peer, tag=5).wait()
    gather_objects(rank, group)
    for post in posts:
        post.wait()


@pytest.mark.dist
def test_a_receive_that_is_given_up_takes_no_message(memory, group, rank):
    given_up = [memory.receive(torch.zeros(3), from_rank=peer, tag=0) for peer in peers_of(group)]
    del given_up
    gather_objects(rank, group)
    assert_messages_between_all(memory, group)


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("withdrawn", [[0], [1], [0, 2], [3], [3, 2, 1, 0], []], ids=str)
def test_nothing_is_left_of_a_withdrawn_message(memory, group, rank, withdrawn):
    """Messages 0 and 2 have the same tag, and so have 1 and 3."""
    for peer in peers_of(group):
        sent = [memory.send(torch.full((5,), 10.0 * rank + k), peer, tag=k % 2) for k in range(4)]
        for k in withdrawn:
            memory.withdraw(sent[k])
    gather_objects(rank, group)
    left = [k for k in range(4) if k not in withdrawn]
    for peer in peers_of(group):
        assert memory.announced(by=peer) == len(left)
        for k in left:
            into = torch.zeros(5)
            memory.receive(into, peer, tag=k % 2).wait()
            assert_bits(into, torch.full((5,), 10.0 * peer + k))
        assert memory.announced(by=peer) == 0
    gather_objects(rank, group)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_message_that_was_received_may_be_withdrawn(memory, group, rank):
    for k in range(3):
        sent = [memory.send(torch.full((5,), 10.0 * rank + k), p, tag=7) for p in peers_of(group)]
        for peer in peers_of(group):
            into = torch.zeros(5)
            memory.receive(into, peer, tag=7).wait()
            assert_bits(into, torch.full((5,), 10.0 * peer + k))
        gather_objects(rank, group)
        for message in sent:
            memory.withdraw(message)
    gather_objects(rank, group)
    assert all(memory.announced(by=peer) == 0 for peer in peers_of(group))


@pytest.mark.dist
def test_other_sizes_are_an_error_and_the_next_message_is_not(memory, group, rank):
    sends = [
        memory.send(torch.ones(numel), to=peer, tag=0)
        for numel in (7, 5)
        for peer in peers_of(group)
    ]
    for peer in peers_of(group):
        into = torch.zeros(5)
        with pytest.raises(RuntimeError, match="sent 28 bytes where this rank expects 20"):
            memory.receive(into, from_rank=peer, tag=0).wait()
        assert_bits(into, torch.zeros(5))
        memory.receive(into, from_rank=peer, tag=0).wait()
        assert_bits(into, torch.ones(5))
    for send in sends:
        send.wait()


@pytest.mark.dist
def test_a_message_that_does_not_come_times_out(memory, group, rank):
    for peer in peers_of(group):
        begin = time.monotonic()
        receive = memory.receive(torch.zeros(5), from_rank=peer, tag=0)
        with pytest.raises(RuntimeError, match="timed out after 300 ms"):
            receive.wait(timedelta(milliseconds=300))
        assert time.monotonic() - begin < 10
        send = memory.send(torch.zeros(5), to=peer, tag=1)
        with pytest.raises(RuntimeError, match="timed out after 300 ms"):
            send.wait(timedelta(milliseconds=300))
    gather_objects(rank, group)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_waiting_for_an_epoch_that_a_rank_is_past_raises_at_once(memory, group, rank, world):
    """Messages sent before still arrive; the next epoch is the same for all ranks."""
    begun = memory.next_epoch(0)
    assert begun == 1
    gather_objects(rank, group)
    sends = [memory.send(torch.ones(5), to=peer, tag=0, epoch=begun) for peer in peers_of(group)]
    if rank == 0:
        memory.abandon_epoch(begun)
    gather_objects(rank, group)
    into = torch.zeros(5)
    memory.receive(into, from_rank=(rank + 1) % world, tag=0, epoch=begun).wait()
    assert_bits(into, torch.ones(5))
    if rank != 0:
        with pytest.raises(RuntimeError, match="it went on without this"):
            memory.receive(into, from_rank=0, tag=1, epoch=begun).wait()
    gather_objects(rank, group)
    assert memory.next_epoch(begun) == begun + 1
    gather_objects(rank, group)
    if rank == world - 1:
        memory.abandon_epoch(begun + 1)
    gather_objects(rank, group)
    assert memory.next_epoch(begun + 1) == begun + 2
    assert len(sends) == world - 1


@pytest.mark.dist
def test_a_rank_that_has_deleted_its_end_is_named_at_once(group, rank, world):
    """Also where its message had been sent: that memory may be something else by now."""
    if world == 1:
        return
    memory = connect_all(group)
    posts = []
    for peer in peers_of(group) if rank == 0 else []:
        memory.send(torch.ones(5), to=peer, tag=0)
        posts.append(memory.post(torch.ones(5), to=peer, tag=10))
    if rank == 0:
        memory = None
        posts.clear()
    gather_objects(rank, group)
    if rank == 0:
        return
    for tag in (0, 1):
        begin = time.monotonic()
        into = torch.zeros(5)
        for receive_tag in (tag, 10 + tag):
            with pytest.raises(RuntimeError, match="its script has ended, or"):
                memory.receive(into, from_rank=0, tag=receive_tag).wait()
        with pytest.raises(RuntimeError, match="its script has ended, or"):
            memory.send(into, to=0, tag=tag).wait()
        assert time.monotonic() - begin < 10


def forbid_reading_memory() -> None:
    """Of this thread alone, for ever: the system denies process_vm_readv, as a container's may."""
    number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
    deny, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    # Load the call's number; if it is this one, deny, else allow.
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, deny), (0x06, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    )
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
    assert prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.dist
def test_a_denied_read_is_told_from_the_end_of_a_process(memory, group, rank, world):
    """All ranks live, and rank 0 may not read their memory any more."""
    errors = []

    def receive() -> None:
        forbid_reading_memory()
        try:
            memory.receive(torch.zeros(5), from_rank=1, tag=0).wait()
        except RuntimeError as error:
            errors.append(str(error))

    if world > 1 and rank == 1:
        memory.send(torch.ones(5), to=0, tag=0)
    if world > 1 and rank == 0:
        thread = threading.Thread(target=receive)
        thread.start()
        thread.join()
        assert re.search(r"no longer lets this rank read .* ZERO_EXT_CROSS_MEMORY=0", errors[0])
    gather_objects(rank, group)


@pytest.mark.dist
def test_a_forked_child_that_ends_closes_nothing(memory, group, rank):
    child = os.fork()
    if child == 0:
        memory = None
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    gather_objects(rank, group)
    assert_messages_between_all(memory, group)


@pytest.mark.dist
def test_a_rank_that_does_not_allow_it_is_reached_by_no_other_rank(memory, group, rank, world):
    memory = connect(group, host=int(rank != 0))
    reached = [r for r in range(world) if memory is not None and memory.reaches(r)]
    assert reached == ([] if rank == 0 else [r for r in range(1, world) if r != rank])


# The engine over it


@pytest.mark.parametrize("refusing", [(), (0,), "all"], ids=["none", "rank 0", "all"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.dist
def test_gradients_and_steps_have_the_same_bits_whichever_way_messages_go(
    stage, refusing, memory, mesh, rank, world, monkeypatch
):
    """With rank 0 refusing on three ranks, messages go both ways in one engine."""
    alone = refusing == "all" or rank in refusing
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "0" if alone else "1")
    model = MLP()
    zero_ext.shard(model, stage, mesh=mesh, bucket_mb=SMALL_BUCKET_MB)
    model.set_gradient_divide_factor(1.0)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    plain = MLP()
    for step in range(3):
        batches = rank_batches(MLP_INPUT, world, step)
        expected = reference_gradients(lambda: plain, batches, world)
        mean_square(model, batches[0][rank]).backward()
        for name, p in model.named_parameters():
            assert_bits(whole(p.grad), expected[name], f"gradient of {name} in step {step}")
        optimizer.step()
        optimizer.zero_grad()
        with model.summon_full_params():
            plain.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()})
        values = torch.cat([p.detach().flatten() for p in plain.parameters()])
        assert len({v.numpy().tobytes() for v in gather_objects(values)}) == 1
    assert model.stats()["neighbors"] == (0 if alone else world - 1 - len(refusing))


@pytest.mark.parametrize("value", ["yes", "", "-2", "²", "9" * 20])
@pytest.mark.dist
def test_a_setting_that_is_no_host_s_number_is_refused(value, mesh, world, monkeypatch):
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", value)
    with pytest.raises(
        ValueError, match=f"ZERO_EXT_CROSS_MEMORY='{value}' is neither 0 nor the number of a host"
    ):
        zero_ext.shard(MLP(), 2, mesh=mesh)


DYING_RANK = """
import os, sys, time
import torch, torch.distributed as dist, zero_ext
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(300, 300)
zero_ext.shard(model, int(sys.argv[1]))
optimizer = zero_ext.optim.AdamW(model.parameters())
for step in range(3):
    if rank == 1 and step == 2:
        os._exit(0)  # without a word
    begin = time.monotonic()
    try:
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    except RuntimeError as error:
        print("NAMED", "rank 1): its process has ended" in str(error), model.stats()["neighbors"])
        print("SOON", time.monotonic() - begin < 10, flush=True)
        os._exit(0)
"""


@pytest.mark.parametrize(
    "stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3]
)
def test_a_process_that_ends_is_named_at_once(stage, tmp_path, monkeypatch):
    script = tmp_path / "dying.py"
    script.write_text(DYING_RANK)
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "1")
    result = run_on_ranks(2, str(script), str(stage), cwd=Path(__file__).parents[2])
    if "True 0" in result.stdout or "False 0" in result.stdout:
        pytest.skip("this machine lets no process read another one's memory")
    assert "NAMED True 1" in result.stdout and "SOON True" in result.stdout, result.stderr[-3000:]
