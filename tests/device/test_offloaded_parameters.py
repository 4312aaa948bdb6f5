"""Stage 3's parameters in host memory between their uses: the bits, the memory, who waits."""

import contextlib
import gc

import pytest
import torch
from harness import DIRECT, DTYPES, Blocks, assert_bits, mean_square, rank_data
from memory_formula import ranges_of
from reference import own_values, whole
from torch.distributed.fsdp import CPUOffloadPolicy

import zero_ext
from zero_ext.engine.options import ParametersOffloadPolicy, StatesOffloadPolicy

pytestmark = pytest.mark.device
SEPARATE = 1e-6  # MiB: every module is a unit
WIDTH = 37
KINDS = [CPUOffloadPolicy, StatesOffloadPolicy, ParametersOffloadPolicy]
POLICIES = pytest.mark.parametrize("policy", KINDS, ids=["all", "states", "parameters"])


@pytest.fixture(autouse=True)
def in_order(device):
    """Nothing was written after its release or behind its end."""
    yield
    if device.type == "lagged":
        import lagged_device

        assert lagged_device.faults() == []


class Run:
    """A model with one frozen unit among seven, and its optimizer."""

    def __init__(self, mesh, rank, policy, dtype=torch.bfloat16, optimizer=None, **kwargs):
        self.rank, self.dtype = rank, dtype
        self.model = Blocks(WIDTH, dtype=dtype)
        self.model.blocks[2].requires_grad_(False)
        arguments = {"bucket_mb": SEPARATE, "reduction": "exchange", **kwargs}
        policy = policy and policy()
        zero_ext.shard(self.model, 3, mesh=mesh, offload_policy=policy, **arguments)
        self.optimizer = (optimizer or zero_ext.optim.AdamW)(self.model.parameters(), lr=0.05)

    def loss(self, step=0, micro=0):
        batch = rank_data((3, WIDTH), self.rank, step, micro)
        return mean_square(self.model, batch.to(self.dtype))

    def step(self, number, micros=2):
        for micro in range(micros):
            last = micro == micros - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                (self.loss(number, micro) / micros).backward()
        norm = self.optimizer.clip_grad_norm_(0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def values(self):
        """Losses without a graph, parameters as they are computed with, masters, states."""
        with torch.no_grad():
            values = [self.loss(99)]
        with self.model.summon_full_params(writeback=False):
            values += [p.detach().clone() for p in self.model.parameters()]
        values += [zero_ext.full_tensor(p) for p in self.model.parameters()]
        values += [value.clone() for _, value in zero_ext.iter_full_params(self.model)]
        values += [whole(v) for v in self.model.state_dict().values()]
        for p, states in self.optimizer.state.items():
            values += [zero_ext.full_state(self.optimizer, p, name) for name in states]
        return [value.cpu() for value in values]


def assert_same(run, twin):
    for mine, theirs in zip(run.values(), twin.values(), strict=True):
        assert_bits(mine, theirs)


@DTYPES
@POLICIES
def test_it_changes_no_bit(anywhere, rank, device, dtype, policy):
    run, twin = (Run(anywhere, rank, each, dtype) for each in (policy, None))
    for number in range(3):
        assert run.step(number, micros=1) == twin.step(number, micros=1)
        assert_same(run, twin)


@POLICIES
def test_micro_batches_and_a_frozen_unit_that_is_trained_later(anywhere, rank, device, policy):
    run, twin = (Run(anywhere, rank, each) for each in (policy, None))
    for number in range(3):
        for each in (run, twin):
            each.model.blocks[2].requires_grad_(number > 0)
            each.step(number)
    assert_same(run, twin)


@POLICIES
def test_a_checkpoint_and_a_model_made_on_meta(anywhere, rank, device, policy, path):
    run = Run(anywhere, rank, policy)
    run.step(0)
    zero_ext.checkpoint.save(path, run.model, run.optimizer)
    for each in (policy, None):
        other = Run(anywhere, rank, each)
        zero_ext.checkpoint.load(path, other.model, other.optimizer)
        assert_same(other, run)
        other.model.load_state_dict(run.model.state_dict())
        assert_same(other, run)
    with torch.device("meta"):
        model = Blocks(WIDTH, dtype=torch.bfloat16)
    made = zero_ext.shard(
        model,
        3,
        mesh=anywhere,
        offload_policy=policy(),
        param_init_fn=lambda module: [p.data.fill_(0.5) for p in module.parameters(recurse=False)],
    )
    assert all((zero_ext.full_tensor(p) == 0.5).all() for p in made.parameters())


@POLICIES
def test_what_is_written_is_kept(anywhere, rank, device, policy):
    """In a forward, which returns before the device has run it; into whole parameters; into the
    shards of a state_dict; and by value."""

    def write(parameter, value):
        parameter.data.fill_(value)

    run, twin = (Run(anywhere, rank, each) for each in (policy, None))
    for each in (run, twin):
        each.step(0)
        blocks = each.model.blocks
        hooks = [
            block.register_forward_pre_hook(lambda module, _: write(module.weight, 0.25))
            for block in blocks[1:3]  # one of which is frozen
        ]
        each.loss(1).backward()
        for hook in hooks:
            hook.remove()
        with each.model.summon_full_params():
            blocks[3].weight.data.view(-1)[::3] = 0.5
        state = each.model.state_dict()
        with torch.no_grad():
            each.loss(2)
        own_values(state["blocks.4.weight"]).fill_(0.125)
        own_values(state["blocks.2.weight"]).fill_(0.375)
        del state
        each.model.reshard()
        zero_ext.set_full_param(blocks[5].weight, torch.full((WIDTH, WIDTH), 0.75))
        each.optimizer.zero_grad()
        each.step(3)
    assert_same(run, twin)


@pytest.mark.parametrize("optimizer", ["NAdam", "Adafactor", "Muon"])
@DTYPES
def test_other_optimizers(anywhere, rank, device, optimizer, dtype):
    def make(parameters, lr):
        if optimizer == "Muon":
            return zero_ext.optim.Muon([p for p in parameters if p.dim() == 2], lr=lr)
        kind = getattr(torch.optim, optimizer)
        return zero_ext.optim.wrap(kind, parameters, lr=lr)

    run, twin = (
        Run(anywhere, rank, each, dtype, optimizer=make) for each in (CPUOffloadPolicy, None)
    )
    for number in range(2):
        for each in (run, twin):
            each.loss(number).backward()
            each.optimizer.step()
            each.optimizer.zero_grad()
    for mine, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        values = [zero_ext.full_tensor(p).cpu() for p in (mine, theirs)]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)


