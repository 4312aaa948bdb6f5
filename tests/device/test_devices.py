"""Models on a device: the CPU's bits, nothing out of order, and nobody waits.

Run with ZERO_EXT_TEST_DEVICE, where all other tests run as well. "lagged" is late with everything,
so that a missing wait shows as another result or as a fault.
"""

import contextlib
import copy
import functools
import gc
import importlib
import io
import itertools
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import (
    DIRECT,
    DTYPES,
    MLP,
    OWN_BACKEND,
    Blocks,
    Branching,
    assert_bits,
    gather_objects,
    mean_square,
    needs_gathers_together,
    rank_batches,
    rank_data,
)
from launching import run_on_ranks
from reference import fma_gradients, own_values, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

import zero_ext
from zero_ext.engine.registry import handle_of

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore:zero_ext.*skipped")]
STEPS = 4
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
OFFLOAD = CPUOffloadPolicy()
REDUCTIONS = pytest.mark.parametrize("reduction", ["exchange", "collective"])


@pytest.fixture(autouse=True)
def in_order(device):
    """Nothing was written after its release or behind its end."""
    yield
    if device.type == "lagged":
        import lagged_device

        assert lagged_device.faults() == []


@contextlib.contextmanager
def nobody_waits(device):
    if device.type == "lagged":
        import lagged_device

        before = lagged_device.host_waits()
        yield
        assert lagged_device.host_waits() == before
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def skip_unless_on_device():
    backends = str(dist.get_backend_config())
    if "lccl" not in backends and "nccl" not in backends:
        pytest.skip("gloo carries tensors through host memory, which waits")


