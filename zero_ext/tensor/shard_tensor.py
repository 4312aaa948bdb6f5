"""ShardTensor: a parameter's global shape over this rank's slice of a flat buffer.

``p.grad`` and the optimizer's state are ShardTensors. Rank r holds the row-major elements
``[bounds[r], bounds[r + 1])`` of the tensor, possibly none, as a 1-D view of one of the library's
flat buffers: a write through the ShardTensor writes the buffer. It is a DTensor, so that stock
PyTorch (``clip_grad_norm_``, ``GradScaler``, ``torch.distributed.checkpoint``) knows that it is
sharded. What operations do is in ``dispatch.py``.
"""

import copy
from collections.abc import Iterator, Sequence
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zero_ext import _C, _torch
from zero_ext._torch import DTensorSpec, TensorMeta, spec_of
from zero_ext.ranks.agreement import naming
from zero_ext.ranks.collectives import on_wire
from zero_ext.tensor.boxes import boxes
from zero_ext.tensor.meshes import Outer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class FlatShard(Shard):
    """The placement of a ShardTensor: nominally ``Shard(0)``, but of flat elements, not of rows."""

    def _local_shard_size_and_offset(self, *args, **kwargs):
        # Callers copy rows of a full tensor into the slice; equal sizes would hide the mistake.
        raise NotImplementedError(
            "zero_ext: a ShardTensor holds a flat slice, not rows of dimension 0: torch cannot cut "
            "a full tensor for it. Use shard.copy_(full_tensor), or load with "
            "broadcast_from_rank0=False."
        )