def bytes_on(device):
    gc.collect()
    torch.accelerator.synchronize()
    return torch.get_device_module(device).memory_allocated()


@pytest.mark.lagged  # which counts what was asked for
@DTYPES
def test_the_device_holds_what_is_gathered_and_nothing_else(anywhere, rank, device, dtype):
    before = bytes_on(device)
    run = Run(anywhere, rank, CPUOffloadPolicy, dtype, prefetch_mb=0)
    flags = bytes_on(device) - before
    assert flags < 512  # of NaN
    before += flags
    ranks = 1 if anywhere is None else anywhere.size()
    share, ranges, itemsize = ranges_of(run.model, [["head.weight", "head.bias"]], ranks, 3)[0]
    seen = []

    def look(*_):
        seen.append((bytes_on(device) - before, run.model.stats()["bytes_full"]))

    for block in run.model.blocks:
        block.register_forward_pre_hook(look)
    with torch.no_grad():
        run.model(torch.zeros(0, WIDTH, dtype=dtype))  # no memory for activations
    assert len(seen) == 6 and all(held == full for held, full in seen)
    assert {full for _, full in seen} == {2 * share * ranges * itemsize}  # the root's, and its own
    run.step(0)
    stats = run.model.stats()
    assert stats["bytes_held"] == stats["bytes_bucket"]
    assert bytes_on(device) - before <= stats["bytes_bucket"]
    assert stats["bytes_offloaded"] > 0


def test_a_frozen_model_is_in_host_memory_without_offloaded_states(anywhere, rank, device):
    """As a base model beside adapters is."""
    before = bytes_on(device)
    model = Blocks(WIDTH, dtype=torch.bfloat16).requires_grad_(False)
    policy = ParametersOffloadPolicy()
    zero_ext.shard(model, 3, mesh=anywhere, bucket_mb=SEPARATE, offload_policy=policy)
    with torch.no_grad():
        model(rank_data((3, WIDTH), rank).bfloat16())
    assert bytes_on(device) <= before + 1024  # flags
    ranks = 1 if anywhere is None else anywhere.size()
    expected = zero_ext.estimate_memory(model, ranks, 3, bucket_mb=SEPARATE, offload_policy=policy)
    assert model.stats()["bytes_offloaded"] == expected["offloaded"] >= 7 * 2 * 38 * 37 // ranks


