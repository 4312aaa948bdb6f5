"""The stateless kernels, ``torch.ops.zero_ext.*``, with signatures and contracts.

All tensors of a call are contiguous and on one device, the CPU or, where zero_ext was built for it,
CUDA (on the current stream, without waiting for it); element counts must agree; what is written
must not share memory with what is read. A gradient is float32, bfloat16 or float16, a sum or a
master float32. ``nonfinite``, one int32, is set to 1 if a gradient or a result of the call is NaN
or infinite, and left alone otherwise. An element's result depends on that element alone: neither
length, alignment, threads, instruction set nor device change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_ops = torch.ops.zero_ext


def accumulate_(
    grad: Tensor,
    sum: Tensor,
    scale: float = 1.0,
    *,
    fresh: bool = False,
    nonfinite: Tensor | None = None,
) -> None:
    """``sum = fma(scale, grad, 0 if fresh else sum)`` in float32, one rounding per element.

    With a power-of-two ``scale`` these are the bits of ``sum.add_(grad.float(), alpha=scale)``.
    ``fresh``: the sum holds nothing yet and is overwritten, not read.
    """
    _ops.accumulate_(grad, sum, scale, fresh, nonfinite)


def accumulate_list_(
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    scale: float = 1.0,
    *,
    fresh: bool = False,
    nonfinite: Tensor | None = None,
) -> None:
    """:func:`accumulate_` for each pair, in one parallel region. One dtype for all ``grads``."""
    if grads or sums:  # an op without tensors has no device to be dispatched to
        _ops.accumulate_list_(grads, sums, scale, fresh, nonfinite)


def accumulate_ranks_(
    grads: Sequence[Tensor],
    sum: Tensor,
    scale: float = 1.0,
    *,
    fresh: bool = False,
    nonfinite: Tensor | None = None,
) -> None:
    """:func:`accumulate_` of every rank's gradient in rank order, with the same bits, in one pass.

    At least one rank. A float32 gradient may be ``sum`` itself.
    """
    _ops.accumulate_ranks_(grads, sum, scale, fresh, nonfinite)


def adamw_(
    master: Tensor,
    param: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float,
    step: int | None = None,
    grad_scale: float = 1.0,
    maximize: bool = False,
    decoupled: bool = True,
    skip: Tensor | None = None,
    steps_done: Tensor | None = None,
    grad_factor: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """One step of AdamW (``decoupled``) or Adam on a flat range, in float32.

    Args:
        master: The float32 parameter.
        param: Its compute copy, rewritten as the rounding of ``master``; None where the master is
            the parameter. An element that is not the rounding of its master was written by the
            user, and wins over it.
        exp_avg, exp_avg_sq: float32, bfloat16, or codes (int8 and uint8), which have ``scales``:
            float32, one for each 256 elements.
        max_exp_avg_sq: AMSGrad's maximum, or None.
        step: Number of this update, from 1; None where ``steps_done`` says it.
        grad_scale: Factor of the gradient (1/loss scale, clipping).
        skip: One int32 on the device: where it is not 0, nothing is written.
        steps_done: One float32 on the device, the number of updates before this one.
        grad_factor: One float32 on the device, one more factor of the gradient.
    Raises:
        ValueError: neither or both of ``step`` and ``steps_done`` are given.
    Source: Kingma & Ba 2015; Loshchilov & Hutter 2019; Reddi et al. 2018 for ``max_exp_avg_sq``.
    """
    if (step is None) == (steps_done is None):
        raise ValueError("zero_ext: pass either 'step' or 'steps_done' to adamw_.")
    tensors = (master, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq)
    _ops.adamw_(
        *tensors,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        step=1 if step is None else step,
        grad_scale=grad_scale,
        maximize=maximize,
        decoupled=decoupled,
        skip=skip,
        steps_done=steps_done,
        grad_factor=grad_factor,
        exp_avg_scale=scales[0],
        exp_avg_sq_scale=scales[1],
    )


def sgd_(
    master: Tensor,
    param: Tensor | None,
    grad: Tensor,
    momentum_buffer: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    grad_scale: float = 1.0,
    maximize: bool = False,
    skip: Tensor | None = None,
    steps_done: Tensor | None = None,
    grad_factor: Tensor | None = None,
) -> None:
    """One step of torch.optim.SGD on a flat range, in float32.

    ``master``, ``param``, ``grad_scale``, ``skip`` and ``grad_factor`` as in :func:`adamw_`.

    Args:
        momentum_buffer: Required where ``momentum`` is not 0.
        first: This is the first update: the buffer holds nothing yet and becomes the gradient.
        steps_done: As in :func:`adamw_`; where given, ``first`` is that it is 0.
    """
    _ops.sgd_(
        master,
        param,
        grad,
        momentum_buffer,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        first=first,
        grad_scale=grad_scale,
        maximize=maximize,
        skip=skip,
        steps_done=steps_done,
        grad_factor=grad_factor,
    )


def cast_(source: Tensor, target: Tensor) -> None:
    """``target = source`` in target's dtype, rounded to nearest even; any pair of dtypes."""
    _ops.cast_(source, target)


