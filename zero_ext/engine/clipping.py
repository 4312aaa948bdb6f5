"""torch's own clipping and unscaling, of gradients that engines show in ``.grad``.

Torch's functions of these names are replaced by the ones below, see ``_torch.py``. To tensors that
no engine has to do with they are torch's.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_ext import _C, _torch
from zero_ext.engine import registry
from zero_ext.engine.checks import DTYPES
from zero_ext.engine.registry import Handle
from zero_ext.ranks.agreement import check_same_on_all_ranks, naming
from zero_ext.ranks.collectives import all_reduce_
from zero_ext.tensor.dispatch import equal_operands, foreach_norm, groups_of
from zero_ext.tensor.meshes import has_partial_sums, locals_of
from zero_ext.tensor.shard_tensor import ShardTensor


class HostGradient(Tensor):
    """An offloaded gradient that is whole on this rank. It lies on the CPU, as the ``.grad`` of a
    parameter on a device. A plain tensor to everybody but torch's GradScaler.

    GradScaler copies its scale to the gradients' device without waiting for it, and reads the copy
    at once.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            torch.accelerator.synchronize()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo) -> Tensor:
        memo[id(self)] = copied = self.detach().clone()
        return copied

    def __reduce_ex__(self, protocol):
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


_KINDS = (Tensor, nn.Parameter, ShardTensor, DTensor, HostGradient)


@torch.no_grad()
def _total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None) -> Tensor:
    """The 2-norm has the bits of ``optimizer.clip_grad_norm_``, in every stage. Collective."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    ranks: dict[tuple[int, ...] | None, Tensor] = {}
    whole = registry.ranks_of_whole_gradients()
    for tensor in tensors:
        is_part = isinstance(tensor, ShardTensor)
        ranks.setdefault(tensor.ranks if is_part else whole.get(id(tensor)), tensor)
    ranks.pop(None, None)
    if len(ranks) > 1:
        _reject_several_meshes(ranks)
    if not ranks or not _have_kernels(tensors):
        return _torch.get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    if float(norm_type) == 2:
        return checked_norm(_C.norm_of(_square_sum(tensors)), error_if_nonfinite)
    return checked_norm(_norm_of_norms(tensors, float(norm_type)), error_if_nonfinite)


def _norm_of_norms(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm in fp64, so that its fp32 value does not depend on the number of ranks."""
    held = [t for t in tensors if t.numel()]  # torch has no infinity norm of nothing
    if not held:
        return torch.zeros((), device=tensors[0].device)
    # Not torch's, which takes no list of DTensors and plain tensors, as stage 0 may show.
    norms = foreach_norm(torch.ops.aten._foreach_norm.Scalar, held, norm_type, torch.float64)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).float()


def checked_norm(norm: Tensor, error_if_nonfinite: bool) -> Tensor:
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"zero_ext: the total norm of the gradients is non-finite ({norm.item()}), so they "
            "were not clipped. Pass error_if_nonfinite=False to leave them to the step."
        )
    return norm


def _have_kernels(tensors: Sequence[Tensor]) -> bool:
    device = tensors[0].device
    partial = any(type(t) is DTensor and has_partial_sums(t) for t in tensors)
    return (
        not partial
        and _C.has_kernels_on(device)
        and all(
            type(t) in _KINDS
            and t.dtype in DTYPES
            and t.device == device
            and t.layout == torch.strided
            for t in tensors
        )
    )


def _square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """See Note [A norm without an order] in square_sum.h; plain tensors count as replicated."""
    device = tensors[0].device
    locals_, cut = locals_of(tensors), groups_of(tensors)
    parts = set(chain.from_iterable(cut.values()))
    total = _C.square_sum([t for i, t in enumerate(locals_) if i not in parts], device)
    for groups, members in cut.items():
        part = _C.square_sum([locals_[i] for i in members], device)
        with naming("the norm of sharded tensors (clip_grad_norm_)"):
            for group in groups:
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
    for handle in _by_handle(parameters, adopt=False):
        handle.engine.check_reduced(verb)
    return parameters


