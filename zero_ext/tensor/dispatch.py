"""Operations on ShardTensors, and where each runs.

Note [Which operation runs where]
DTensor's own dispatch would take the slice for rows of the tensor and answer wrongly without an
error (``grad.sum(0)``, ``grad.mean()``, ``grad.t()``). So every operation runs in one of four ways:
- elementwise ones and their ``_foreach_`` forms: on the slices, without communication; plain
  operands are cut to fit. A digest of these and of numbers stays with the result, because a rank
  with other values would have another part of another tensor: a step compares those of gradients;
- norm, sum, any, all and GradScaler's check: on the slices, then one all-reduce; plain result;
- others that only read: on the gathered tensors, exactly as in one process; plain result;
- views, random fills, others that write: an error. A write into a gathered copy would be lost.
The second and third kind are collectives, which all ranks must call.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf
from numbers import Number

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_ext import _C
from zero_ext._torch import schema_of, spec_of, tree_leaves, tree_map_only
from zero_ext.ranks.agreement import naming
from zero_ext.ranks.collectives import all_reduce_
from zero_ext.tensor.meshes import copy_whole, cut, cutting_groups, locals_of
from zero_ext.tensor.shard_tensor import ShardTensor, wrap

aten = torch.ops.aten


def run(func, args, kwargs):
    """The result of ``func`` for arguments with at least one ShardTensor."""
    if func in _HANDLERS:
        return _HANDLERS[func](func, *args, **kwargs)
    if schema_of(func).name.startswith("aten::_foreach_") and func not in _FOREACH_REDUCTIONS:
        return _foreach_elementwise(func, args, kwargs)
    if func in _KEEPS_SHAPE or (torch.Tag.pointwise in func.tags and func not in _NO_TENSOR):
        return _elementwise(func, args, kwargs)
    return _on_full_tensors(func, args, kwargs)


def _cut(full: Tensor, like: ShardTensor) -> Tensor:
    """This rank's elements of a plain tensor that broadcasts to the shape of ``like``, 1-D."""
    whole = full.expand(like.shape)
    part = whole if like.outer is None else cut(whole, like.outer.spec)
    order = sorted(range(like.dim()), key=lambda d: -like.part_stride[d])
    rows = part.permute(order)  # in the order of memory
    start, stop = like.held_range
    if start == stop or not order:
        return rows.reshape(-1)[start:stop]
    row_numel = rows[0].numel()
    skipped = start // row_numel
    held = rows[skipped : -(-stop // row_numel)].reshape(-1)
    return held[start - skipped * row_numel : stop - skipped * row_numel]


def _to_slice(operand, like: ShardTensor):
    if isinstance(operand, ShardTensor):
        return operand.local
    # Tensors of 0 dimensions stay such: they do not decide the dtype of the result.
    return _cut(operand, like) if isinstance(operand, Tensor) and operand.dim() else operand


def _whole(operand):
    """A DTensor on another mesh is gathered."""
    is_other = isinstance(operand, DTensor) and not isinstance(operand, ShardTensor)
    return operand.full_tensor() if is_other else operand


@contextlib.contextmanager
def equal_operands() -> Iterator[None]:
    """All ranks are known to pass the same plain operands."""
    global _equal_operands
    before, _equal_operands = _equal_operands, True
    try:
        yield
    finally:
        _equal_operands = before


_equal_operands = False


def _digest(operand) -> int:
    """The digest of a plain tensor or a number; 0 if it cannot differ, or a device computes it."""
    if _equal_operands or isinstance(operand, ShardTensor):
        return 0
    if isinstance(operand, Tensor) and operand.dim() > 0:
        values = operand.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        return hash((_C.digest(values.numpy()),))
    if isinstance(operand, Tensor):
        operand = operand.item() if operand.device.type == "cpu" else 0
    return hash(operand) if isinstance(operand, Number) and operand == operand else 0


def _mixed(shards: Sequence[ShardTensor], digests: Sequence[int]) -> int:
    """The digest of what ``digests`` are mixed into ``shards`` makes."""
    before = [digest for digest in [shard.edits.digest for shard in shards] if digest]
    new = [digest for digest in digests if digest]
    if not new and len(before) < 2:
        return before[0] if before else 0
    return hash((*before, *new))


def _broadcasts(operand: Tensor, shape: torch.Size) -> bool:
    """Whether ``operand`` has a value for each element of a tensor of ``shape``, and no more."""
    sizes = zip(reversed(operand.shape), reversed(shape), strict=False)
    return operand.dim() <= len(shape) and all(own in (1, size) for own, size in sizes)


def _aliased(func, args, kwargs, *, written: bool) -> list:
    """The arguments that the result of ``func`` may alias, or those that it writes to."""
    arguments = schema_of(func).arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    infos = {argument.name: argument.alias_info for argument in arguments}
    names = [name for name, info in infos.items() if info and (info.is_write or not written)]
    return tree_leaves([given.get(name) for name in names])


def _are_cut_alike(one: ShardTensor, other: ShardTensor) -> bool:
    return one.bounds == other.bounds and one.outer == other.outer


def _find_shards(func, operands: Sequence, written: Sequence) -> list[ShardTensor]:
    """The ShardTensors of ``operands``; all must be cut alike. Other tensors must broadcast to
    their shape, and not be ``written``: the write would be lost."""
    shards = [operand for operand in operands if isinstance(operand, ShardTensor)]
    for operand in operands if shards else ():
        if isinstance(operand, ShardTensor):
            fits = operand.shape == shards[0].shape and _are_cut_alike(operand, shards[0])
        elif isinstance(operand, Tensor):
            read_only = not any(operand is each for each in written)
            fits = read_only and _broadcasts(operand, shards[0].shape)
        else:
            fits = True
        if not fits:
            # No TypeError: torch's operators catch it, and `p -= lr * p.grad` would go on as
            # `p = p - …`, which leaves the parameter as it was.
            raise RuntimeError(
                f"zero_ext: {func} of a ShardTensor of shape {tuple(shards[0].shape)} with a "
                f"{type(operand).__name__} of shape {tuple(operand.shape)}: operands must be "
                "ShardTensors with the same bounds, or plain tensors that broadcast to this shape "
                "and are only read. Parameters are stepped by an optimizer of zero_ext.optim, or "
                "by hand with shard.full_tensor()."
            )
    return shards


def _elementwise(func, args, kwargs):
    written = _aliased(func, args, kwargs, written=True)
    operands = list(map(_whole, (*args, *kwargs.values())))
    shards = _find_shards(func, operands, written)
    like = shards[0]
    read = [] if func in _OVERWRITES else [s for s in shards if s is not kwargs.get("out")]
    mixed = _mixed(read, list(map(_digest, operands)))
    slices = [_to_slice(operand, like) for operand in operands]
    result = func(*slices[: len(args)], **dict(zip(kwargs, slices[len(args) :], strict=True)))
    for shard in shards:  # changed in place, or given as out=
        if result is shard.local:
            shard.edits.digest = mixed
            return shard
    made = wrap(result, like)
    if func in _ALIASES:
        made.edits = like.edits
    else:
        made.edits.digest = mixed
    return made


def _foreach_elementwise(func, args, kwargs):
    args = [[*map(_whole, a)] if isinstance(a, (list, tuple)) else a for a in args]
    lists = [arg for arg in args if isinstance(arg, list)]
    written = _aliased(func, args, kwargs, written=True)
    shards = [_find_shards(func, operands, written) for operands in zip(*lists, strict=True)]
    of_all = [_digest(each) for each in (*args, *kwargs.values()) if not isinstance(each, list)]
    mixed = [
        _mixed(of_one, [*of_all, *map(_digest, operands)]) if of_one else 0
        for of_one, operands in zip(shards, zip(*lists, strict=True), strict=True)
    ]

    def to_slices(argument):
        if not isinstance(argument, list):
            return argument
        both = zip(argument, shards, strict=True)
        return [_to_slice(operand, like[0]) if like else operand for operand, like in both]

    slices = {name: to_slices(argument) for name, argument in kwargs.items()}
    result = func(*map(to_slices, args), **slices)
    if result is None:  # in place: nothing else counts the write, and the engine asks
        changed = [t.local for t in written if isinstance(t, ShardTensor)]
        torch.autograd.graph.increment_version(changed)
        for of_one, digest in zip(shards, mixed, strict=True):
            if of_one:
                of_one[0].edits.digest = 0 if func in _OVERWRITES else digest
        return None
    made = [wrap(r, s[0]) if s else r for r, s in zip(result, shards, strict=True)]
    for each, of_one, digest in zip(made, shards, mixed, strict=True):
        if of_one:
            each.edits.digest = digest
    return made


def _on_full_tensors(func, args, kwargs):
    aliased = _aliased(func, args, kwargs, written=False)
    if (
        any(isinstance(leaf, ShardTensor) for leaf in aliased)
        or torch.Tag.nondeterministic_seeded in func.tags
        or func.namespace == "c10d"  # whose schemas do not tell what they write to
    ):
        if func.overloadpacket is torch.ops.c10d.allreduce_:
            raise NotImplementedError(
                "zero_ext: all_reduce() of a ShardTensor. Gradients are averaged over the ranks "
                "already, in the backward: delete this call."
            )
        raise NotImplementedError(
            f"zero_ext: {func} is not available on a ShardTensor, which holds a flat slice on each "
            "rank. To read, use shard.full_tensor() on all ranks; to write, use elementwise "
            "operations, shard.copy_(full_tensor), or shard.to_local(), this rank's slice."
        )
    args, kwargs = tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
    return func(*args, **kwargs)


def _new(func, shard, size, *rest, **kwargs):
    """``new_empty`` and its kin: of the same shape a ShardTensor cut alike, else a plain tensor."""
    local = shard.local
    strided = func is aten.new_empty_strided.default
    if torch.Size(size) != shard.shape or (strided and tuple(rest[0]) != shard.stride()):
        return func(local, size, *rest, **kwargs)
    return wrap(func(local, local.shape, *([(1,)] if strided else rest), **kwargs), shard)


def _copy_(func, destination, source, non_blocking=False):
    """As torch's: a full source is cut to this rank's slice, another DTensor is gathered first."""
    if not isinstance(destination, ShardTensor):
        copy_whole(destination, source.full_tensor())
        return destination
    if isinstance(source, ShardTensor) and _are_cut_alike(source, destination):
        _find_shards(func, [destination, source], written=())
        mixed, source = source.edits.digest, source.local
    else:
        source = source.full_tensor() if isinstance(source, DTensor) else source
        mixed, source = _digest(source), _cut(source, destination)
    func(destination.local, source, non_blocking)
    destination.edits.digest = mixed
    return destination


def _foreach_copy_(func, destinations, sources, non_blocking=False):
    for destination, source in zip(destinations, sources, strict=True):
        if isinstance(destination, ShardTensor) or isinstance(source, ShardTensor):
            _copy_(aten.copy_.default, destination, source, non_blocking)
        else:
            destination.copy_(source, non_blocking)


Cut = tuple[dist.ProcessGroup, ...]  # the groups whose ranks hold a tensor's elements together


def groups_of(tensors: Sequence[Tensor]) -> dict[Cut, list[int]]:
    """The numbers of ``tensors`` by the groups that cut them, in the same order on all ranks."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, ShardTensor):
            kinds.setdefault((id(tensor.mesh), id(tensor.outer)), []).append(i)
        elif isinstance(tensor, DTensor):
            kinds.setdefault((0, i), []).append(i)
    groups: dict[Cut, list[int]] = {}
    for members in kinds.values():
        if cut := _cut_of(tensors[members[0]]):
            groups.setdefault(cut, []).extend(members)
    return groups


def _cut_of(tensor: DTensor) -> Cut:
    if not isinstance(tensor, ShardTensor):
        return cutting_groups(spec_of(tensor))
    others = () if tensor.outer is None else cutting_groups(tensor.outer.spec)
    return (tensor.mesh.get_group(), *others)


def foreach_norm(func, tensors, order=2, dtype=None):
    """The norm of each tensor, by one all-reduce per group; plain tensors count as replicated.

    Slices' norms are combined in fp64, so that the result differs from one process's by summation
    order alone.
    """
    # The term of a rank without elements. To a negative power infinity adds nothing.
    nothing = inf if order < 0 else 0.0
    # A list: a device would wait for a list of indices.
    norms = [torch.full((), nothing, dtype=torch.float64, device=tensors[0].device)] * len(tensors)

    def put(members, values):
        for i, value in zip(members, values.unbind(), strict=True):
            norms[i] = value

    slices = locals_of(tensors)
    held = [i for i, part in enumerate(slices) if part.numel()]
    if held:
        held_norms = torch._foreach_norm([slices[i] for i in held], order, dtype)
        put(held, torch.stack(held_norms).double())
    for groups, members in groups_of(tensors).items():
        power = 1 if order in (0, inf, -inf) else order
        op = {inf: dist.ReduceOp.MAX, -inf: dist.ReduceOp.MIN}.get(order, dist.ReduceOp.SUM)
        part = torch.stack([norms[i] for i in members]) ** power
        several = func is aten._foreach_norm.Scalar
        with naming("the norm of sharded tensors (clip_grad_norm_)" if several else "norm()"):
            for group in groups:
                all_reduce_(part, group, op)
        put(members, part ** (1 / power))
    return [n.to(dtype or t.dtype) for n, t in zip(norms, tensors, strict=True)]


def _vector_norm(func, shard, order=2, dim=None, keepdim=False, *, dtype=None):
    if (dim is not None and len(dim) not in (0, shard.dim())) or keepdim:
        return _on_full_tensors(func, (shard, order, dim, keepdim), {"dtype": dtype})
    return foreach_norm(func, [shard], order, dtype)[0]


def _reduce_with(op: dist.ReduceOp):
    """A handler for a reduction of all elements that is ``op`` of the slices' results."""

    def handle(func, shard, **kwargs):
        result = func(shard.local, **kwargs)
        number = result.to(torch.uint8) if result.dtype == torch.bool else result
        with naming(f"{func.overloadpacket.__name__}() of a sharded tensor"):
            for group in _cut_of(shard):
                all_reduce_(number, group, op)
        return number.to(result.dtype)

    return handle


def _unscale_(func, grads, found_inf, inv_scale):
    if inv_scale.is_pinned():  # GradScaler's copies for offloaded gradients may be on their way
        torch.accelerator.synchronize()
    func(locals_of(grads), found_inf, inv_scale)
    for group in dict.fromkeys(chain.from_iterable(groups_of(grads))):
        with naming("unscale_() of sharded gradients"):
            all_reduce_(found_inf, group, dist.ReduceOp.MAX)


_HANDLERS = {
    aten.copy_.default: _copy_,
    aten._foreach_copy_.default: _foreach_copy_,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _vector_norm,
    aten._foreach_norm.Scalar: foreach_norm,
    aten.sum.default: _reduce_with(dist.ReduceOp.SUM),
    aten.any.default: _reduce_with(dist.ReduceOp.MAX),
    aten.all.default: _reduce_with(dist.ReduceOp.MIN),
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale_,
    aten.new_empty.default: _new,
    aten.new_empty_strided.default: _new,
    aten.new_full.default: _new,
    aten.new_ones.default: _new,
    aten.new_zeros.default: _new,
}
# Tagged as elementwise, but what they return is not one tensor of the operands' shape.
_NO_TENSOR = {aten.equal.default, aten.frexp.Tensor}
_FOREACH_REDUCTIONS = {aten._foreach_max.default, aten._foreach_powsum.Scalar}
_ALIASES = {aten.alias.default, aten.detach.default}
# These operations do not read the values that they overwrite.
_OVERWRITES = {
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    torch.ops.aten._foreach_zero_.default,
}
# Elementwise in effect, without the tag.
_KEEPS_SHAPE = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.detach_.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.full_like.default,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._to_copy.default,
}