class Run:
    """The same training, on any device."""

    def __init__(self, device, stage, mesh, rank, dtype, optimizer=zero_ext.optim.AdamW, **kwargs):
        self.device, self.rank = device, rank
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = MLP(13).to(dtype)
        sharding = {k: kwargs.pop(k) for k in ("offload_policy", "reduction") if k in kwargs}
        steps = kwargs.pop("accumulation_steps", 1)
        self.model = zero_ext.shard(
            model.to(device), stage, mesh=mesh, bucket_mb=300 / 2**20, **sharding
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.05, **kwargs)
        self.micros = steps

    def loss_of(self, model, step, micro=0, factor=1.0):
        parameter = next(model.parameters())
        batch = rank_data((4, 5), self.rank, step, micro)
        return mean_square(model, batch.to(parameter.dtype).to(parameter.device)) * factor

    def backward(self, *args, **kwargs):
        loss = self.loss_of(self.model, *args, **kwargs)
        loss.backward()
        return loss.detach()

    def step(self, number, factor=1.0):
        losses = [self.backward(number, m, factor) for m in range(self.micros)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def train(self, overflow_at=None):
        """Losses, parameters, states and skipped steps, on the host."""
        losses = []
        for number in range(STEPS):
            losses += self.step(number, float("inf") if number == overflow_at else 1.0)
        values = [zero_ext.full_tensor(p) for p in self.model.parameters()]
        states = [
            zero_ext.full_state(self.optimizer, p, name)
            for p in self.model.parameters()
            for name in self.optimizer.state[p]
        ]
        everything = [t.cpu() for t in [*losses, *values, *states]]
        return everything, self.optimizer.skipped_steps


class RunOnTheCPU(Run):
    """The same training, of which only forward and backward are the device's, by plain PyTorch:
    the bits of a device's sums are its own."""

    def __init__(self, device, stage, mesh, rank, dtype, **kwargs):
        mesh = None if mesh is None else DeviceMesh.from_group(mesh.get_group(), "cpu")
        # All stages have the same bits; with 3 the parameters would be gone outside of a forward.
        super().__init__(torch.device("cpu"), min(stage, 2), mesh, rank, dtype, **kwargs)
        self.plain = MLP(13).to(dtype).to(device)

    def backward(self, *args, **kwargs):
        parameters = list(self.model.parameters())
        with torch.no_grad():
            for plain, parameter in zip(self.plain.parameters(), parameters, strict=True):
                plain.copy_(parameter)
        loss = self.loss_of(self.plain, *args, **kwargs)
        gradients = torch.autograd.grad(loss, list(self.plain.parameters()))
        pairs = zip(parameters, gradients, strict=True)
        sum((p * g.cpu()).float().sum() for p, g in pairs).backward()
        return loss.detach()


def assert_as_on_the_cpu(anywhere, rank, device, stage, dtype, overflow_at=None, **kwargs):
    expected_kwargs = {k: v for k, v in kwargs.items() if k != "offload_policy"}
    twin = RunOnTheCPU(device, stage, anywhere, rank, dtype, **expected_kwargs)
    expected = twin.train(overflow_at)
    found = Run(device, stage, anywhere, rank, dtype, **kwargs).train(overflow_at)
    assert found[1] == expected[1] == (overflow_at is not None)
    # Three fp32 numbers have several sums, and each backend adds in an order of its own.
    ordered = kwargs.get("reduction") != "collective" or anywhere is None or anywhere.size() == 2
    for n, (mine, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        if ordered:
            assert_bits(mine.double(), theirs.double(), f"value {n}")
        else:
            torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-3, atol=1e-4)


@STAGES
@REDUCTIONS
@pytest.mark.parametrize("offload", [None, OFFLOAD], ids=["", "offload"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_has_the_bits_of_the_cpu(anywhere, rank, device, stage, reduction, offload, dtype):
    assert_as_on_the_cpu(
        anywhere, rank, device, stage, dtype, reduction=reduction, offload_policy=offload
    )


@STAGES
@pytest.mark.parametrize("offload", [None, OFFLOAD], ids=["", "offload"])
def test_micro_batches_clipping_and_a_skipped_step(anywhere, rank, device, stage, offload):
    # bf16, whose sums over micro-batches are exact: with offload stage 1 reduces each, too.
    assert_as_on_the_cpu(
        anywhere,
        rank,
        device,
        stage,
        torch.bfloat16,
        overflow_at=2,
        reduction="exchange",
        offload_policy=offload,
        accumulation_steps=2,
        max_grad_norm=0.1,
    )


@pytest.mark.parametrize("offload", [None, OFFLOAD], ids=["", "offload"])
@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [
        (zero_ext.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (zero_ext.optim.AdamW, {"amsgrad": True}),
        (zero_ext.optim.Adam, {"weight_decay": 0.1}),
    ],
    ids=["SGD", "AMSGrad", "Adam"],
)
def test_other_optimizers(anywhere, rank, device, optimizer, kwargs, offload):
    assert_as_on_the_cpu(
        anywhere,
        rank,
        device,
        2,
        torch.bfloat16,
        reduction="exchange",
        offload_policy=offload,
        optimizer=optimizer,
        **kwargs,
    )


@STAGES
@REDUCTIONS
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_nobody_waits_in_a_backward_or_a_step(
    anywhere, rank, device, stage, reduction, max_grad_norm
):
    if anywhere is not None:
        skip_unless_on_device()
    run = Run(
        device,
        stage,
        anywhere,
        rank,
        torch.bfloat16,
        reduction=reduction,
        max_grad_norm=max_grad_norm,
    )
    for number in range(2):
        run.step(number)
    batch = rank_data((4, 5), rank).bfloat16()
    with nobody_waits(device):
        for _ in range(3):
            for _ in range(2):
                mean_square(run.model, batch).backward()
            run.optimizer.step()
            zero_ext.metrics(run.model, run.optimizer)
            run.optimizer.zero_grad()


@STAGES
def test_nobody_waits_for_a_static_loss_scale(device, stage):
    scaler = zero_ext.LossScaler("static", init_scale=128.0)
    run = Run(device, stage, None, 0, torch.bfloat16, loss_scaler=scaler)
    batch = rank_data((4, 5), 0).bfloat16()

    def step():
        scaler.scale(mean_square(run.model, batch)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    step()
    with nobody_waits(device):
        step()
        step()


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_nobody_waits_for_edits_of_gradients_or_for_some_of_the_parameters(
    anywhere, rank, device, order
):
    """Sums that the user wrote to are searched again, for the parameters of one optimizer."""
    if anywhere is not None:
        skip_unless_on_device()
    run = Run(device, 2, anywhere, rank, torch.float32)
    parameters = list(run.model.parameters())
    del run.optimizer
    gc.collect()
    halves = [zero_ext.optim.AdamW(half, lr=0.05) for half in (parameters[:3], parameters[3:])]
    batch = rank_data((4, 5), rank)

    def step():
        mean_square(run.model, batch).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=order)
        for optimizer in halves:
            optimizer.step()
            optimizer.zero_grad()

    step()
    with nobody_waits(device):
        step()
        step()


def kernel_calls_of(call) -> int:
    import lagged_device

    before = lagged_device.kernel_calls()
    call()
    return lagged_device.kernel_calls() - before


@pytest.mark.lagged
def test_edits_of_gradients_are_searched_in_one_launch(device):
    """Stock clipping writes to every one."""
    run = Run(device, 2, None, 0, torch.bfloat16)
    run.step(0)
    run.backward(1)
    unedited = kernel_calls_of(run.optimizer.step)
    run.backward(1)
    for parameter in run.model.parameters():
        parameter.grad.mul_(0.5)
    assert kernel_calls_of(run.optimizer.step) == unedited + 1


@pytest.mark.lagged
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
def test_slots_of_one_unit_and_one_group_are_updated_in_one_launch(device, state_dtype):
    """Whatever lies between them; with int8 one more, of the small parameters."""

    def calls_of(layers: int) -> int:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers))).to(device)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == ndim], "weight_decay": decay}
            for ndim, decay in ((2, 0.1), (1, 0.0))
        ]
        optimizer = zero_ext.optim.AdamW(groups, state_dtype=state_dtype)
        assert optimizer.stats()["units"] == 1
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        return kernel_calls_of(optimizer.step)

    assert calls_of(7) == calls_of(2)


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.lagged
def test_local_sums_take_one_launch_per_unit(mesh, rank, device):
    """And those of a backward that reduces two more: of the sum and of what arrives with it."""
    run = Run(device, 1, mesh, rank, torch.bfloat16)
    units = run.model.stats()["units"]
    assert units < len(list(run.model.parameters()))
    run.step(0)
    reducing = kernel_calls_of(lambda: run.backward(1))
    run.optimizer.step()
    run.optimizer.zero_grad()
    with run.model.no_sync():
        assert kernel_calls_of(lambda: run.backward(2)) == units
        assert kernel_calls_of(lambda: run.backward(3)) == units
    assert kernel_calls_of(lambda: run.backward(4)) == reducing + units


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 2])
def test_local_sums_of_backwards_on_several_streams(mesh, rank, device, stage):
    """Gradients that wait for the end of their backward belong to the stream that made them, and
    who sums on another stream goes on behind it."""

    def train(streams):
        run = Run(device, stage, mesh, rank, torch.bfloat16)
        for number in range(2):
            for stream in {*streams} - {here}:  # which read what the step writes
                stream.wait_stream(torch.accelerator.current_stream())
            for micro, stream in enumerate(streams):
                last = micro == len(streams) - 1
                with contextlib.nullcontext() if last else run.model.no_sync(), stream:
                    run.backward(number, micro)
            run.optimizer.step()
            run.optimizer.zero_grad()
        return [zero_ext.full_tensor(p).cpu() for p in run.model.parameters()]

    here = contextlib.nullcontext()
    side, other = torch.Stream(device), torch.Stream(device)
    for mine, theirs in zip(train([here, side, other, side]), train([here] * 4), strict=True):
        assert_bits(mine, theirs)


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_collective_that_does_not_end_is_named(mesh, rank, device, monkeypatch, capfd, stage):
    """Nobody waits, and yet it is said who is missing: before the backend gives up."""
    skip_unless_on_device()
    if stage == 3:
        needs_gathers_together()
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "4")
    run = Run(device, stage, mesh, rank, torch.bfloat16)
    run.step(0)
    dist.barrier()
    if rank == 1:
        time.sleep(3)
    loss = run.step(1)
    assert loss[0].isfinite()
    dist.barrier()
    said = capfd.readouterr().err
    if rank == 1:
        assert "zero_ext [rank 1" not in said
        return
    waited = "its reduction in backward 2" if stage == 2 else "the other ranks' parts of its param"
    assert re.search(rf"zero_ext \[rank {rank}, unit '.* … .*'\]: waited for {waited}", said)
    assert re.search(r" for [23](\.\d+)? s, and still does.*timeout is 4 s", said)
    assert said.count("and still does") == 1


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("reduction", ["exchange", "collective"])
def test_why_gradients_are_sent_is_known(mesh, device, reduction):
    """Of ranks whose devices do not read each other's memory."""
    if DIRECT:
        pytest.skip("here they do, see test_peer_memory.py")
    model = zero_ext.shard(MLP(7).to(device), 1, mesh=mesh, reduction=reduction)
    through_host = "lccl" not in str(dist.get_backend_config())
    exchanged = "they travel through host memory" if through_host else "torch has no memory"
    why = exchanged if reduction == "exchange" else "the backend sums them"
    assert handle_of(model).engine.why_sent.startswith(why)


