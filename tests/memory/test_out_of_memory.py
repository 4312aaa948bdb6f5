"""Memory runs out, wherever it may: what raised can be done again, and nothing is lost or done
twice.

The device "lagged" lets any one allocation fail. All ranks fail at the same one.
"""

import contextlib
import functools
import itertools

import lagged_device
import pytest
import torch
from harness import MLP, assert_bits, mean_square, rank_data
from reference import gradients_of
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import zero_ext

pytestmark = [
    pytest.mark.device,
    pytest.mark.lagged,
    pytest.mark.filterwarnings("ignore:zero_ext.*skipped"),
]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def combination(stage: int, offload: str = "", marks=()):
    return pytest.param(
        stage, CPUOffloadPolicy() if offload else None, id=f"{stage}{offload}", marks=marks
    )


# Each stage, and states in either place, but every pair only when there is time.
STAGES_AND_OFFLOAD = pytest.mark.parametrize(
    "stage, offload",
    [
        combination(0),
        combination(0, "offload", pytest.mark.slow),
        combination(1, marks=pytest.mark.slow),
        combination(1, "offload"),
        combination(2),
        combination(2, "offload", pytest.mark.slow),
        combination(3),
        combination(3, "offload"),
    ],
)


@pytest.fixture(autouse=True)
def in_order():
    """Nothing was written after its release or behind its end."""
    yield
    assert lagged_device.faults() == []


def out_of_memory(act, number: int) -> BaseException | None:
    """What ``act`` raises if one allocation fails, after ``number`` others."""
    lagged_device.fail_after(number)
    try:
        act()
    except torch.OutOfMemoryError as error:
        return error  # with its traceback, and so with all that it refers to
    finally:
        lagged_device.fail_after(-1)
    return None