def flatten_(
    sources: Sequence[Tensor],
    flat: Tensor,
    offsets: Sequence[int],
    *,
    add: bool = False,
    nonfinite: Tensor | None = None,
) -> None:
    """Copy every source into ``flat`` at its offset, in elements; with ``add``, add it there.

    One dtype for all sources; sums are formed in float32 and rounded once. The ranges of ``flat``
    must not overlap.
    """
    _ops.flatten_(sources, flat, offsets, add, nonfinite)


def find_nonfinite_(values: Sequence[Tensor], nonfinite: Tensor) -> None:
    """Set ``nonfinite[i]`` to 1 where ``values[i]``, float32, holds NaN or infinity.

    ``nonfinite`` is one int32 for each of ``values``; flags of finite values keep what they are.
    """
    _ops.find_nonfinite_(values, nonfinite)


def adopt_writes_(param: Tensor, master: Tensor) -> None:
    """Set ``master[i] = param[i]`` where ``param[i]`` is not its rounding: the user wrote it."""
    _ops.adopt_writes_(param, master)


def reduce_scatter_accumulate_(
    bucket: Tensor,
    acc: Tensor,
    group: dist.ProcessGroup | None = None,
    scale: float = 1.0,
    *,
    fresh: bool = False,
) -> None:
    """Add every rank's gradients of this rank's range to ``acc``, in rank order. Collective.

    ``acc = (0 if fresh else acc) + scale * part_0 + scale * part_1 + …`` in float32, a fused
    multiply-add and one rounding per rank, where ``part_r`` is ``bucket[rank * n :
    (rank + 1) * n]`` of rank r. The gradients travel in the bucket's dtype, exactly. ``acc`` is
    written after all parts have arrived, so an error leaves it as it was.

    Args:
        bucket: [world * n], contiguous; float32, bfloat16 or float16. Only read.
        acc: [n], contiguous float32; shares no memory with ``bucket``.
        group: The ranks; default all, or this one alone without a process group. Its timeout holds,
            and other calls on it must come in the same order on every rank.
        scale: Factor of every gradient, such as 1/world.
        fresh: ``acc`` holds nothing yet and is overwritten, not read.
    Raises:
        RuntimeError: sizes, dtypes or layouts do not fit (before anything is sent); a rank did not
            take part within the group's timeout, which it names.
    Source: Rajbhandari et al. 2020 (ZeRO), section 5.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    name = "" if group is None else group.group_name
    _ops.reduce_scatter_accumulate_(bucket, acc, name, scale, fresh)


# Facts for torch.compile and fake tensors: every op writes in place only, and two of its arguments
# have one size.


def _size(argument: Tensor | Sequence) -> int:
    return argument.numel() if isinstance(argument, Tensor) else len(argument)


def _register_fake(op: str, first: str, second: str) -> None:
    names = [argument.name for argument in getattr(_ops, op).default._schema.arguments]

    def check(*args, **kwargs) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        one, other = (_size(given[name]) for name in (first, second))
        torch._check(one == other, lambda: f"'{first}' and '{second}' differ in size")

    torch.library.register_fake(f"zero_ext::{op}", check)


_register_fake("accumulate_", "grad", "sum")
_register_fake("accumulate_list_", "grads", "sums")
_register_fake("adamw_", "grad", "master")
_register_fake("sgd_", "grad", "master")
_register_fake("cast_", "source", "target")
_register_fake("flatten_", "sources", "offsets")
_register_fake("find_nonfinite_", "nonfinite", "values")
_register_fake("adopt_writes_", "param", "master")


@torch.library.register_fake("zero_ext::accumulate_ranks_")
def _(grads, sum, scale=1.0, fresh=False, nonfinite=None):
    for grad in grads:
        torch._check(grad.numel() == sum.numel(), lambda: "'grads' and 'sum' differ in length")


@torch.library.register_fake("zero_ext::reduce_scatter_accumulate_")
def _(bucket, acc, group_name, scale, fresh):
    world = distributed_c10d._resolve_process_group(group_name).size() if group_name else 1
    torch._check(
        bucket.numel() == world * acc.numel(),
        lambda: f"'bucket' must have {world} times as many elements as 'acc'",
    )