LOSES_A_RANK = """
import os, sys, torch
import torch.distributed as dist
import lagged_device
import zero_ext

rank, stage, store = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2]
lagged_device.load()
zero_ext._C.set_kernels(torch.device("lagged"), lagged_device.kernels_address())
lagged_device.end_with_errors()
dist.init_process_group(
    "cpu:gloo,lagged:lccl", init_method=f"file://{store}", rank=rank, world_size=2
)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to("lagged")
zero_ext.shard(model, stage)
optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    if (rank, step) == (1, 2):
        os._exit(0)
    model(torch.ones(2, 5, device="lagged")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.lagged.synchronize()
"""


@pytest.mark.lagged
@pytest.mark.parametrize("stage", [2, 3])
def test_a_backend_that_ends_the_process_is_told_for_what(tmp_path, monkeypatch, stage):
    """The backend finds that a rank is gone long before any timeout."""
    script = tmp_path / "script.py"
    script.write_text(LOSES_A_RANK)
    script_path = os.pathsep.join(
        [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
    )
    monkeypatch.setenv("PYTHONPATH", script_path)
    arguments = [str(script), str(stage), str(tmp_path / "store")]
    result = run_on_ranks(2, *arguments, cwd=Path(__file__).parents[2], timeout_s=50)
    said = result.stderr
    assert result.returncode == -signal.SIGABRT, said  # rank 1's is 0, and comes first
    waited = "its reduction in backward 3" if stage == 2 else "the other ranks' parts of its param"
    assert re.search(rf"zero_ext \[rank 0, unit '.* … .*'\]: waited for {waited}", said), said
    assert re.search(r" for [\d.]+ s when the process was ended\. Another rank may", said)
    assert said.count("when the process was ended") == 1


def test_a_wait_is_seen(device):
    """The test above can fail."""
    value = torch.ones(3, device=device)
    with nobody_waits(device):
        value.add_(1).mul_(2)
    with pytest.raises((AssertionError, RuntimeError)), nobody_waits(device):
        assert value.sum().item() == 12


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_buckets_are_enough(anywhere, rank, device, stage):
    """An unused branch holds all reductions up until the end; gradients wait without a bucket."""
    ranks = 1 if anywhere is None else anywhere.size()
    batches = [[(rank_data((4, 6), r, step), ["left"]) for r in range(ranks)] for step in range(3)]
    model = Branching()
    zero_ext.shard(model, stage, mesh=anywhere, bucket_mb=1e-5, reduction="exchange")
    for batch in batches:
        mean_square(model, batch[rank]).backward()
    estimate = zero_ext.estimate_memory(
        Branching(), ranks, stage, bucket_mb=1e-5, peer_memory=DIRECT and ranks > 1
    )
    assert model.stats()["bytes_bucket"] <= estimate["buckets"]
    expected = fma_gradients(Branching(), batches, ranks)
    for name, parameter in model.named_parameters():
        gradient = zero_ext.full_grad(parameter)
        assert (gradient is None) == (expected[name] is None), name
        if gradient is not None:
            assert_bits(gradient, expected[name], name)


@pytest.mark.lagged
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [None, OFFLOAD], ids=["", "offload"])
def test_a_model_on_another_than_the_current_device(anywhere, rank, stage, offload):
    other = torch.device("lagged", 1)
    assert torch.accelerator.current_device_index() == 0
    with other:
        assert_as_on_the_cpu(
            anywhere,
            rank,
            other,
            stage,
            torch.float32,
            reduction="exchange",
            offload_policy=offload,
        )
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_the_callers_own_stream(anywhere, rank, device, stage):
    """Forward, backward and step on a stream that is not the default one."""
    expected = Run(device, stage, anywhere, rank, torch.float32).train()
    with torch.Stream(device):
        found = Run(device, stage, anywhere, rank, torch.float32).train()
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert_bits(mine, theirs)