@POLICIES
@DTYPES
def test_the_estimate_is_what_is_held(anywhere, rank, device, dtype, policy):
    model = Blocks(WIDTH, dtype=dtype)
    model.blocks[2].requires_grad_(False)
    ranks = 1 if anywhere is None else anywhere.size()
    estimate = zero_ext.estimate_memory(
        model,
        ranks,
        3,
        bucket_mb=SEPARATE,
        offload_policy=policy(),
        reduction="exchange",
        peer_memory=DIRECT and ranks > 1,
    )
    run = Run(anywhere, rank, policy, dtype)
    run.loss().backward()
    run.optimizer.step()
    stats = run.model.stats()
    for what in ("full", "shard", "master", "grad", "optimizer_state"):
        assert stats[f"bytes_{what}"] == estimate[what], what
    assert stats["bytes_offloaded"] == estimate["offloaded"]
    assert 0 <= stats["bytes_bucket"] <= estimate["buckets"]
    assert stats["bytes_peak"] <= sum(estimate[k] for k in ("persistent", "gathered", "buckets"))


def test_units_are_copied_ahead_and_nobody_waits(device):
    run = Run(None, 0, CPUOffloadPolicy, prefetch_mb=None)
    seen = []
    unit = 2 * (-(-WIDTH * WIDTH // 32) * 32 + 64)
    with torch.no_grad():
        run.loss()
        for block in run.model.blocks:
            block.register_forward_pre_hook(
                lambda *_: seen.append(run.model.stats()["bytes_full"] // unit)
            )
        batch = rank_data((3, WIDTH), 0).to(torch.bfloat16)
        if device.type == "lagged":
            import lagged_device

            waits = lagged_device.host_waits()
        run.model(batch)
        if device.type == "lagged":
            assert lagged_device.host_waits() == waits
    assert min(seen) >= 2  # the root's and its own; most have the next one, too
    assert max(seen) >= 3


@pytest.mark.lagged
def test_a_graph_cannot_be_captured(device):
    """The host updates shards, and would not wait for a replay that copies them."""
    import lagged_device

    run, twin = (Run(None, 0, CPUOffloadPolicy) for _ in range(2))
    run.step(0)
    twin.step(0)
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    batch = rank_data((3, WIDTH), 0).bfloat16()
    message = r"unit '.*in host memory were used while a graph is captured"
    with side, torch.no_grad(), lagged_device.capture(), pytest.raises(RuntimeError, match=message):
        run.model(batch)
    run.step(1)
    twin.step(1)
    assert_same(run, twin)


@POLICIES
def test_phases_without_the_model_and_a_plain_module_again(anywhere, rank, device, policy):
    run, twin = (Run(anywhere, rank, each) for each in (policy, None))
    for each in (run, twin):
        each.step(0)
        zero_ext.offload_states(each.model)
        zero_ext.reload_states(each.model)
        each.step(1)
    assert_same(run, twin)
    plain = [zero_ext.unwrap(each.model) for each in (run, twin)]
    for mine, theirs in zip(*(m.parameters() for m in plain), strict=True):
        assert mine.device.type == device.type
        assert_bits(mine.detach(), theirs.detach())


@pytest.mark.parametrize("states", ["cpu", "none"])
def test_a_deepspeed_configuration_says_it(anywhere, rank, device, states):
    def run(device_of_parameters):
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": states},
                "offload_param": {"device": device_of_parameters},
            },
        }
        model = Blocks(WIDTH)
        model.blocks[2].requires_grad_(False)
        mesh = {"mesh": anywhere, "reduction": "exchange", "bucket_mb": SEPARATE}
        engine, *_ = zero_ext.initialize(model=model, config=config, **mesh)
        for step in range(2):
            engine.backward(mean_square(engine, rank_data((3, WIDTH), rank, step).bfloat16()))
            engine.step()
        return engine.module

    offloaded, plain = run("cpu"), run("none")
    for mine, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(mine).cpu(), zero_ext.full_tensor(theirs).cpu())
    assert offloaded.stats()["bytes_full"] + offloaded.stats()["bytes_shard"] == 0
    assert plain.stats()["bytes_full"] + plain.stats()["bytes_shard"] > 0