class _OwnDispatch(_torch.TorchDispatchMode):
    """Torch 2.11 sends what a subclass of DTensor gets to DTensor, unless a mode comes first."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, ShardTensor) for t in types):
            return ShardTensor.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class UntraceableError(_torch.Unsupported, NotImplementedError):
    """Where torch.compile meets it, it breaks the graph and leaves the operation to eager mode."""


def _refuse_tracing() -> NoReturn:
    raise UntraceableError(
        "zero_ext: a ShardTensor cannot be traced by torch.compile or torch.export. Compile "
        "the module, not the code that works on its gradients or state, or give that "
        "shard.to_local(). Export the module without gradients, after zero_grad()."
    )


# Where a box begins in the whole tensor and in the slice, its sizes in the order of memory, and the
# permutation of its dimensions into that of the tensor.
Place = tuple[torch.Size, int, tuple[int, ...], list[int]]


class InBoxes:
    """For torch.distributed.checkpoint: a slice is saved and loaded as the boxes that it consists
    of.

    That is imported when it asks: it takes torch a third as long as its own import.
    """

    local: Tensor  # this rank's slice, 1-D
    whole_shape: torch.Size

    def places(self) -> list[Place]:
        """Of the boxes, in the order of the slice."""
        raise NotImplementedError

    def __create_write_items__(self, fqn: str, object: Tensor) -> "list[WriteItem]":
        from torch.distributed.checkpoint import metadata, planner

        properties = metadata.TensorProperties.create_from_tensor(self.local)
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.whole_shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, values.shape) for offsets, values in self._boxes()]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        for offsets, values in self._boxes():
            if offsets == index.offset:
                return values
        raise ValueError(f"zero_ext: {self!r} holds no box of '{index.fqn}' at {index.offset}.")

    def _boxes(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """Where each begins, and its values, a view of the slice."""
        for offsets, start, sizes, order in self.places():
            yield offsets, self.local[start : start + prod(sizes)].view(sizes).permute(order)


class ShardTensor(InBoxes, DTensor):
    """See the head of this file. Made by ``Maker``."""

    # Element r is where rank r's slice begins, the last one the number of elements: [world + 1].
    bounds: tuple[int, ...]
    # The ranks that average the gradient: with hybrid sharding also those of other replicas.
    ranks: tuple[int, ...]
    # How the tensor lies on other dimensions of a mesh, if it does: what is cut flat is then the
    # part of it that the ranks of this mesh share.
    outer: Outer | None = None
    # Plain values that operations have mixed in; aliases share it. Each rank has cut its own part
    # out of them, so they must be equal on all ranks.
    edits: _C.Edits

    if torch.__version__ < "2.13":

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass(), _OwnDispatch():
                return func(*args, **(kwargs or {}))

    @classmethod
    @torch.compiler.disable  # calls of process groups cannot be traced
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch.run(func, args, kwargs or {})

    # Without a frame of Python, because norms ask it of each gradient.
    local = property(attrgetter("_local_tensor"), doc="This rank's slice, 1-D: the tensor itself.")
    mesh = property(attrgetter("_spec.mesh"), doc="As ``device_mesh``.")
    whole_shape = property(attrgetter("shape"))

    @property
    def held_range(self) -> tuple[int, int]:
        """The flat positions at which this rank's slice begins and ends."""
        rank = self.device_mesh.get_local_rank()
        return self.bounds[rank], self.bounds[rank + 1]

    def to_local(self, *, grad_placements=None) -> Tensor:
        """This rank's slice, 1-D: an alias, which has its own holders."""
        return self._local_tensor.detach()

    @torch.compiler.disable
    def full_tensor(self, *, grad_placements=None) -> Tensor:
        """Gather the whole tensor, a plain one of the global shape, on every rank. Collective."""
        part = self.gathered()
        return part.full_tensor() if self.outer is not None else part

    def gathered(self) -> Tensor:
        """Gather over this mesh alone: a plain tensor, or a DTensor on the other dimensions.
        Collective."""
        full = self._local_tensor.new_empty(self.bounds[-1])
        group = self.device_mesh.get_group()
        start, stop = self.held_range
        full[start:stop].copy_(self._local_tensor)
        wire = on_wire(full, group)
        # Broadcasts and not an all-gather: slices are uneven, most parameters have one holder.
        with naming("full_tensor()"):
            _C.broadcast_parts(wire, self.bounds, group.group_name)
        if wire is not full:
            full.copy_(wire)
        part = full.as_strided(self.part_shape, self.part_stride)
        return part if self.outer is None else self.outer.present(part)

    @property
    def part_shape(self) -> torch.Size:
        """The shape of the part that is cut flat."""
        return self.shape if self.outer is None else self.outer.shape

    @property
    def part_stride(self) -> tuple[int, ...]:
        return self.stride() if self.outer is None else self.outer.stride

    @property
    def part_offset(self) -> tuple[int, ...]:
        """Where it begins, in each dimension of the tensor."""
        return (0,) * self.dim() if self.outer is None else self.outer.offset()

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Writes the values: torch's would exchange the memory of a tensor that has none."""
        with torch.no_grad():
            self.copy_(value)

    def redistribute(self, device_mesh=None, placements=None, **kwargs) -> DTensor:
        """Gather to ``Replicate``; every other placement is an error. Collective."""
        if placements is None or not all(placement.is_replicate() for placement in placements):
            raise NotImplementedError(
                f"zero_ext: a ShardTensor can only be redistributed to Replicate(), not to "
                f"{placements}. Use distribute_tensor(shard.full_tensor(), mesh, placements)."
            )
        return DTensor.from_local(
            self.full_tensor(), device_mesh or self.device_mesh, placements, run_check=False
        )

    def __repr__(self) -> str:
        start, stop = self.held_range
        return (
            f"ShardTensor(shape={tuple(self.shape)}, rank {self.device_mesh.get_local_rank()} of "
            f"{self.device_mesh.size()} holds elements [{start}, {stop}) of {self.bounds[-1]}: "
            f"{self._local_tensor})"
        )

    def __deepcopy__(self, memo):
        memo[id(self)] = result = wrap(self._local_tensor.clone(), self)
        result.edits.digest = self.edits.digest
        return result

    def __reduce_ex__(self, protocol):
        # Many trainers let rank 0 alone pickle the optimizer: the other slices would be lost.
        raise RuntimeError(
            f"zero_ext: a ShardTensor of shape {tuple(self.shape)} cannot be pickled: this rank "
            "holds only a slice. On all ranks, save with zero_ext.checkpoint.save(path, model, "
            "optimizer), or pickle shard.full_tensor()."
        )

    def numpy(self, *, force: bool = False) -> NoReturn:
        """An error: loggers call it on one rank alone, and a gather would wait for the others."""
        raise RuntimeError(
            f"zero_ext: a ShardTensor of shape {tuple(self.shape)} cannot become an array or a "
            "list: this rank holds only a slice. Take that of shard.full_tensor(), on all ranks."
        )

    tolist = numpy

    def storage(self):
        # safetensors asks for it.
        raise RuntimeError(
            f"zero_ext: a ShardTensor of shape {tuple(self.shape)} cannot be written to a file as "
            "it is: this rank holds only a slice. Write safetensors files with "
            "zero_ext.checkpoint.export_safetensors(model, directory), on every rank."
        )

    def data_ptr(self) -> int:
        """0, as of every wrapper; torch would give the slice's storage offset (dcp.async_save asks
        whether there is memory)."""
        return 0

    def __tensor_flatten__(self):
        # Modes such as CommDebugMode look inside as well, where nothing is traced.
        if _torch.TracingContext.try_get() is not None:
            _refuse_tracing()
        return ["_local_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride):
        _refuse_tracing()

    def places(self) -> list[Place]:
        order = sorted(range(self.dim()), key=lambda d: -self.part_stride[d])  # the slowest first
        inverse = sorted(range(self.dim()), key=order.__getitem__)
        begin, start, found = self.part_offset, 0, []
        for offsets, sizes in boxes([self.part_shape[d] for d in order], *self.held_range):
            where = torch.Size(begin[d] + offsets[inverse[d]] for d in range(self.dim()))
            found.append((where, start, sizes, inverse))
            start += prod(sizes)
        return found


_torch.use_foreach_for(ShardTensor)


class Maker:
    """Makes the ShardTensors of one mesh, of one dimension over the ranks that share the tensors.

    Those of one shape, stride and dtype share a spec, because making one takes most of the time.

    Args:
        ranks: See ``ShardTensor.ranks``.
    """

    def __init__(self, mesh: DeviceMesh, ranks: tuple[int, ...]):
        self._mesh, self._ranks = mesh, ranks
        self._rank, self._size = mesh.get_local_rank(), mesh.size()
        self._specs: dict[TensorMeta, DTensorSpec] = {}

    def make(
        self,
        local: Tensor,
        shape: torch.Size,
        bounds: Sequence[int],
        stride: Sequence[int],
        outer: Outer | None = None,
    ) -> ShardTensor:
        """Present ``local``, this rank's slice of a flat buffer, as its part of a tensor of
        ``shape``.

        Args:
            local: 1-D and contiguous, with ``bounds[rank + 1] - bounds[rank]`` elements. Aliased,
                not copied.
            bounds: [world + 1] flat positions, from 0 to the number of elements that are cut flat:
                the same on all ranks.
            stride: The dense memory order that is flattened (channels_last, transposed).
            outer: See ``ShardTensor``. ``stride`` is then that of the whole tensor.
        """
        shape, bounds = torch.Size(shape), tuple(bounds)
        self._check(local, shape if outer is None else outer.shape, bounds)
        meta = TensorMeta(shape, tuple(stride), local.dtype)
        spec = self._specs.get(meta)
        if spec is None:
            spec = DTensorSpec(self._mesh, (FlatShard(0),), tensor_meta=meta)
            self._specs[meta] = spec
        return _present(local, spec, bounds, self._ranks, outer)

    def _check(self, local: Tensor, shape: torch.Size, bounds: tuple[int, ...]) -> None:
        ends = (bounds[:1], bounds[-1:]) == ((0,), (shape.numel(),))
        if len(bounds) != self._size + 1 or not ends or list(bounds) != sorted(bounds):
            raise ValueError(
                f"zero_ext [rank {self._mesh.get_rank()}]: bounds {bounds} of a tensor of shape "
                f"{tuple(shape)} must rise from 0 to {shape.numel()} in {self._size + 1} "
                "entries, one more than ranks."
            )
        numel = bounds[self._rank + 1] - bounds[self._rank]
        if local.shape != (numel,) or not local.is_contiguous():
            raise ValueError(
                f"zero_ext [rank {self._mesh.get_rank()}]: the slice has shape "
                f"{tuple(local.shape)} and strides {local.stride()}, bounds {bounds} call for "
                f"{numel} contiguous elements."
            )


def wrap(local: Tensor, like: ShardTensor) -> ShardTensor:
    """Present ``local``, of any dtype, as this rank's slice of a tensor that is cut as ``like``."""
    spec = spec_of(like)
    if local.dtype != like.dtype:
        spec = copy.copy(spec)
        spec.tensor_meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return _present(local, spec, like.bounds, like.ranks, like.outer)


def _present(
    local: Tensor,
    spec: DTensorSpec,
    bounds: tuple[int, ...],
    ranks: tuple[int, ...],
    outer: Outer | None,
) -> ShardTensor:
    result = ShardTensor(local, spec, requires_grad=False)
    result.bounds, result.ranks, result.edits = bounds, ranks, _C.Edits()
    if outer is not None:
        result.outer = outer
    return result


# At the end: they need what this file defines.
from zero_ext.tensor import dispatch, processes  # noqa: E402, F401