@pytest.mark.lagged
@STAGES
@REDUCTIONS
def test_forward_and_backward_can_be_captured(anywhere, rank, device, stage, reduction):
    """By the rules of CUDA's graphs, see ``lagged_device/capture.h``. What follows is right."""
    import lagged_device

    if anywhere is not None:
        skip_unless_on_device()
    run, twin = (
        Run(device, stage, anywhere, rank, torch.bfloat16, reduction=reduction) for _ in range(2)
    )
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for number in range(2):
            assert_bits(run.step(number)[0], twin.step(number)[0])
        batch = rank_data((4, 5), rank).bfloat16().to(device)
        with lagged_device.capture() as refused:
            mean_square(run.model, batch).backward()
        assert refused == []
        with lagged_device.capture() as refused, run.model.no_sync():
            mean_square(run.model, batch).backward()
        assert refused == []
        mean_square(run.model, batch).backward()
        mean_square(twin.model, batch).backward()
        with twin.model.no_sync():
            mean_square(twin.model, batch).backward()
        mean_square(twin.model, batch).backward()
        for mine, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
            assert_bits(own_values(mine.grad), own_values(theirs.grad))
        with lagged_device.capture() as refused:
            torch.accelerator.synchronize()
        assert refused == ["the host waits for the device"]
        for one in (run, twin):
            one.optimizer.step()
            one.optimizer.zero_grad()
        assert_bits(run.step(2)[0], twin.step(2)[0])


@pytest.mark.lagged
def test_a_captured_backward_keeps_no_memory_of_the_host(device):
    """Flags are cleared by their numbers where some of the gradients alone were zeroed. A replay
    would read the numbers in memory of the host that has been freed."""
    import lagged_device

    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    model = zero_ext.shard(MLP(13).to(device), 2, mesh=None)
    some = zero_ext.optim.SGD([*model.parameters()][:2], lr=0.1)
    batch = rank_data((4, 5), 0).to(device)
    with side:
        mean_square(model, batch).backward()
        some.zero_grad()
        with lagged_device.capture() as refused:
            mean_square(model, batch).backward()
        assert refused == []
        with lagged_device.capture() as refused:
            torch.ones(3, device="cpu").pin_memory().to(device, non_blocking=True)
        assert refused == ["pinned memory of captured work was released"]


@pytest.mark.lagged
@pytest.mark.dist
@pytest.mark.world(min=2)
def test_collectives_are_watched_while_another_thread_captures(mesh, rank, device, monkeypatch):
    import lagged_device

    skip_unless_on_device()
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "2")  # looks eight times, for what has half its age
    run = Run(device, 2, mesh, rank, torch.bfloat16)
    run.step(0)
    asked = lagged_device.event_queries()
    with lagged_device.capture() as refused:
        time.sleep(1.5)
    assert refused == []
    assert lagged_device.event_queries() > asked


@pytest.mark.real_device
@pytest.mark.parametrize("stage", [1, 2])
def test_a_captured_backward_has_the_bits_of_one_that_runs(device, stage):
    batch = rank_data((4, 5), 0).bfloat16()
    run, twin = (Run(device, stage, None, 0, torch.bfloat16) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            mean_square(run.model, batch).backward()
            run.optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mean_square(run.model, batch).backward()
    for _ in range(3):
        graph.replay()  # overwrites the sums, which held nothing when it was captured
        mean_square(twin.model, batch).backward()
        for mine, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        run.optimizer.step()
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        for mine, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream")  # once in a process
@pytest.mark.parametrize("how", ["module", "optimizer"])
def test_hooks_run_on_the_stream_of_the_forward(device, how):
    """Not on that of the sharding. With an optimizer alone the first step tells which it is."""
    torch.manual_seed(0)
    model = MLP(13)
    if how == "module":
        model = zero_ext.shard(model, 2)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    streams = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: streams.append(torch.accelerator.current_stream())
        )
    side, other = torch.Stream(device), torch.Stream(device)
    torch.accelerator.synchronize()
    for number, stream in enumerate([side, side, other, other]):
        streams.clear()
        with stream:
            mean_square(model, rank_data((4, 5), 0)).backward()
            optimizer.step()
        torch.accelerator.synchronize()
        if how == "module" or number % 2 == 1:
            assert streams and all(each == stream for each in streams)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_another_stream_is_given_comes_behind_a_step(device, stage):
    """Clipping, say, which writes to the sums that the step on this stream has yet to read."""
    run, twin = (Run(device, stage, None, 0, torch.float32) for _ in range(2))
    side = torch.Stream(device)
    for each in (twin, run):  # this one last, and nothing behind it on this stream
        each.backward(0)
        each.optimizer.step()
    with side:
        run.optimizer.clip_grad_norm_(1e-6)
    side.synchronize()
    torch.accelerator.synchronize()
    for mine, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        assert_bits(mine, theirs)


