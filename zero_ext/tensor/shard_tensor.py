"""ShardTensor: a parameter's global shape over this rank's slice of a flat buffer.

What ``p.grad`` and the optimizer's state are made of. Rank r holds the row-major elements
``[bounds[r], bounds[r + 1])`` of the tensor, possibly none, as a 1-D view of one of the library's
flat buffers: a write through the ShardTensor writes the buffer. It is a DTensor, so that stock
PyTorch (``clip_grad_norm_``, ``GradScaler``, ``torch.distributed.checkpoint``) knows that it is
sharded.

Note [Which operation runs where]
DTensor's own dispatch would take the slice for rows of the tensor and answer wrongly without an
error (``grad.sum(0)``, ``grad.mean()``, ``grad.t()``). So every operation runs in one of four ways:
- elementwise ones and their ``_foreach_`` forms: on the slices, without communication;
- norm, sum, any, all and GradScaler's check: on the slices, then one all-reduce; plain result;
- others that only read: on the gathered tensors, exactly as in one process; plain result;
- views, random fills, others that write: refused, a write into a gathered copy would be lost.
The second and third kind are collectives, which all ranks must call.
"""

import copy
from collections.abc import Sequence
from math import inf, prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import optimizer as _torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zero_ext import _C
from zero_ext.ranks.groups import all_reduce_, naming, on_wire

aten = torch.ops.aten


class FlatShard(Shard):
    """The placement of a ShardTensor: nominally ``Shard(0)``, but of flat elements, not of rows."""

    def _local_shard_size_and_offset(self, *args, **kwargs):
        # Callers copy rows of a full tensor into the slice; equal sizes would hide the mistake.
        raise NotImplementedError(
            "zero_ext: a ShardTensor holds a flat slice, not rows of dimension 0: torch cannot cut "
            "a full tensor for it. Use shard.copy_(full_tensor), or load with "
            "broadcast_from_rank0=False."
        )