def _by_handle(parameters: Sequence[Tensor], *, adopt: bool) -> dict[Handle, list[int]]:
    """The parameters among them that may have gradients, by the engines that shard them.

    Args:
        adopt: Shard what was unfrozen, and name all engines. Collective.
    """
    indices: dict[Handle, dict[int, None]] = {}
    for entry in registry.find_all(parameters):
        if entry is not None:
            indices.setdefault(entry.handle, {})[entry.index] = None
    found = {}
    for handle, members in indices.items():
        if adopt:
            handle.adopt_unfrozen()
        facts = zip(members, _C.facts(handle.engine, list(members)), strict=True)
        found[handle] = [i for i, (_, _, unit) in facts if unit >= 0]
    return {handle: trained for handle, trained in found.items() if trained or adopt}


def _meet(parameters: Sequence[Tensor], verb: str) -> None:
    """Wait until all ranks have come, and take part in the backwards that others still run.

    Collective where a rank has a part of the gradients alone. Raises where gradients are still to
    be reduced.
    """
    for handle, indices in _by_handle(parameters, adopt=True).items():
        if handle.replicated:
            handle.engine.check_reduced(verb)
        else:
            with serving_backwards(handle):
                handle.engine.meet_for_clipping(indices, by_value=verb == "clip_grad_value_()")


@contextlib.contextmanager
def serving_backwards(handle: Handle) -> Iterator[None]:
    """Backwards of others that run inside need no loss that this rank has scaled."""
    optimizer = None if handle.scaled_by is None else handle.scaled_by()
    scaler = None if optimizer is None else optimizer.loss_scaler
    if scaler is not None:
        scaler.check_scaled(handle)
    yield
    if scaler is not None:
        scaler._backwards_seen = handle.engine.backwards


def _norm_in_one_message(parameters: Sequence[Tensor]) -> Tensor | None:
    """The 2-norm of the gradients of one engine that the host waits for. None of others."""
    by_handle = _by_handle(parameters, adopt=True)
    handle = next(iter(by_handle), None)
    if len(by_handle) != 1 or handle.replicated or not handle.knows_on_host:
        return None
    if not all(id(parameter) in handle.entries for parameter in parameters):
        return None
    with serving_backwards(handle):
        return handle.engine.norm_of_gradients(by_handle[handle])


def clip_by_norm(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """Stand in for torch's ``clip_grad_norm_``. Collective."""
    norm = _norm_in_one_message(parameters) if float(norm_type) == 2 else None
    if norm is None:
        _meet(parameters, "clip_grad_norm_()")
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = _total_norm(gradients, norm_type, error_if_nonfinite, foreach)
        _check_norm(parameters, norm)
    norm = checked_norm(norm, error_if_nonfinite)
    # Not ours, which asks whether gradients are reduced: another rank may have done it.
    foreach = _foreach(parameters, foreach)
    with equal_operands():
        _torch.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
    return norm


def _clip_norm(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """While it waits for other ranks' norms it takes part in their backwards, where it can."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not registry.any_sharded(listed):  # torch warns of an empty generator
        rest = (max_norm, norm_type, error_if_nonfinite, foreach)
        return _torch.clip_grad_norm_(listed or parameters, *rest)
    return clip_by_norm(listed, max_norm, norm_type, error_if_nonfinite, foreach)


def _foreach(parameters: Sequence[Tensor], given: bool | None) -> bool | None:
    """torch takes no list of DTensors and plain tensors, as stage 0 may show."""
    return False if any(type(p.grad) is DTensor for p in parameters) else given


def _clip_with_norm(parameters, max_norm, total_norm, foreach=None) -> None:
    parameters = _check_reduced(parameters, "clip_grad_norm_()")
    _check_norm(parameters, total_norm)
    foreach = _foreach(parameters, foreach)
    _torch.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)


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


def _clip_value(parameters, clip_value, foreach=None) -> None:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _meet(parameters, "clip_grad_value_()")
    if registry.any_sharded(parameters) and all(p.grad is None for p in parameters):
        return  # no rank had a backward; torch takes no empty list
    _torch.clip_grad_value_(parameters, clip_value, _foreach(parameters, foreach))


def _unscale(self, optimizer) -> None:
    if self.is_enabled():
        _check_reduced([p for g in optimizer.param_groups for p in g["params"]], "unscale_()")
    _torch.unscale_(self, optimizer)


_torch.replace_clipping(
    lambda: bool(registry.living()),
    clip_grad_norm_=_clip_norm,
    get_total_norm=_total_norm,
    clip_grads_with_norm_=_clip_with_norm,
    clip_grad_value_=_clip_value,
    unscale_=_unscale,
)
