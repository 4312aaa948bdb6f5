"""What the device "lagged" does. For a process of its own: see ../test_lagged_device.py."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lagged_device

lagged = lagged_device.load()
torch.set_num_threads(1)

DEVICE = torch.device("lagged", 0)
LONG = 5_000_000  # us: as good as never


@pytest.fixture(autouse=True)
def clean():
    """Every test starts on device 0 with nothing queued and leaves no fault behind."""
    torch.accelerator.set_device_index(0)
    lagged_device.set_lag(LONG)
    yield
    lagged_device.set_lag(50_000)
    assert lagged_device.faults() == []


def filled(value: float, numel: int = 1000) -> torch.Tensor:
    return torch.empty(numel, device="lagged").fill_(value)


def values(tensor: torch.Tensor) -> set:
    return set(tensor.cpu().nan_to_num(nan=-1).tolist())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 32)
        self.narrow = nn.Linear(32, 16, bias=False)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(16, 11)

    def block(self, h):
        return self.narrow(F.gelu(self.wide(self.norm(h))))

    def forward(self, x, reentrant):
        h = self.embedding(x)
        h = h + self.convolution(h[:, None]).mean((1, 2, 3))[:, None, None]
        if reentrant is None:
            h = h + self.block(h)
        else:
            h = h + checkpoint(self.block, h, use_reentrant=reentrant)
        return self.head(self.dropout(h))


def train(device, dtype, reentrant) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = copy.deepcopy(Net().to(dtype).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    norms = []
    for _ in range(3):
        x = torch.randint(11, (4, 8)).to(device)
        target = torch.randint(11, (4, 8)).to(device)
        y = model(x, reentrant)
        loss = F.cross_entropy(y.float().flatten(0, 1), target.flatten())
        (loss + F.mse_loss(y, torch.zeros_like(y))).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).cpu())
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()} | {
        "norms": torch.stack(norms)
    }


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_has_the_cpus_bits(dtype, reentrant):
    expected = train("cpu", dtype, reentrant)
    lagged_device.set_own_sums(False)
    result = train("lagged", dtype, reentrant)
    lagged_device.set_own_sums(True)
    assert result.keys() == expected.keys()
    for name in expected:
        assert expected[name].isfinite().all()
        assert torch.equal(result[name], expected[name]), name


def test_sums_have_last_bits_of_their_own():
    torch.manual_seed(0)
    a, b = torch.randn(40, 300), torch.randn(300, 20)
    result = (a.to(DEVICE) @ b.to(DEVICE)).cpu()
    exact = (a.double() @ b.double()).float()
    assert torch.equal(result, exact) and not torch.equal(result, a @ b)


def test_views_and_writes_share_memory():
    x = torch.arange(12.0, device=DEVICE).view(3, 4)
    x.t()[1].mul_(-1)
    x[2].copy_(torch.ones(4))
    part = x.unfold(1, 2, 2)
    part.zero_()
    torch.add(x, 1, out=x)
    assert x.cpu().tolist() == [[1.0] * 4] * 3
    assert x.T.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


def test_storage_is_resized_and_replaced():
    x = torch.arange(4.0, device=DEVICE)
    x.untyped_storage().resize_(0)
    assert lagged.memory_allocated() == 0
    x.untyped_storage().resize_(16)
    assert values(x) == {-1.0}
    y = torch.ones(6, device=DEVICE)
    x.data = y[2:]
    y.zero_()
    assert x.cpu().tolist() == [0.0] * 4


def test_random_numbers_are_the_devices_own():
    torch.manual_seed(3)
    host, first = torch.randn(5), torch.randn(5, device=DEVICE).cpu()
    assert not torch.equal(first, host)
    state = lagged.get_rng_state()
    second = torch.randn(5, device=DEVICE).cpu()
    lagged.set_rng_state(state)
    assert torch.equal(torch.randn(5, device=DEVICE).cpu(), second)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5, device=DEVICE).cpu(), first)
    own = torch.Generator("lagged")
    own.manual_seed(3)
    assert torch.equal(torch.randn(5, device=DEVICE, generator=own).cpu(), first)
    with pytest.raises(RuntimeError, match="Expected a 'lagged' device type for generator"):
        torch.randn(5, device=DEVICE, generator=torch.Generator())


def test_tensors_of_other_devices_are_refused():
    x = filled(1.0, 4)
    for other in (torch.ones(4), torch.ones(4, device="lagged:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + other
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x.add_(other)
    x.add_(torch.tensor(2.0))
    assert values(x[torch.tensor([0, 2])]) == {3.0}


def test_tensors_are_saved_and_loaded(tmp_path):
    torch.save({"x": filled(2.0)}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")["x"]
    assert loaded.device == DEVICE and values(loaded) == {2.0}
    assert torch.load(tmp_path / "x.pt", map_location="cpu")["x"].device.type == "cpu"


def test_autocast_lowers_the_precision():
    x = torch.ones(2, 3, device=DEVICE)
    with torch.autocast("lagged", dtype=torch.bfloat16):
        assert nn.Linear(3, 4, device=DEVICE)(x).dtype == torch.bfloat16
        assert x.bfloat16().softmax(1).dtype == torch.float32
    scaler = torch.amp.GradScaler("lagged", init_scale=4.0)
    assert scaler.scale(filled(2.0)).cpu()[0] == 8.0


def test_default_device_is_used():
    before = torch.get_default_device()
    torch.set_default_device("lagged")
    try:
        model = nn.Linear(3, 3)
        assert model.weight.device == DEVICE
        assert model(torch.ones(2, 3)).device == DEVICE
    finally:
        torch.set_default_device(before)


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("operator", ["queued", "on the host"])
def test_another_stream_that_does_not_wait_reads_nan(wait, operator):
    x = filled(2.0)
    if operator == "on the host":
        x = x + 1
    side = torch.Stream("lagged")
    if wait:
        side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        y = x.clone()
        seen = values(y)
    lagged.synchronize()
    expected = {2.0} if operator == "queued" else {3.0}
    assert seen == (expected if wait else {-1.0})
    assert values(x) == expected


@pytest.mark.parametrize("wait", [False, True])
def test_a_buffer_written_while_another_stream_reads_it_is_seen_changed(wait):
    x = filled(1.0)
    lagged.synchronize()
    side = torch.Stream("lagged")
    with side:
        y = x.clone()
        event = side.record_event()
    if wait:
        torch.accelerator.current_stream().wait_event(event)
    x.fill_(5.0)
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    with side:
        assert values(y) == ({1.0} if wait else {5.0})


@pytest.mark.parametrize("recorded", [False, True])
def test_released_memory_is_poisoned_for_other_streams(recorded):
    x = filled(1.0)
    lagged.synchronize()
    side = torch.Stream("lagged")
    with side:
        y = x.clone()
    if recorded:
        x.record_stream(side)
    del x
    torch.accelerator.current_stream().synchronize()
    with side:
        assert values(y) == ({1.0} if recorded else {-1.0})


def test_writes_after_a_release_and_behind_an_end_are_counted():
    x = filled(1.0)
    lagged.synchronize()
    side = torch.Stream("lagged")
    with side:
        x.fill_(4.0)
    del x
    torch.accelerator.current_stream().synchronize()
    assert "after its release" in lagged_device.faults()[0]
    y = filled(1.0)
    torch.accelerator.current_stream().synchronize()
    ctypes.c_float.from_address(y.data_ptr() + 4 * y.numel()).value = 0.0
    del y
    assert "behind its end" in lagged_device.faults()[0]


def test_copies_to_the_host_are_late_unless_they_block():
    x = filled(3.0)
    host = torch.zeros(1000, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert set(host.tolist()) == {0.0}
    torch.accelerator.current_stream().synchronize()
    assert set(host.tolist()) == {3.0}
    assert x.to("cpu", non_blocking=True).is_pinned()
    assert set(x.add_(1).cpu().tolist()) == {4.0}


def test_copies_to_the_device_read_pinned_memory_late():
    pinned, pageable = torch.ones(1000).pin_memory(), torch.ones(1000)
    from_pinned = pinned.to("lagged", non_blocking=True)
    from_pageable = pageable.to("lagged", non_blocking=True)
    pinned.zero_()
    pageable.zero_()
    assert values(from_pinned) == {0.0}
    assert values(from_pageable) == {1.0}


def test_pinned_memory_outlives_the_copies_from_it():
    pinned = torch.ones(1000).pin_memory()
    assert pinned.is_pinned() and not torch.ones(1).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    x = pinned.to("lagged", non_blocking=True)
    del pinned
    assert values(x) == {1.0}
    assert lagged.pinned_memory_allocated() == 0


def test_events_tell_when_their_stream_has_come_there():
    event = torch.Event("lagged")
    assert event.query()
    filled(1.0)
    torch.accelerator.current_stream().record_event(event)
    assert not event.query()
    event.synchronize()
    assert event.query()
    first, last = (torch.Event("lagged", enable_timing=True) for _ in range(2))
    first.record()
    last.record()
    last.synchronize()
    assert 0 <= first.elapsed_time(last) < 1000


@pytest.mark.parametrize("connections", [1, 8])
def test_streams_of_one_connection_run_in_one_order(connections):
    """Though none waits for the other."""
    one, other = torch.Stream("lagged"), torch.Stream("lagged")
    with lagged_device.one_connection() if connections == 1 else contextlib.nullcontext():
        with one:
            value = filled(2.0)
        with other:
            seen = torch.empty_like(value).copy_(value)
            assert values(seen) == ({2.0} if connections == 1 else {-1.0})


def test_devices_have_their_own_streams_and_memory():
    with lagged.device(1):
        x = filled(2.0)
        side = torch.Stream("lagged:1")
    assert x.device.index == 1 and side.device.index == 1
    assert lagged.memory_allocated(1) == 4000 and lagged.memory_allocated(0) == 0
    y = x.to("lagged:0")
    assert values(y) == {2.0} and (y + 1).device == DEVICE
    assert values(x + 1) == {3.0}
    assert torch.accelerator.current_device_index() == 0


def test_allocated_bytes_are_counted_as_asked_for():
    lagged.reset_peak_memory_stats()
    x = torch.empty(1001, dtype=torch.int8, device=DEVICE)
    y = torch.empty(7, device=DEVICE)
    assert lagged.memory_allocated() == 1001 + 28
    del x
    assert lagged.memory_allocated() == 28
    assert lagged.max_memory_allocated() == torch.accelerator.max_memory_allocated() == 1001 + 28
    assert values(y) == {-1.0}  # fresh memory


class Launch(ctypes.Structure):
    """zero_ext::kernels::Launch."""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("parallel_for", ctypes.c_void_p),
        ("error", ctypes.POINTER(ctypes.c_char_p)),
    ]


class AccumulateSegment(ctypes.Structure):
    """zero_ext::kernels::AccumulateSegment."""

    _fields_ = [
        ("grad", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("nonfinite", ctypes.c_void_p),
    ]


def accumulate(grad: torch.Tensor, total: torch.Tensor, stream: torch.Stream) -> tuple[int, str]:
    """The table's first kernel, accumulate_list: total = 1 * grad. Its status, and the device's
    words."""
    address = ctypes.c_void_p.from_address(lagged_device.kernels_address()).value
    kernel = ctypes.CFUNCTYPE(
        ctypes.c_int32, ctypes.POINTER(AccumulateSegment), ctypes.c_int64, ctypes.c_int32,
        ctypes.c_float, ctypes.c_bool, ctypes.c_void_p, ctypes.POINTER(Launch),
    )(address)  # fmt: skip
    error = ctypes.c_char_p()
    launch = Launch(stream=lagged_device.stream_handle(stream), error=ctypes.pointer(error))
    segment = AccumulateSegment(grad=grad.data_ptr(), sum=total.data_ptr(), numel=grad.numel())
    status = kernel(segment, 1, 0, 1.0, True, None, launch)
    return status, (error.value or b"").decode()


@pytest.mark.parametrize("wait", [False, True])
def test_kernels_run_in_stream_order(wait):
    main, side = torch.accelerator.current_stream(), torch.Stream("lagged")
    total = filled(0.0)
    lagged.synchronize()
    grad = filled(7.0)
    if wait:
        side.wait_stream(main)
    assert accumulate(grad, total, side) == (0, "")
    with side:
        assert values(total) == ({7.0} if wait else {-1.0})
    lagged.synchronize()


def test_kernels_refuse_what_a_gpu_would():
    total, grad = filled(0.0), torch.ones(1000)
    stream = torch.accelerator.current_stream()
    assert accumulate(grad, total, stream) == (2, "a pointer that is no memory of lagged:0")
    with lagged.device(1):
        status, error = accumulate(total, total, stream)
    assert status == 2 and "the current device is lagged:1" in error


def test_backward_runs_on_the_devices_thread_and_on_the_forwards_stream():
    seen = {}

    def look(grad):
        seen["thread"] = threading.get_ident()
        seen["stream"] = torch.accelerator.current_stream().stream_id
        return grad * 2

    side = torch.Stream("lagged")
    weight = filled(1.0).requires_grad_()
    with side:
        side.wait_stream(lagged.current_stream())
        hidden = weight * 3
        hidden.register_hook(look)
        loss = hidden.sum()
    loss.backward()
    assert seen["stream"] == side.stream_id
    assert seen["thread"] != threading.get_ident()
    assert values(weight.grad) == {6.0}


def test_a_failed_task_is_an_error_of_the_next_wait():
    x = filled(1.0)
    x.add_(torch.ones(3, device=DEVICE))
    with pytest.raises(RuntimeError, match=r"a task failed: The size of tensor a .1000.[^\n]*$"):
        lagged.synchronize()
    assert values(x) == {1.0}


def run_script(*lines: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", "\n".join(["import lagged_device, torch", *lines])],
        env=os.environ | {"PYTHONPATH": str(Path(lagged_device.__file__).parents[1])},
        capture_output=True,
        text=True,
    )


def test_queued_work_is_done_before_the_process_ends():
    run = run_script(
        "lagged_device.load()",
        "lagged_device.set_lag(10**9)",
        "x = torch.ones(1000, device='lagged')",
        "y = torch.empty(1000).copy_(x, non_blocking=True)",
    )
    assert run.returncode == 0, run.stderr


def test_a_device_cannot_come_after_the_first_backward():
    run = run_script("torch.ones(1, requires_grad=True).sum().backward()", "lagged_device.load()")
    assert "came after this process' first backward" in run.stderr