class _OwnDispatch(TorchDispatchMode):
    """Torch 2.11 sends what a subclass of DTensor gets to DTensor, unless a mode comes first."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, ShardTensor) for t in types):
            return ShardTensor.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class UntraceableError(Unsupported, NotImplementedError):
    """Where torch.compile meets it, it breaks the graph and leaves the operation to eager mode."""


class ShardTensor(DTensor):
    """See the head of this file. Made by ``make``."""

    # Element r is where rank r's slice begins, the last one the number of elements: [world + 1].
    bounds: tuple[int, ...]

    if torch.__version__ < "2.13":

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass(), _OwnDispatch():
                return func(*args, **(kwargs or {}))

    @classmethod
    @torch.compiler.disable  # calls of process groups cannot be traced
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _HANDLERS:
            return _HANDLERS[func](func, *args, **kwargs)
        if func._schema.name.startswith("aten::_foreach_") and func not in _FOREACH_REDUCTIONS:
            return _foreach_elementwise(func, args, kwargs)
        if func in _KEEPS_SHAPE or (torch.Tag.pointwise in func.tags and func not in _NO_TENSOR):
            return _elementwise(func, args, kwargs)
        return _on_full_tensors(func, args, kwargs)

    def to_local(self, *, grad_placements=None) -> Tensor:
        """This rank's slice, 1-D: an alias, which has its own holders."""
        return self._local_tensor.detach()

    @torch.compiler.disable
    def full_tensor(self, *, grad_placements=None) -> Tensor:
        """Gather the whole tensor, a plain one of the global shape, on every rank. Collective."""
        full = self._local_tensor.new_empty(self.numel())
        group = self.device_mesh.get_group()
        start, stop = _slice_of(self)
        full[start:stop].copy_(self._local_tensor)
        wire = on_wire(full, group)
        # Broadcasts and not an all-gather: slices are uneven, most parameters have one holder.
        with _naming("full_tensor()", group):
            _C.broadcast_parts(wire, self.bounds, group.group_name)
        if wire is not full:
            full.copy_(wire)
        return full.as_strided(self.shape, self.stride())

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Writes the values: torch's would exchange the memory of a tensor that has none."""
        with torch.no_grad():
            self.copy_(value)

    def redistribute(self, device_mesh=None, placements=None, **kwargs) -> DTensor:
        """Gather to ``Replicate``; every other placement is refused. Collective."""
        if placements is None or not all(placement.is_replicate() for placement in placements):
            raise NotImplementedError(
                f"zero_ext: a ShardTensor can only be redistributed to Replicate(), not to "
                f"{placements}. Use distribute_tensor(shard.full_tensor(), mesh, placements)."
            )
        return DTensor.from_local(
            self.full_tensor(), device_mesh or self.device_mesh, placements, run_check=False
        )

    def __repr__(self) -> str:
        start, stop = _slice_of(self)
        return (
            f"ShardTensor(shape={tuple(self.shape)}, rank {self.device_mesh.get_local_rank()} of "
            f"{self.device_mesh.size()} holds elements [{start}, {stop}) of {self.numel()}: "
            f"{self._local_tensor})"
        )

    def __deepcopy__(self, memo):
        memo[id(self)] = result = wrap(self._local_tensor.clone(), self)
        return result

    def __reduce_ex__(self, protocol):
        # Many trainers let rank 0 alone pickle the optimizer: the other slices would be lost.
        raise RuntimeError(
            f"zero_ext: a ShardTensor of shape {tuple(self.shape)} cannot be pickled: this rank "
            "holds only a slice. On all ranks, save with zero_ext.checkpoint.save(path, model, "
            "optimizer), or torch.save what state_dict() gives inside "
            "model.summon_full_params(writeback=False), or pickle shard.full_tensor()."
        )

    def data_ptr(self) -> int:
        """0, as of every wrapper; torch would give the slice's storage offset (dcp.async_save asks
        whether there is memory)."""
        return 0

    def __tensor_flatten__(self):
        raise UntraceableError(
            "zero_ext: a ShardTensor cannot be traced by torch.compile or torch.export. Compile "
            "the module, not the code that works on its gradients or state, or give that "
            "shard.to_local(). Export the module without gradients, after zero_grad()."
        )

    # torch.distributed.checkpoint: a slice is saved and loaded as the boxes that it consists of.

    def __create_write_items__(self, fqn: str, object: Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        order = _memory_order(self)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return [
            ChunkStorageMetadata(
                offsets=torch.Size(offsets[d] for d in inverse),
                sizes=torch.Size(sizes[d] for d in inverse),
            )
            for offsets, sizes in boxes([self.shape[d] for d in order], *_slice_of(self))
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        start = 0
        for chunk in self.__create_chunk_list__():
            stop = start + prod(chunk.sizes)
            if chunk.offsets == index.offset:
                order = _memory_order(self)
                inverse = sorted(range(len(order)), key=order.__getitem__)
                box = self._local_tensor[start:stop].view([chunk.sizes[d] for d in order])
                return box.permute(inverse)
            start = stop
        raise ValueError(f"zero_ext: {self!r} holds no box of '{index.fqn}' at {index.offset}.")


# The default (foreach=None) of clip_grad_norm_ and of optimizers asks these lists; DTensor adds
# itself too. Without it every gradient's norm would be an all-reduce of its own.
for _types in (_foreach_utils._foreach_supported_types, _torch_optimizer._foreach_supported_types):
    if ShardTensor not in _types:
        _types.append(ShardTensor)


def make(
    local: Tensor,
    shape: torch.Size,
    bounds: Sequence[int],
    mesh: DeviceMesh,
    stride: Sequence[int] | None = None,
) -> ShardTensor:
    """Present ``local``, this rank's slice of a flat buffer, as its part of a tensor of ``shape``.

    Args:
        local: 1-D and contiguous, with ``bounds[rank + 1] - bounds[rank]`` elements. Aliased, not
            copied.
        bounds: [world + 1] flat positions, from 0 to ``prod(shape)``: the same on all ranks.
        mesh: One dimension, over the ranks that share the tensor.
        stride: The dense memory order that is flattened (channels_last, transposed); default
            row-major.
    """
    shape, bounds = torch.Size(shape), tuple(bounds)
    rank = mesh.get_local_rank()
    where = f"zero_ext [rank {mesh.get_rank()}]: "
    if (
        len(bounds) != mesh.size() + 1
        or bounds[0] != 0
        or bounds[-1] != shape.numel()
        or list(bounds) != sorted(bounds)
    ):
        raise ValueError(
            f"{where}bounds {bounds} of a tensor of shape {tuple(shape)} must "
            f"rise from 0 to {shape.numel()} in {mesh.size() + 1} entries, one more than ranks."
        )
    if local.shape != (bounds[rank + 1] - bounds[rank],) or not local.is_contiguous():
        raise ValueError(
            f"{where}the slice has shape {tuple(local.shape)} and strides "
            f"{local.stride()}, bounds {bounds} call for {bounds[rank + 1] - bounds[rank]} "
            "contiguous elements."
        )
    if stride is None:
        stride = [prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape))]
    meta = TensorMeta(shape, tuple(stride), local.dtype)
    result = ShardTensor(
        local, DTensorSpec(mesh, (FlatShard(0),), tensor_meta=meta), requires_grad=False
    )
    result.bounds = bounds
    return result


