"""torch's modes around a training loop: they see operations, and change no bit."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from harness import MLP, assert_bits, mean_square, rank_data
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import zero_ext


class Passing(TorchDispatchMode):
    """As users write them to look at what runs."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def two_of_them():
    with Passing(), FlopCounterMode(display=False), PassingFunctions():
        yield


MODES = {
    "CommDebugMode": CommDebugMode,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "a dispatch mode": Passing,
    "a function mode": PassingFunctions,
    "three": two_of_them,
}


def rms(parameters):
    return zero_ext.optim.wrap(torch.optim.RMSprop, parameters, lr=0.01)


def halve(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)


def replace(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 1.5


def train(mesh, rank, stage, make_optimizer, mode) -> list[torch.Tensor]:
    """Each call inside a mode of its own, and a whole step inside one mode."""
    model = zero_ext.shard(MLP(), stage, mesh=mesh, bucket_mb=2e-4)
    optimizer = make_optimizer(model.parameters())
    results = []

    def gradients():
        return [p.grad for p in model.parameters()]

    def clip(**arguments):
        results.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, **arguments))

    calls = (
        lambda: mean_square(model, rank_data((4, 5), rank)).backward(),
        lambda: halve(model),
        lambda: torch._foreach_mul_(gradients(), 2.0),
        lambda: replace(model),
        lambda: results.extend(g.norm() for g in gradients()),
        lambda: results.extend(g.sum(0) for g in gradients()),
        lambda: results.append(optimizer.clip_grad_norm_(0.1)),
        clip,
        lambda: clip(foreach=False),
        lambda: clip(norm_type=1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        optimizer.step,
        optimizer.zero_grad,
    )
    for call in calls:
        with mode():
            call()
    with mode():
        for call in calls:
            call()
    return [*results, *(zero_ext.full_tensor(p) for p in model.parameters())]


@pytest.fixture(scope="module")
def without_modes() -> dict[tuple, list[torch.Tensor]]:
    """Results of ``train`` without a mode, made when the first test needs them."""
    return {}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # CommDebugMode's own
@pytest.mark.parametrize("name", MODES)
def test_modes_change_no_bit(anywhere, rank, without_modes, name):
    for stage in range(4):
        for make_optimizer in (zero_ext.optim.AdamW, rms):
            key = (anywhere is None, stage, make_optimizer)
            if key not in without_modes:
                made = train(anywhere, rank, stage, make_optimizer, contextlib.nullcontext)
                without_modes[key] = [each.clone() for each in made]
            actual = train(anywhere, rank, stage, make_optimizer, MODES[name])
            for k, (mine, theirs) in enumerate(zip(actual, without_modes[key], strict=True)):
                assert_bits(mine, theirs, f"stage {stage}, result {k}")


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_comm_debug_mode_counts_torchs_collectives(mesh, rank):
    """The 2-norm of one model is an agreement of zero_ext's own. On a device a group sums it."""
    model = zero_ext.shard(MLP(), 2, mesh=mesh)
    mean_square(model, rank_data((4, 5), rank)).backward()
    with CommDebugMode() as counted:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        dist.all_reduce(norm.cpu(), group=mesh.get_group())
    assert counted.get_total_counts() == 1 + (mesh.device_type != "cpu")