class Recomputed(MLP):
    """Each layer in a reentrant checkpoint, which runs a backward of its own inside the other."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


class Run:
    def __init__(self, device, stage, mesh, rank, offload=None, model=MLP):
        self.stage, self.mesh, self.rank, self.offload = stage, mesh, rank, offload
        torch.manual_seed(0)
        with torch.device("cpu"):
            self.model = model(13).to(torch.bfloat16)
        self.model.to(device)
        self.optimizer = None

    def shard(self):
        return zero_ext.shard(
            self.model,
            self.stage,
            mesh=self.mesh,
            bucket_mb=300 / 2**20,
            offload_policy=self.offload,
        )

    def make_optimizer(self):
        self.optimizer = zero_ext.optim.AdamW(self.model.parameters(), lr=0.05, max_grad_norm=0.1)

    def wrap_optimizer(self):
        self.optimizer = zero_ext.optim.wrap(torch.optim.NAdam, self.model.parameters(), lr=0.05)

    def make_optimizer_alone(self, first: int | None = None):
        self.optimizer = zero_ext.optim.AdamW(
            list(self.model.parameters())[:first],
            lr=0.05,
            stage=self.stage,
            bucket_mb=300 / 2**20,
            offload_policy=self.offload,
        )

    def make_optimizer_of_two(self):
        self.make_optimizer_alone(2)

    def others(self):
        return list(self.model.parameters())[2:]

    def add_others(self):
        self.optimizer.add_param_group({"params": self.others()})

    def freeze_others(self):
        for parameter in self.others():
            parameter.requires_grad_(False)

    def thaw_others(self):
        for parameter in self.others():
            parameter.requires_grad_(True)

    def loss(self, number=0):
        return mean_square(self.model, rank_data((4, 5), self.rank, number).to(torch.bfloat16))

    def parts(self, number):
        losses = []
        return {
            "forward": lambda: losses.append(self.loss(number)),
            "backward": lambda: losses[-1].backward(),
            "step": self.optimizer.step,
        }

    def step(self, number=0):
        self.loss(number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_same(run: Run, twin: Run, context="") -> None:
    __tracebackhide__ = True
    pairs = zip(run.model.named_parameters(), twin.model.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        assert_bits(zero_ext.full_tensor(mine), zero_ext.full_tensor(theirs), f"{name} {context}")


@STAGES_AND_OFFLOAD
@pytest.mark.world(max=2)
@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_anywhere_in_a_step(anywhere, rank, device, stage, offload, phase):
    assert_repeatable(*(Run(device, stage, anywhere, rank, offload) for _ in range(2)), phase)


@STAGES
@pytest.mark.world(max=2)
def test_anywhere_in_a_backward_with_inner_ones(anywhere, rank, device, stage):
    assert_repeatable(
        *(Run(device, stage, anywhere, rank, model=Recomputed) for _ in range(2)), "backward"
    )


def assert_repeatable(run: Run, twin: Run, phase: str) -> None:
    """Of each step one part fails, each time at another allocation, and is done again."""
    __tracebackhide__ = True
    for each in (run, twin):
        each.shard()
        each.make_optimizer()
    for number in itertools.count():  # a step for each allocation
        parts = run.parts(number)
        failed = None
        for name, part in parts.items():
            if name != phase:
                part()
                continue
            failed = out_of_memory(part, number)
            if failed and name == "backward":
                parts["forward"]()  # a part of its graph is gone
            if failed:
                part()
        run.optimizer.zero_grad()
        twin.step(number)
        assert_same(run, twin, f"after allocation {number}")
        if not failed:
            break
    # With offload, a step only uses memory that it has.
    assert number > 5 or (run.offload and phase == "step")


@STAGES_AND_OFFLOAD
@pytest.mark.world(max=2)
@pytest.mark.parametrize(
    "local",
    [
        pytest.param((), id=""),
        pytest.param((0,), id="first_local", marks=pytest.mark.slow),
        pytest.param((0, 1), id="both_local"),
    ],
)
def test_anywhere_in_the_second_backward_of_a_step(anywhere, rank, device, stage, offload, local):
    """What it would have been added to is as before. Those in ``local`` run in ``no_sync()``."""

    def backward(run: Run, loss: torch.Tensor, micro: int) -> None:
        with run.model.no_sync() if micro in local else contextlib.nullcontext():
            loss.backward()

    run, twin = (Run(device, stage, anywhere, rank, offload) for _ in range(2))
    for each in (run, twin):
        each.shard()
        each.make_optimizer()
    for number in itertools.count():
        before = {}
        failed = None
        for micro in range(3):
            backward(twin, twin.loss(3 * number + micro), micro)
            loss = run.loss(3 * number + micro)
            if micro != 1:
                backward(run, loss, micro)
                before = before or gradients_of(run.model)
                continue
            failed = out_of_memory(functools.partial(backward, run, loss, micro), number)
            if failed:
                run.model.stats()  # once the failure has been heard of
                for name, gradient in gradients_of(run.model).items():
                    assert (gradient is None) == (before[name] is None), name
                    if gradient is not None:
                        assert_bits(gradient, before[name], name)
                backward(run, run.loss(3 * number + micro), micro)
        for name, gradient in gradients_of(run.model).items():
            expected = zero_ext.full_grad(twin.model.get_parameter(name))
            assert_bits(gradient, expected, f"{name} after allocation {number}")
        for each in (run, twin):
            each.optimizer.step()
            each.optimizer.zero_grad()
        assert_same(run, twin, f"after allocation {number}")
        if not failed:
            break
    assert number > 5


CHANGES = {  # what was done before, and what memory runs out for
    "module": ([], "shard"),
    "optimizer": (["shard"], "make_optimizer"),
    "wrapped optimizer": (["shard"], "wrap_optimizer"),
    "optimizer alone": ([], "make_optimizer_alone"),
    "added group": (["make_optimizer_of_two"], "add_others"),
    "unfrozen": (["freeze_others", "shard", "make_optimizer", "step", "thaw_others"], "step"),
}
LONGER = ("wrapped optimizer", "optimizer alone", "added group")


@STAGES_AND_OFFLOAD
@pytest.mark.parametrize(
    ("before", "change"),
    [
        pytest.param(*each, id=name, marks=[pytest.mark.slow] if name in LONGER else [])
        for name, each in CHANGES.items()
    ],
)
def test_while_something_is_made(device, stage, offload, before, change):
    """The exceptions are kept, as a notebook keeps them, and with them what was half made."""
    if stage == 3 and change in ("make_optimizer_alone", "add_others"):
        pytest.skip("stage 3 needs the module")

    def make(number: int):
        run = Run(device, stage, None, 0, offload)
        for name in before:
            getattr(run, name)()
        act = getattr(run, change)
        failed = out_of_memory(act, number)
        if failed:
            run.loss().backward()
            run.model.zero_grad()
            act()
        if run.optimizer is None:
            run.make_optimizer()
        run.step(7)
        held = run.optimizer.stats()["bytes_held"]
        return run, failed, held

    twin, _, expected_bytes = make(-1)
    kept = []
    for number in itertools.count():
        run, failed, held = make(number)
        if change not in ("add_others", "step"):  # which may cut other units the second time
            assert held == expected_bytes
        assert_same(run, twin, f"after allocation {number}")
        if not failed:
            break
        kept.append(failed)
    # Where the state of a wrapped optimizer is on the CPU, nothing is asked of the device.
    assert len(kept) > 2 or (offload and change == "wrap_optimizer")


@STAGES
@pytest.mark.parametrize("optimizer", ["make_optimizer", "wrap_optimizer"])
def test_while_states_move(anywhere, rank, device, stage, optimizer):
    """Then nothing is usable before all of it is back."""
    run, twin = (Run(device, stage, anywhere, rank) for _ in range(2))
    for each in (run, twin):
        each.shard()
        getattr(each, optimizer)()
        each.step()
        each.loss(1).backward()
    held = run.model.stats()

    def fails(move, number) -> bool:
        failed = out_of_memory(lambda: move(run.model), number)
        if failed:
            with pytest.raises(RuntimeError, match="offloaded"):
                run.optimizer.step()
        return failed is not None

    def assert_all_is_back():
        assert run.model.stats() == held | {"bytes_peak": run.model.stats()["bytes_peak"]}

    for number in itertools.count():
        if not fails(zero_ext.offload_states, number):
            break
        zero_ext.reload_states(run.model)
        assert_all_is_back()
    assert number > 5
    while fails(zero_ext.reload_states, 1):  # one more each time
        number -= 1
    assert number <= 2
    assert_all_is_back()
    for each in (run, twin):
        each.optimizer.step()
        each.optimizer.zero_grad()
        each.step(2)
    assert_same(run, twin)
