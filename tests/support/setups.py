"""The two ways in, for tests of what both must do: ``shard(module)``, or an optimizer alone."""

import contextlib
import ctypes
import os
import sys
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import MLP, mean_square, rank_data
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from zero_ext.engine.registry import find

# Parameters of MLP straddle ranks and fill several units of this size.
SMALL_BUCKET_MB = 200 / 2**20
MLP_INPUT = (4, 5)


class Way(NamedTuple):
    """``shard``: module and optimizer; ``optimizer``: a drop-in optimizer, nothing else."""

    name: str
    stage: int

    def __str__(self) -> str:
        return f"{self.name}-{self.stage}"

    def optimizer(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        optimizer_class: type = zero_ext.optim.AdamW,
        bucket_mb: float = SMALL_BUCKET_MB,
        params=None,
        **kwargs,
    ) -> torch.optim.Optimizer:
        """Shard ``model`` over ``group`` (None: no process group) and make its optimizer."""
        params = model.parameters() if params is None else params
        if self.name == "optimizer":
            sharding = {"stage": self.stage, "process_group": group, "bucket_mb": bucket_mb}
            return optimizer_class(params, **sharding, **kwargs)
        mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
        zero_ext.shard(model, self.stage, mesh=mesh, bucket_mb=bucket_mb)
        return optimizer_class(params, **kwargs)


# Quick tests see both ways and all stages, slow ones every pair.
both_ways = pytest.mark.parametrize(
    "way",
    [
        Way("shard", 2),
        Way("optimizer", 1),
        pytest.param(Way("shard", 1), marks=pytest.mark.slow),
        pytest.param(Way("optimizer", 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
# Where nothing reads a parameter between the passes.
all_ways = pytest.mark.parametrize(
    "way",
    [
        Way("shard", 2),
        Way("shard", 3),
        Way("optimizer", 1),
        pytest.param(Way("shard", 1), marks=pytest.mark.slow),
        pytest.param(Way("optimizer", 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
# Where the stage cannot matter.
shard_and_optimizer = pytest.mark.parametrize(
    "way", [Way("shard", 2), Way("optimizer", 1)], ids=str
)


def train_batch(rank: int, step: int = 0, micro: int = 0, dtype=torch.float32) -> Tensor:
    """This rank's batch for ``MLP``."""
    return rank_data(MLP_INPUT, rank, step, micro, dtype)


def backward(model, rank: int, step: int = 0, micro: int = 0, loss_fn=mean_square) -> None:
    """This rank's backward of one micro-batch."""
    loss_fn(model, train_batch(rank, step, micro, next(model.parameters()).dtype)).backward()


def backward_of_all(model, world: int, step: int = 0, micro: int = 0, loss_fn=mean_square) -> None:
    """What one process does for the same micro-batch: all ranks' gradients, averaged."""
    for rank in range(world):
        batch = train_batch(rank, step, micro, next(model.parameters()).dtype)
        add_gradients(model, loss_fn(model, batch), 1 / world)


def add_gradients(model: nn.Module, loss: Tensor, scale: float) -> None:
    """``loss.backward()``, its gradients scaled: a scaled loss would round everywhere else too."""
    before = [(p, p.grad) for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    for parameter, grad in before:
        if parameter.grad is None:
            parameter.grad = grad
            continue
        parameter.grad.mul_(scale)
        if grad is not None:
            parameter.grad.add_(grad)


def readable(model: nn.Module) -> contextlib.AbstractContextManager:
    """Inside it the parameters can be read and written, whatever the stage. Collective."""
    if hasattr(model, "summon_full_params"):
        return model.summon_full_params()
    return contextlib.nullcontext()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter as it is computed with, whole, as a copy. Collective."""
    with readable(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters, masters and states, whole, as copies. Collective."""
    states = [full(v).clone() for p in model.parameters() for v in optimizer.state[p].values()]
    masters = [full_master(p) for p in model.parameters()]
    return [*values_of(model).values(), *masters, *states]


def assert_same_values(actual: nn.Module, expected: nn.Module) -> None:
    """Parameters equal one process's.

    The update is one fused expression here and several roundings in torch, and with 3 ranks the
    average rounds elsewhere: a few units in the last place of an update of about 0.1, over at most
    5 steps.
    """
    values = values_of(actual)
    for name, e in values_of(expected).items():
        torch.testing.assert_close(
            values[name], e, rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def full(tensor: Tensor) -> Tensor:
    """A gradient, or a value of the optimizer's state, whole. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient in fp32, whole, as a copy. Collective."""
    return {
        name: None if p.grad is None else full(p.grad).clone()
        for name, p in model.named_parameters()
    }


def assert_same_gradients(actual: nn.Module, expected: nn.Module) -> None:
    """Gradients equal one process's.

    Up to the rounding of values and activations after some steps, and of an average over 3 ranks,
    where the largest relative difference seen is 2.4e-5, of a convolution; 1e-5 holds with 2.
    """
    grads = full_gradients(actual)
    for name, parameter in expected.named_parameters():
        assert (grads[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(
                grads[name],
                parameter.grad.float(),
                rtol=3e-5,
                atol=5e-6,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def full_master(parameter: Tensor) -> Tensor:
    """The fp32 master of a sharded parameter, whole, as a copy. Collective."""
    handle, i = find(parameter)
    return full(handle.as_parameter(handle.engine.master_slice(i), i, parameter)).clone()


def gathered(model: nn.Module) -> list[str]:
    """Names of the units that are in memory; none where units are never released."""
    engine = find(next(model.parameters()))[0].engine
    return engine.gathered_units() if engine.releases else []


def small_mlp(dtype=torch.float32) -> MLP:
    return MLP(hidden=7, features=5, layers=3, dtype=dtype)


def lazily_free_bytes() -> int:
    """Of this process: pages that the system may take, and has not taken."""
    with open("/proc/self/smaps_rollup") as lines:
        (line,) = (line for line in lines if line.startswith("LazyFree:"))
    return int(line.split()[1]) * 1024


def take_lazily_free_pages() -> None:
    """As the system does when it runs short."""
    madvise, pageout = ctypes.CDLL(None, use_errno=True).madvise, 21
    with open("/proc/self/smaps") as lines:
        for words in map(str.split, lines):
            if not words[0].endswith(":"):
                begin, end = (int(word, 16) for word in words[0].split("-"))
            elif words[0] == "LazyFree:" and int(words[1]) > 0:
                taken = madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), pageout)
                assert taken == 0, os.strerror(ctypes.get_errno())


class one_process:  # noqa: N801
    """Optimizers made inside shard over this rank alone."""

    def __enter__(self):
        self._resolve = zero_ext.optim.sharded.resolve
        alone = zero_ext.ranks.groups.Groups(None, None, 0, 1, 1, torch.get_default_device(), (0,))
        zero_ext.optim.sharded.resolve = lambda *_: alone

    def __exit__(self, *exception):
        zero_ext.optim.sharded.resolve = self._resolve


def fresh_accelerate() -> None:
    """Accelerate keeps one state per process, which a test leaves to the next one."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