def boxes(
    shape: Sequence[int], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the row-major elements ``[start, stop)`` of a tensor into boxes ``(offsets, sizes)``.

    In flat order and at most ``2 * len(shape) - 1`` of them. A tensor without elements is one empty
    box, so that a checkpoint knows of it.
    """
    if not prod(shape):
        return [((0,) * len(shape), tuple(shape))]
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row_numel = prod(shape[1:])
    row, first_full, last_full = start // row_numel, -(-start // row_numel), stop // row_numel

    def inside(row: int, start: int, stop: int):
        parts = boxes(shape[1:], start - row * row_numel, stop - row * row_numel)
        return [((row, *offsets), (1, *sizes)) for offsets, sizes in parts]

    if first_full > last_full:
        return inside(row, start, stop)
    result = inside(row, start, first_full * row_numel)
    if first_full < last_full:
        zeros = (0,) * (len(shape) - 1)
        result.append(((first_full, *zeros), (last_full - first_full, *shape[1:])))
    return result + inside(last_full, last_full * row_numel, stop)


def _slice_of(shard: ShardTensor) -> tuple[int, int]:
    rank = shard.device_mesh.get_local_rank()
    return shard.bounds[rank], shard.bounds[rank + 1]


def _memory_order(shard: ShardTensor) -> list[int]:
    """Dimensions from the slowest to the fastest in memory."""
    return sorted(range(shard.dim()), key=lambda d: -shard.stride()[d])


def wrap(local: Tensor, like: ShardTensor) -> ShardTensor:
    """Present ``local``, of any dtype, as this rank's slice of a tensor that is cut as ``like``."""
    spec = like._spec
    if local.dtype != like.dtype:
        spec = copy.copy(spec)
        spec.tensor_meta = TensorMeta(like.shape, like.stride(), local.dtype)
    result = ShardTensor(local, spec, requires_grad=False)
    result.bounds = like.bounds
    return result


def _to_local(argument):
    if isinstance(argument, ShardTensor):
        return argument._local_tensor
    if isinstance(argument, (list, tuple)):
        return [_to_local(item) for item in argument]
    return argument.full_tensor() if isinstance(argument, DTensor) else argument


def _call_on_slices(func, args, kwargs):
    return func(*map(_to_local, args), **{name: _to_local(arg) for name, arg in kwargs.items()})


def _find_shards(func, operands: Sequence) -> list[ShardTensor]:
    """The ShardTensors of ``operands``; all must be cut alike and other tensors be scalars, which
    are only read."""
    shards = [operand for operand in operands if isinstance(operand, ShardTensor)]
    target = func._schema.arguments[0].alias_info
    written = operands[0] if target is not None and target.is_write else None
    for operand in operands if shards else ():
        if isinstance(operand, ShardTensor):
            fits = operand.shape == shards[0].shape and operand.bounds == shards[0].bounds
        elif isinstance(operand, Tensor):
            fits = operand.dim() == 0 and operand is not written
        else:
            fits = True
        if not fits:
            # No TypeError: torch's operators catch it, and `p -= lr * p.grad` would go on as
            # `p = p - …`, which leaves the parameter as it was.
            raise RuntimeError(
                f"zero_ext: {func} of a ShardTensor of shape {tuple(shards[0].shape)} with a "
                f"{type(operand).__name__} of shape {tuple(operand.shape)}: operands must be "
                "scalars or ShardTensors with the same bounds. Parameters are stepped by an "
                "optimizer of zero_ext.optim, or by hand with shard.full_tensor(). Cut a full "
                "tensor to fit with torch.empty_like(shard).copy_(tensor)."
            )
    return shards


def _elementwise(func, args, kwargs):
    shards = _find_shards(func, [*args, *kwargs.values()])
    result = _call_on_slices(func, args, kwargs)
    for shard in shards:  # changed in place, or given as out=
        if result is shard._local_tensor:
            return shard
    return wrap(result, shards[0])


def _foreach_elementwise(func, args, kwargs):
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    shards = [_find_shards(func, operands) for operands in zip(*lists, strict=True)]
    result = _call_on_slices(func, args, kwargs)
    if result is None:  # in place: nothing else counts the write, and the engine asks
        written = [t._local_tensor for t in args[0] if isinstance(t, ShardTensor)]
        torch.autograd.graph.increment_version(written)
        return None
    return [wrap(r, s[0]) if s else r for r, s in zip(result, shards, strict=True)]


def _on_full_tensors(func, args, kwargs):
    arguments = func._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    aliased = [given.get(a.name) for a in arguments if a.alias_info is not None]
    if (
        any(isinstance(leaf, ShardTensor) for leaf in tree_leaves(aliased))
        or torch.Tag.nondeterministic_seeded in func.tags
        or func.namespace == "c10d"  # whose schemas do not tell what they write to
    ):
        raise NotImplementedError(
            f"zero_ext: {func} is not available on a ShardTensor, which holds a flat slice on each "
            "rank. To read, use shard.full_tensor() on all ranks; to write, use elementwise "
            "operations, shard.copy_(full_tensor), or shard.to_local(), this rank's slice."
        )
    args, kwargs = tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
    return func(*args, **kwargs)


def _new(func, shard, size, *rest, **kwargs):
    """``new_empty`` and its kin: of the same shape a ShardTensor cut alike, else a plain tensor."""
    local = shard._local_tensor
    strided = func is aten.new_empty_strided.default
    if torch.Size(size) != shard.shape or (strided and tuple(rest[0]) != shard.stride()):
        return func(local, size, *rest, **kwargs)
    return wrap(func(local, local.shape, *([(1,)] if strided else rest), **kwargs), shard)


def _copy_(func, destination, source, non_blocking=False):
    """As torch's: a full source is cut to this rank's slice, another DTensor is gathered first."""
    if not isinstance(destination, ShardTensor):
        return func(destination, source.full_tensor(), non_blocking)
    if isinstance(source, ShardTensor) and source.bounds == destination.bounds:
        _find_shards(func, [destination, source])
        source = source._local_tensor
    else:
        source = source.full_tensor() if isinstance(source, DTensor) else source
        start, stop = _slice_of(destination)
        full = source.new_empty_strided(destination.shape, destination.stride())
        source = full.copy_(source).as_strided((full.numel(),), (1,))[start:stop]
    func(destination._local_tensor, source, non_blocking)
    return destination


def _foreach_copy_(func, destinations, sources, non_blocking=False):
    for destination, source in zip(destinations, sources, strict=True):
        if isinstance(destination, ShardTensor) or isinstance(source, ShardTensor):
            _copy_(aten.copy_.default, destination, source, non_blocking)
        else:
            destination.copy_(source, non_blocking)


def _naming(what: str, group: dist.ProcessGroup):
    """Backends say neither who waited nor for what."""
    return naming(f"zero_ext [rank {dist.get_rank()}]: ", what)


def _groups_of(tensors: Sequence[Tensor]) -> dict[dist.ProcessGroup, list[int]]:
    """Which of ``tensors`` are sharded over which group, in an order that is equal on all ranks."""
    meshes, groups = {}, {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, ShardTensor):
            meshes.setdefault(id(tensor._spec.mesh), (tensor._spec.mesh, []))[1].append(i)
    for mesh, members in meshes.values():
        groups.setdefault(mesh.get_group(), []).extend(members)
    return groups


def _foreach_norm(func, tensors, order=2, dtype=None):
    """The norm of each tensor, by one all-reduce per group; plain tensors count as replicated.

    Slices' norms are combined in fp64, so that the result differs from one process's by summation
    order alone.
    """
    # What a rank without elements contributes; to a negative power infinity is nothing.
    nothing = inf if order < 0 else 0.0
    # A list: a device would wait for a list of indices.
    norms = [torch.full((), nothing, dtype=torch.float64, device=tensors[0].device)] * len(tensors)

    def put(members, values):
        for i, value in zip(members, values.unbind(), strict=True):
            norms[i] = value

    slices = [t._local_tensor if isinstance(t, ShardTensor) else t for t in tensors]
    held = [i for i, part in enumerate(slices) if part.numel()]
    if held:
        held_norms = torch._foreach_norm([slices[i] for i in held], order, dtype)
        put(held, torch.stack(held_norms).double())
    for group, members in _groups_of(tensors).items():
        power = 1 if order in (0, inf, -inf) else order
        op = {inf: dist.ReduceOp.MAX, -inf: dist.ReduceOp.MIN}.get(order, dist.ReduceOp.SUM)
        part = torch.stack([norms[i] for i in members]) ** power
        with _naming("the norm of sharded tensors (clip_grad_norm_)", group):
            all_reduce_(part, group, op)
        put(members, part ** (1 / power))
    return [n.to(dtype or t.dtype) for n, t in zip(norms, tensors, strict=True)]


def _vector_norm(func, shard, order=2, dim=None, keepdim=False, *, dtype=None):
    if (dim is not None and len(dim) not in (0, shard.dim())) or keepdim:
        return _on_full_tensors(func, (shard, order, dim, keepdim), {"dtype": dtype})
    return _foreach_norm(func, [shard], order, dtype)[0]


def _reduce_with(op: dist.ReduceOp):
    """A handler for a reduction of all elements that is ``op`` of the slices' results."""

    def handle(func, shard, **kwargs):
        result = func(shard._local_tensor, **kwargs)
        number = result.to(torch.uint8) if result.dtype == torch.bool else result
        group = shard.device_mesh.get_group()
        with _naming(f"{func} of a sharded tensor", group):
            all_reduce_(number, group, op)
        return number.to(result.dtype)

    return handle


def _unscale_(func, grads, found_inf, inv_scale):
    if inv_scale.is_pinned():  # GradScaler's copies for offloaded gradients may be on their way
        torch.accelerator.synchronize()
    func(_to_local(grads), found_inf, inv_scale)
    for group in _groups_of(grads):
        with _naming("unscale_() of sharded gradients", group):
            all_reduce_(found_inf, group, dist.ReduceOp.MAX)


_HANDLERS = {
    aten.copy_.default: _copy_,
    aten._foreach_copy_.default: _foreach_copy_,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
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
