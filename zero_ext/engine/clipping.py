"""torch's own clipping and unscaling, of gradients that engines show in ``.grad``.

``torch.nn.utils.clip_grad_norm_`` calls two functions of its module by their names there. Those are
replaced by the ones below, also for scripts that imported ``clip_grad_norm_`` before zero_ext. So
are ``clip_grad_norm_`` itself and ``GradScaler.unscale_``. To tensors that no engine has to do with
they are torch's.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.nn.utils import clip_grad

from zero_ext import _C
from zero_ext.engine import registry
from zero_ext.engine.host_gradient import HostGradient
from zero_ext.ranks.agreement import check_same_on_all_ranks, naming
from zero_ext.ranks.collectives import all_reduce_
from zero_ext.tensor.dispatch import groups_of
from zero_ext.tensor.shard_tensor import ShardTensor

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = (Tensor, nn.Parameter, ShardTensor, HostGradient)

_torchs_clip_norm = clip_grad.clip_grad_norm_
_torchs_norm = clip_grad._get_total_norm
_torchs_clip = clip_grad._clip_grads_with_norm_
_torchs_clip_value = clip_grad.clip_grad_value_
_torchs_unscale = torch.amp.GradScaler.unscale_


def _in_place_of(torchs: Callable) -> Callable[[Callable], Callable]:
    """Once a parameter is sharded, torch.compile does not trace calls of ``torchs``.

    Gradients of sharded parameters cannot be traced. A part of ``function`` that became a graph
    would be compiled again for each list of parameters.
    """

    def replace(function: Callable) -> Callable:
        uncompiled = torch.compiler.disable(function)

        @functools.wraps(torchs)
        def replacement(*args, **kwargs):
            called = uncompiled if registry.any_registered() else torchs
            return called(*args, **kwargs)

        skip_code(replacement.__code__)  # called by what is not traced, it makes no graph of itself
        return replacement

    return replace


@_in_place_of(_torchs_norm)
@torch.no_grad()
def _total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None) -> Tensor:
    """The 2-norm has the bits of ``optimizer.clip_grad_norm_``, in every stage. Collective."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    ranks: dict[tuple[int, ...] | None, Tensor] = {}
    for tensor in tensors:
        ranks.setdefault(registry.ranks_of_gradient(tensor), tensor)
    ranks.pop(None, None)
    if not ranks:
        return _torchs_norm(tensors, norm_type, error_if_nonfinite, foreach)
    if len(ranks) > 1:
        _reject_several_meshes(ranks)
    if float(norm_type) != 2 or not _have_kernels(tensors):
        return _torchs_norm(tensors, norm_type, error_if_nonfinite, foreach)
    return _checked(_C.norm_of(_square_sum(tensors)), error_if_nonfinite)


def _checked(norm: Tensor, error_if_nonfinite: bool) -> Tensor:
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"zero_ext: the total norm of the gradients is non-finite ({norm.item()}), so they "
            "were not clipped. Pass error_if_nonfinite=False to leave them to the step."
        )
    return norm


def _have_kernels(tensors: Sequence[Tensor]) -> bool:
    device = tensors[0].device
    return _C.has_kernels_on(device) and all(
        type(t) in _KINDS
        and t.dtype in _KERNEL_DTYPES
        and t.device == device
        and t.layout == torch.strided
        for t in tensors
    )


def _square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """See Note [A norm without an order] in square_sum.h; plain tensors count as replicated."""
    device = tensors[0].device
    total = _C.square_sum([t for t in tensors if not isinstance(t, ShardTensor)], device)
    for group, members in groups_of(tensors).items():
        part = _C.square_sum([tensors[i]._local_tensor for i in members], device)
        with naming("the norm of sharded tensors (clip_grad_norm_)"):
            all_reduce_(part, group)
        total += part
    return total


def _reject_several_meshes(ranks: dict[tuple[int, ...], Tensor]) -> None:
    (first, one), (second, other), *_ = ranks.items()
    raise RuntimeError(
        f"zero_ext: the norm of gradients of several meshes: {registry.name_of_gradient(one)} is "
        f"averaged over ranks {list(first)}, {registry.name_of_gradient(other)} over ranks "
        f"{list(second)}, and every rank would get another norm. Take get_total_norm() of each "
        "mesh's gradients, add their squares over all meshes, and pass the root to "
        "torch.nn.utils.clip_grads_with_norm_()."
    )