@pytest.mark.parametrize("how", ["step", "skipped_steps", "stats"])
def test_a_skipped_step_is_told_of_later(device, how):
    run = Run(device, 2, None, 0, torch.float32)
    run.step(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.backward(1, factor=float("nan"))
        run.optimizer.step()
        run.optimizer.zero_grad()
    torch.accelerator.synchronize()
    with pytest.warns(UserWarning, match=r"NaN or Inf, first in 'layers\.0\.weight' on rank 0"):
        if how == "step":
            run.step(2)
        elif how == "stats":
            assert run.optimizer.stats()["skipped_steps"] == 1
        else:
            assert run.optimizer.skipped_steps == 1
    assert run.optimizer.skipped_steps == 1


def test_raise_waits_and_updates_nothing(device):
    run = Run(device, 2, None, 0, torch.float32, nonfinite="raise")
    run.step(0)
    before = [p.detach().clone() for p in run.model.parameters()]
    run.backward(1, factor=float("nan"))
    with pytest.raises(RuntimeError, match="NaN or Inf"):
        run.optimizer.step()
    for parameter, value in zip(run.model.parameters(), before, strict=True):
        assert_bits(parameter.detach(), value)


def test_the_number_of_a_step_is_not_counted_when_it_is_skipped(device):
    run = Run(device, 2, None, 0, torch.float32)
    run.train(overflow_at=1)
    assert {run.optimizer.state[p]["step"].item() for p in run.model.parameters()} == {STEPS - 1}


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(5, 7)

    def forward(self, x, used):
        return sum(getattr(self, name)(x).square().mean() for name in used)


def steps_of_branches(device, make_optimizer, steps) -> tuple:
    """``steps``: of each the branches that it uses, and a factor of its loss."""
    model = zero_ext.shard(Branches().to(device), 2, bucket_mb=1)
    optimizer = make_optimizer(model.parameters())
    batch = rank_data((4, 5), 0).to(device)
    for used, factor in steps:
        (model(batch, used) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: zero_ext.optim.AdamW(p, lr=0.1),
        lambda p: zero_ext.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    ],
    ids=["AdamW", "SGD"],
)
@pytest.mark.parametrize("known", [True, False], ids=["told of", "in flight"])
def test_parameters_with_different_skipped_steps_have_their_own_counts(device, make, known):
    """As many steps for each, and not the same ones: the device has skipped one's alone."""
    both, nan = ("first", "second"), float("nan")
    steps = [(("first",), nan), (("second",), 1.0), (both, 1.0), (("first",), 1.0), (both, 1.0)]
    runs = []
    for where in (device, torch.device("cpu")):
        model, optimizer = steps_of_branches(where, make, steps[: 2 if known else None])
        if known:
            torch.accelerator.synchronize()
            batch = rank_data((4, 5), 0).to(where)
            for used, factor in steps[2:]:
                (model(batch, used) * factor).backward()
                optimizer.step()
                optimizer.zero_grad()
        runs.append([p.detach().cpu() for p in model.parameters()])
    for mine, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_loaded_state_is_waited_for_once(device):
    make = functools.partial(zero_ext.optim.AdamW, lr=0.1)
    both, first = ("first", "second"), ("first",)
    model, optimizer = steps_of_branches(device, make, [(both, 1.0)] * 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    batch = rank_data((4, 5), 0).to(device)

    def step(used):
        model(batch, used).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(first)
    with nobody_waits(device):
        step(first)
        step(both)
    counts = [optimizer.state[p]["step"].item() for p in model.parameters()]
    assert counts == [5.0, 5.0, 3.0, 3.0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_failed_backward_is_undone_behind_the_callers_stream(anywhere, rank, device, stage, late):
    """Which autograd has left when it destroys what failed."""
    default = torch.accelerator.current_stream()
    with torch.Stream(device):
        run, twin = (Run(device, stage, anywhere, rank, torch.bfloat16) for _ in range(2))
        for one in (run, twin):
            one.step(0)
            with one.model.no_sync():
                one.backward(1, 0)
        names = dict(run.model.named_parameters())
        parameter = names["layers.0.weight" if late else "layers.2.weight"]

        def fail(_):
            raise RuntimeError("on purpose")

        handle = parameter.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            run.backward(1, 1, factor=float("nan"))
        default.synchronize()  # an undoing there would come first
        handle.remove()
        for one in (run, twin):
            one.backward(1, 2)
            one.optimizer.step()
            one.optimizer.zero_grad()
            one.step(2)
        for mine, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
            assert_bits(zero_ext.full_tensor(mine).cpu(), zero_ext.full_tensor(theirs).cpu())
        assert run.optimizer.skipped_steps == twin.optimizer.skipped_steps == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_states_take_no_memory_of_the_device(anywhere, rank, device, stage):
    run = Run(device, stage, anywhere, rank, torch.bfloat16, offload_policy=OFFLOAD)
    run.step(0)
    stats = run.model.stats()
    assert stats["bytes_master"] == stats["bytes_grad"] == stats["bytes_optimizer_state"] == 0
    assert stats["bytes_offloaded"] > 0
    assert stats["bytes_held"] == stats["bytes_full"] + stats["bytes_bucket"]
    parameter = next(run.model.parameters())
    run.backward(1)
    assert run.optimizer.state[parameter]["exp_avg"].device.type == "cpu"
    assert parameter.grad.device.type == "cpu"


@DTYPES
def test_a_released_unit_leaves_no_memory_behind(anywhere, rank, device, dtype):
    """Over the steps of stage 3 what the device has handed out stays where it was."""
    if anywhere is None and dtype == torch.float32:
        pytest.skip("one rank does not release its only copy")
    memory = torch.get_device_module(device)
    run = Run(device, 3, anywhere, rank, dtype)
    held = []
    for number in range(12):
        run.step(number)
        gc.collect()
        torch.accelerator.synchronize()
        held.append(memory.memory_allocated())
    assert len(set(held[4:])) == 1


@pytest.mark.skipif(DIRECT, reason="parameters are kept there, for the other ranks to read")
class TestReleasedParametersWithMasters:
    """Stage 3 keeps no half-precision parameter between its uses: the master has all its bits."""

    def run(self, anywhere, rank, device, dtype=torch.bfloat16, **kwargs):
        return Run(device, 3, anywhere, rank, dtype, **kwargs)

    def values(self, run):
        """All parameters, as they are computed with, and their masters, on the host."""
        with run.model.summon_full_params():
            values = [p.detach().cpu() for p in run.model.parameters()]
        return values, [zero_ext.full_tensor(p).cpu() for p in run.model.parameters()]

    @HALVES
    def test_16_bytes_of_each_element_are_held(self, anywhere, rank, device, dtype):
        run = self.run(anywhere, rank, device, dtype)
        run.step(0)
        run.backward(1)
        held = run.model.stats()
        elements = held["bytes_master"] / 4
        assert held["bytes_full"] == held["bytes_shard"] == 0
        assert held["bytes_held"] - held["bytes_bucket"] == 16 * elements
        estimate = zero_ext.estimate_memory(
            MLP(13).to(dtype), 1 if anywhere is None else anywhere.size(), 3, bucket_mb=300 / 2**20
        )
        assert estimate["persistent"] == 16 * elements

    def test_fp32_and_frozen_parameters_of_one_rank_stay(self, device):
        """They have no other copy, and nobody else needs the memory of theirs."""
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 13, dtype=torch.bfloat16),
            torch.nn.Linear(13, 7, dtype=torch.bfloat16),
            torch.nn.Linear(7, 5),
        )
        model[1].requires_grad_(False)
        zero_ext.shard(model, 3, bucket_mb=1e-6)
        held = []

        def look(*_):
            held.append(model.stats()["bytes_full"])

        model[0].register_forward_hook(look, prepend=True)
        model[1].register_forward_hook(lambda module, args, out: out.float())
        optimizer = zero_ext.optim.AdamW(model.parameters())
        rest = model.stats()["bytes_full"]
        mean_square(model, rank_data((4, 5), 0).to(torch.bfloat16)).backward()
        optimizer.step()
        assert model[1].weight.isfinite().all() and model[2].weight.isfinite().all()
        with pytest.raises(RuntimeError, match="of this unit are released"):
            model[0].weight.clone()
        assert rest > 0 and held == [rest + 2 * (96 + 32)]  # padded to 32 elements each
        with model.summon_full_params(writeback=False):
            before = [p.detach().clone() for p in model.parameters()]
            for parameter in model.parameters():
                parameter.data.add_(1)
        with model.summon_full_params():
            for parameter, value in zip(model.parameters(), before, strict=True):
                assert_bits(parameter.detach(), value)

    def test_one_rank_holds_nothing_but_the_root_for_the_loss(self, device):
        """Which is where a step needs most memory. Blocks are gathered ahead before and after."""
        model = Blocks(dtype=torch.bfloat16)
        unit = sum(-(-p.numel() // 32) * 32 * 2 for p in model.head.parameters())
        zero_ext.shard(model, 3, bucket_mb=1e-6, prefetch_mb=unit / 2**20)
        optimizer = zero_ext.optim.AdamW(model.parameters())
        seen = []

        def look(*_):
            seen.append(model.stats()["bytes_full"] // unit)

        for block in model.blocks:
            block.register_forward_hook(look, prepend=True)
            block.weight.register_hook(look)
        for step in range(3):
            seen.clear()
            output = model(rank_data((2, 37), 0, step).to(torch.bfloat16))
            output.register_hook(look)
            look()
            output.float().square().mean().backward()
            look()
            optimizer.step()
            optimizer.zero_grad()
        forward, backward = [3] * 5 + [2], [3] * 5 + [2]
        assert seen == [*forward, 1, 1, *backward, 0]

    def test_a_thawed_parameter_has_a_master_alone_from_then_on(self, device):
        model = MLP(13).to(torch.bfloat16)
        model.requires_grad_(False)
        model.layers[2].requires_grad_(True)
        zero_ext.shard(model, 3, bucket_mb=1e-6)
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
        before = model.layers[0].weight.detach().clone()
        model.requires_grad_(True)
        for number in range(2):
            mean_square(model, rank_data((4, 5), 0, number).to(torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="of this unit are released"):
            model.layers[0].weight.clone()
        with model.summon_full_params():
            assert (model.layers[0].weight != before).any()

    def test_what_is_written_goes_into_the_masters_and_nothing_else_changes(
        self, anywhere, rank, device
    ):
        run = self.run(anywhere, rank, device)
        run.step(0)
        values, masters = self.values(run)
        with run.model.summon_full_params(writeback=False):
            for parameter in run.model.parameters():
                parameter.data.fill_(3)
        for now, then in zip(self.values(run), (values, masters), strict=True):
            for value, expected in zip(now, then, strict=True):
                assert_bits(value, expected)
        assert any((m != v).any() for m, v in zip(masters, values, strict=True))  # they have more
        with run.model.summon_full_params():
            for parameter in run.model.parameters():
                parameter.data.view(-1)[::3] = 0.5
        for value, master in zip(values, masters, strict=True):
            value.view(-1)[::3] = 0.5
            changed = value != master.to(value.dtype)
            master[changed] = value[changed].float()
        for now, then in zip(self.values(run), (values, masters), strict=True):
            for value, expected in zip(now, then, strict=True):
                assert_bits(value, expected)

    def test_a_write_inside_a_forward_and_a_replaced_storage_are_taken_over(
        self, anywhere, rank, device
    ):
        run = self.run(anywhere, rank, device)
        layer = run.model.layers[1]
        hook = layer.register_forward_pre_hook(lambda module, _: module.weight.data.fill_(0.25))
        run.backward(0)
        hook.remove()
        assert_bits(zero_ext.full_tensor(layer.weight).cpu(), torch.full((13, 13), 0.25).cpu())
        with run.model.summon_full_params():
            layer.weight.data = torch.full_like(layer.weight, 0.75)
        assert_bits(zero_ext.full_tensor(layer.weight).cpu(), torch.full((13, 13), 0.75).cpu())
        exact = torch.full((13, 13), 1 + 2**-20)  # more than the parameter can show
        zero_ext.set_full_param(layer.weight, exact)
        assert_bits(zero_ext.full_tensor(layer.weight).cpu(), exact.cpu())
        run.backward(1)
        assert_bits(zero_ext.full_tensor(layer.weight).cpu(), exact.cpu())

    def test_the_shards_of_a_state_dict_are_the_parameters_while_somebody_has_them(
        self, anywhere, rank, device
    ):
        run, twin = (self.run(anywhere, rank, device) for _ in range(2))
        run.step(0)
        twin.step(0)
        state = run.model.state_dict()
        # Torch remembers that Python has seen them.
        assert len([own_values(v).untyped_storage() for v in state.values()]) == 6
        assert run.model.stats()["bytes_shard"] == run.model.stats()["bytes_master"] // 2

        def assert_shown(state):
            expected, _ = self.values(twin)
            for value, shown in zip(expected, state.values(), strict=True):
                assert_bits(whole(shown).cpu(), value)

        assert_shown(state)
        run.step(1)
        twin.step(1)
        assert twin.model.stats()["bytes_shard"] == 0
        assert_shown(state)
        for each in (state, twin.model.state_dict()):
            own_values(each["layers.0.weight"]).fill_(0.125)
        del state
        for each in (run, twin):
            each.model.reshard()  # tells the other ranks
            each.step(2)
        for mine, theirs in zip(self.values(run), self.values(twin), strict=True):
            for value, expected in zip(mine, theirs, strict=True):
                assert_bits(value, expected)
        assert run.model.stats()["bytes_shard"] == 0

    def test_masters_may_leave_while_the_model_is_used(self, anywhere, rank, device):
        run, twin = (self.run(anywhere, rank, device) for _ in range(2))
        for each in (run, twin):
            each.step(0)
        states = ["master", "grad", "optimizer_state"]
        zero_ext.offload_states(run.model, include=states)
        held = run.model.stats()
        assert held["bytes_held"] == held["bytes_shard"] + held["bytes_bucket"] > 0
        with torch.no_grad():
            assert_bits(run.loss_of(run.model, 5), twin.loss_of(twin.model, 5))
        with run.model.summon_full_params():
            run.model.layers[0].bias.data.fill_(2)
        with twin.model.summon_full_params():
            twin.model.layers[0].bias.data.fill_(2)
        zero_ext.reload_states(run.model)
        assert run.model.stats()["bytes_shard"] == 0
        for each in (run, twin):
            each.step(1)
        for mine, theirs in zip(self.values(run), self.values(twin), strict=True):
            for value, expected in zip(mine, theirs, strict=True):
                assert_bits(value, expected)


def test_two_devices_in_one_model_are_refused(device):
    model = MLP()
    model.layers[1].to("cpu")
    problem = rf"'layers\.1\.weight' is on cpu, others are on {device.type}"
    with pytest.raises(ValueError, match=problem):
        zero_ext.shard(model)


def test_host_copies_are_for_parameters_on_the_cpu(device):
    model = MLP().to(device)
    with pytest.raises(ValueError, match=f"host_copies=True with parameters on {device.type}"):
        zero_ext.shard(model, 3, host_copies=True)
    model = zero_ext.shard(model, 2, host_copies=True)  # no other stage has any
    assert model.stats()["gathers_between_hosts"] == 0


@STAGES
def test_states_can_leave_the_device_for_a_while(anywhere, rank, device, stage):
    memory = torch.get_device_module(device)
    run, twin = (Run(device, stage, anywhere, rank, torch.bfloat16) for _ in range(2))
    for each in (run, twin):
        each.step(0)
        each.backward(1)
    gc.collect()
    torch.accelerator.synchronize()
    held, before = run.model.stats(), memory.memory_allocated()
    zero_ext.offload_states(run.model)
    torch.accelerator.synchronize()
    away = run.model.stats()
    stays = "shard" if DIRECT else ""  # where the other ranks read it
    names = {"full", "shard", "master", "grad", "optimizer_state"} - {stays}
    moved = sum(held[f"bytes_{name}"] for name in names)
    assert sum(away[f"bytes_{name}"] for name in names) == 0
    assert away["bytes_offloaded"] == moved
    assert before - memory.memory_allocated() >= moved
    with pytest.raises(RuntimeError, match="offloaded"):
        run.model(torch.zeros(1, 5, device=device, dtype=torch.bfloat16))
    zero_ext.reload_states(run.model)
    assert run.model.stats() == held | {"bytes_peak": run.model.stats()["bytes_peak"]}
    for each in (run, twin):
        each.optimizer.step()
        each.optimizer.zero_grad()
        each.step(2)
    pairs = itertools.zip_longest(run.model.parameters(), twin.model.parameters())
    for mine, theirs in pairs:
        assert_bits(zero_ext.full_tensor(mine), zero_ext.full_tensor(theirs))


@STAGES
def test_gradients_leave_the_device_with_zero_grad(anywhere, rank, device, stage):
    """Nothing is held before the first gradient and after zero_grad."""
    memory = torch.get_device_module(device)
    run = Run(device, stage, anywhere, rank, torch.bfloat16)
    run.step(0)
    assert run.model.stats()["bytes_grad"] == 0
    gc.collect()
    torch.accelerator.synchronize()
    before = memory.memory_allocated()
    run.backward(1)
    run.backward(1)  # onto a sum, which is kept once more
    held = run.model.stats()["bytes_grad"]
    assert held > 0
    torch.accelerator.synchronize()
    assert memory.memory_allocated() >= before + held
    run.optimizer.step()
    run.optimizer.zero_grad()
    torch.accelerator.synchronize()
    assert memory.memory_allocated() <= before and run.model.stats()["bytes_grad"] == 0


@STAGES
def test_offloaded_gradients_are_not_written_to(device, stage):
    run = Run(device, stage, None, 0, torch.bfloat16)
    run.backward(0)
    parameter = next(run.model.parameters())
    expected = zero_ext.full_grad(parameter)
    zero_ext.offload_states(run.model, include=["grad"])
    with pytest.raises(RuntimeError, match="offloaded"):
        zero_ext.set_full_grad(parameter, torch.ones(parameter.shape))
    with pytest.raises(RuntimeError, match="offloaded"):
        run.optimizer.zero_grad(set_to_none=False)
    zero_ext.reload_states(run.model)
    assert_bits(zero_ext.full_grad(parameter), expected)


@STAGES
def test_a_stock_grad_scaler_unscales_offloaded_gradients(anywhere, rank, device, stage):
    """Its copies of the scale to the host are late."""
    sides = []
    for kind, where in ((Run, device), (RunOnTheCPU, torch.device("cpu"))):
        run = kind(device, stage, anywhere, rank, torch.bfloat16, offload_policy=OFFLOAD)
        scaler = torch.amp.GradScaler(where.type, init_scale=2.0**10, growth_interval=2)
        scaler.scale(torch.zeros(1, device=where))  # makes its scale
        for number in range(STEPS):
            overflow = float("inf") if (number, rank) == (2, 0) else 1.0
            run.backward(number, factor=scaler.get_scale() * overflow)
            scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        sides.append(
            (scaler.get_scale(), [zero_ext.full_tensor(p) for p in run.model.parameters()])
        )
    (scale, mine), (expected_scale, theirs) = sides
    assert scale == expected_scale == 2.0**10
    for value, expected in zip(mine, theirs, strict=True):
        assert_bits(value.cpu(), expected)


@STAGES
def test_offloaded_gradients_of_one_rank_are_plain_tensors_to_everybody(device, stage):
    run = Run(device, stage, None, 0, torch.bfloat16, offload_policy=OFFLOAD)
    run.backward(0)
    for parameter in run.model.parameters():
        gradient = parameter.grad
        assert gradient.device.type == "cpu" and gradient.shape == parameter.shape
        saved = io.BytesIO()
        torch.save(gradient, saved)
        saved.seek(0)
        results = [
            gradient.clone(),
            copy.deepcopy(gradient),
            torch.load(saved, weights_only=True),
            gradient + torch.zeros(gradient.shape, device="cpu"),
            torch._foreach_mul([gradient], 1.0)[0],
        ]
        for result in results:
            assert type(result) is torch.Tensor
            assert_bits(result, gradient)
    # What is written counts, as it does without offload.
    expected = [2 * p.grad for p in run.model.parameters()]
    for parameter, twice in zip(run.model.parameters(), expected, strict=True):
        parameter.grad.mul_(2)
        assert_bits(zero_ext.full_grad(parameter).cpu(), twice)


@STAGES
@pytest.mark.parametrize("torchs", [torch.optim.NAdam, torch.optim.ASGD])
def test_states_of_a_wrapped_optimizer_leave_the_device_too(anywhere, rank, device, stage, torchs):
    memory = torch.get_device_module(device)
    wrapped = functools.partial(zero_ext.optim.wrap, torchs)
    run, twin = (
        Run(device, stage, anywhere, rank, torch.float32, optimizer=wrapped) for _ in range(2)
    )
    for each in (run, twin):
        each.step(0)
    torch.accelerator.synchronize()
    saved = copy.deepcopy(run.optimizer.state_dict())
    parameters, engine = [*run.model.parameters()], twin.optimizer.zero_core.handle.engine
    shown = [v for p in parameters for v in run.optimizer.state[p].values() if torch.is_tensor(v)]
    states = [v.to_local() if hasattr(v, "to_local") else v for v in shown]
    expected = [state.cpu() for state in states]
    num_bytes = sum(state.nbytes for state in states if state.device.type != "cpu")
    assert num_bytes > 4 * sum(engine.master_slice(i).numel() for i in range(len(parameters)))
    gc.collect()
    before = memory.memory_allocated()
    zero_ext.offload_states(run.model, include=["optimizer_state"])
    zero_ext.offload_states(run.optimizer, include=["optimizer_state"])
    assert before - memory.memory_allocated() >= num_bytes
    for read in (states[0].clone, lambda: run.optimizer.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match=r"offloaded. Call zero_ext\.reload_states\(\)"):
            read()
    zero_ext.reload_states(run.model)
    for state, value in zip(states, expected, strict=True):
        assert_bits(state.cpu(), value)
    for each in (run, twin):
        each.step(1)
    pairs = zip(run.model.parameters(), twin.model.parameters(), strict=True)
    for mine, theirs in pairs:
        assert_bits(zero_ext.full_tensor(mine), zero_ext.full_tensor(theirs))


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 2])
def test_the_last_step_reaches_all_ranks_although_the_optimizer_is_deleted(
    stage, device, mesh, rank, world
):
    """The engine's process groups go with it; what they have queued must not."""
    with torch.device("cpu"):
        model, plain = MLP(13), MLP(13)
    model.to(device)
    optimizer = zero_ext.optim.SGD(
        model.parameters(), lr=0.5, stage=stage, process_group=mesh.get_group()
    )
    batches = rank_batches((4, 5), world)[0]
    mean_square(model, batches[rank].to(device)).backward()
    optimizer.step()
    del optimizer
    gc.collect()
    for batch in batches:
        (mean_square(plain, batch.cpu()) / world).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        expected = q.detach() - 0.5 * q.grad
        torch.testing.assert_close(p.detach().cpu(), expected, rtol=1e-5, atol=1e-6)


def test_the_example_trains_on_it(device, tmp_path, monkeypatch):
    """It names the device wherever it makes a tensor."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"line {i * i}\n" for i in range(20_000)))
    sizes = "--size tiny --steps 2 --sequence 16 --batch-size 2 --text text.txt --out run".split()
    monkeypatch.setattr(sys, "argv", ["train_lm.py", "--device", str(device), *sizes])
    with torch.device("cpu"):
        importlib.import_module("train_lm").main()
    assert len(json.loads(Path("run/log.json").read_text())["loss"]) == 2


@pytest.mark.dist
@pytest.mark.lagged
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@REDUCTIONS
def test_no_backward_is_the_first_to_send_a_kind_of_message(mesh, rank, device, stage, reduction):
    """NCCL connects at the first one: there the host waits for other ranks, which may be in a step
    that serves this backward."""
    if not OWN_BACKEND:
        pytest.skip("through host memory")
    import lagged_device

    before = lagged_device.late_connections()
    run = Run(device, stage, mesh, rank, torch.bfloat16, reduction=reduction)
    for step in range(2):
        run.step(step)
    assert lagged_device.late_connections() == before


@pytest.mark.dist
@pytest.mark.lagged
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_backend_s_groups_end_when_all_ranks_have_ended(mesh, rank, device, stage):
    """What a rank has sent over a network may be on its way when its device has finished."""
    if not OWN_BACKEND:
        pytest.skip("through host memory")
    import lagged_device

    run = Run(device, stage, mesh, rank, torch.bfloat16)
    run.step(0)
    torch.accelerator.synchronize()
    dist.barrier()
    before = lagged_device.aborts()
    if rank == 1:
        dist.barrier()
    begin = time.monotonic()
    del run
    gc.collect()
    if rank != 1:
        assert lagged_device.aborts() == before, "nobody waits for another rank"
        dist.barrier()
    while lagged_device.aborts() == before:
        assert time.monotonic() - begin < 15
        time.sleep(0.001)
    ended = time.monotonic()
    begins = gather_objects(begin)
    assert ended >= max(begins)