def _check_reduced(parameters, verb: str) -> list[Tensor]:
    """Raise where gradients are still to be reduced, as ``optimizer.clip_grad_norm_`` does. torch
    sees ``.grad is None`` then, and would clip nothing. The engine remembers the call."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    found = (entry[0] for p in parameters if (entry := registry.find(p)) is not None)
    for handle in {id(handle): handle for handle in found}.values():
        handle.engine.check_reduced(verb)
    return parameters


def _optimizer_of(parameters: Sequence[Tensor]) -> Any:
    """The one optimizer of all trained ones among ``parameters``, if their norm takes messages that
    the host waits for."""
    found = [registry.find(p) for p in parameters if p.requires_grad]
    handle = found[0][0] if found and found[0] is not None else None
    if handle is None or handle.replicated or not handle.knows_on_host:
        return None
    if any(entry is None or entry[0] is not handle for entry in found):
        return None
    indices = {i for _, i in found}
    for optimizer in handle.optimizers:
        others = [handle.parameters[i] for i in {*optimizer._sharded_state.indices} - indices]
        if indices.issubset(optimizer._sharded_state.indices) and not any(
            p is not None and (p.requires_grad or p.grad is not None) for p in others
        ):
            return optimizer
    return None


@_in_place_of(_torchs_clip_norm)
def _clip_norm(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """While it waits for other ranks' norms it takes part in their backwards, where it can."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    sharded = [p for p in listed if registry.find(p) is not None]
    optimizer = _optimizer_of(sharded) if float(norm_type) == 2 else None
    norm = None if optimizer is None else optimizer.clip_grad_norm_(math.inf)
    if norm is None or len(sharded) < len(listed):  # torch warns of an empty generator
        rest = (max_norm, norm_type, error_if_nonfinite, foreach)
        return _torchs_clip_norm(listed or parameters, *rest)
    norm = _checked(norm, error_if_nonfinite)
    _torchs_clip(listed, max_norm, norm, foreach)  # another rank may have reduced the gradients
    return norm


@_in_place_of(_torchs_clip)
def _clip_with_norm(parameters, max_norm, total_norm, foreach=None) -> None:
    parameters = _check_reduced(parameters, "clip_grad_norm_()")
    _check_norm(parameters, total_norm)
    _torchs_clip(parameters, max_norm, total_norm, foreach)


def _check_norm(parameters: Sequence[Tensor], norm: Tensor) -> None:
    """Raise where ranks would clip by different norms. Gradients that no engine averages, such as
    those of ``ignored_params``, may differ between ranks. Collective where there are any."""
    found = [registry.find(p) for p in parameters if p.requires_grad]
    sharded = [entry for entry in found if entry is not None]
    if sharded and len(sharded) < len(found):
        check_same_on_all_ranks(
            sharded[0][0].groups,
            [repr(float(norm))],
            "the norms that clip_grad_norm_() clips by",
            f"{len(found) - len(sharded)} of the parameters are not sharded, and zero_ext does not "
            "average their gradients. Average them first, or clip them in a call of their own.",
        )


@_in_place_of(_torchs_clip_value)
def _clip_value(parameters, clip_value, foreach=None) -> None:
    parameters = _check_reduced(parameters, "clip_grad_value_()")
    _torchs_clip_value(parameters, clip_value, foreach)


@_in_place_of(_torchs_unscale)
def _unscale(self, optimizer) -> None:
    if self.is_enabled():
        _check_reduced([p for g in optimizer.param_groups for p in g["params"]], "unscale_()")
    _torchs_unscale(self, optimizer)


torch.amp.GradScaler.unscale_ = _unscale
clip_grad.clip_grad_norm_ = nn.utils.clip_grad_norm_ = _clip_norm
clip_grad._get_total_norm = nn.utils.get_total_norm = _total_norm
clip_grad._clip_grads_with_norm_ = nn.utils.clip_grads_with_norm_ = _clip_with_norm
clip_grad.clip_grad_value_ = nn.utils.clip_grad_value_ = _clip_value
