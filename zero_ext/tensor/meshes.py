"""Parameters that are DTensors: of tensor, sequence or expert parallelism, which has cut or copied
them over other dimensions of a device mesh than the one that their engine shards over.

An engine shards the local tensor of such a parameter. What the other dimensions mean is here. The
inner tensor of a class with hooks around gathers counts as a local tensor, see ``wrapped.py``.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from zero_ext._torch import (
    DTensorSpec,
    TensorMeta,
    compute_local_shape_and_global_offset,
    local_tensor_of,
    spec_of,
)
from zero_ext.ranks.agreement import naming
from zero_ext.ranks.collectives import all_reduce_
from zero_ext.tensor.wrapped import follow, has_gather_hooks, inner_of

_PLAIN = (nn.Parameter, Tensor)


def locals_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that an engine shards: a DTensor's local tensor, the inner tensor of a class with
    hooks around gathers, or the parameter itself."""
    return [p if type(p) in _PLAIN else local_of(p) for p in parameters]


def local_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return local_tensor_of(tensor)
    return inner_of(tensor) if has_gather_hooks(tensor) else tensor


class Outer(NamedTuple):
    """How a tensor lies on the other dimensions of the mesh.

    Attributes:
        spec: Mesh, placements, and the shape of the whole tensor.
        shape, stride: Of this rank's local tensor, which the engine's ranks share.
    """

    spec: DTensorSpec
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(parameter: Tensor, stride: Sequence[int]) -> "Outer | None":
        """None for a plain one."""
        if not isinstance(parameter, DTensor):
            return None
        return Outer(spec_of(parameter), local_tensor_of(parameter).shape, tuple(stride))

    def present(self, local: Tensor) -> DTensor:
        """``local``, of any dtype, as this rank's part of a DTensor. Aliased, not copied."""
        # torch gives a DTensor the storage offset of its local tensor, and takes it for an address.
        result = DTensor(
            local.new_empty(()), _with_dtype(self.spec, local.dtype), requires_grad=False
        )
        result._local_tensor = local
        return result

    def offset(self) -> tuple[int, ...]:
        """Where this rank's part begins, in each dimension of the whole tensor."""
        where = self.spec.shape, self.spec.mesh, self.spec.placements
        return compute_local_shape_and_global_offset(*where)[1]


def cut(whole: Tensor, spec: DTensorSpec) -> Tensor:
    """This rank's part of a plain tensor of the whole shape. Nothing is sent."""
    where = spec.mesh, spec.placements
    return local_of(distribute_tensor(whole.detach(), *where, src_data_rank=None))


def part_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """The part of a plain value of the parameter's whole shape that an engine shards."""
    return cut(whole, spec_of(parameter)) if isinstance(parameter, DTensor) else whole


def copy_whole(target: Tensor, value: Tensor) -> None:
    """``target.copy_(value)``, also where a plain ``value`` is to be cut for a DTensor."""
    if type(target) is DTensor and not isinstance(value, DTensor):
        target, value = local_of(target), part_of(target, value)
    target.copy_(value)


def cutting_groups(spec: DTensorSpec) -> tuple[dist.ProcessGroup, ...]:
    """The groups of the dimensions that cut a tensor: over these its elements are summed up."""
    return tuple(
        spec.mesh.get_group(d) for d, each in enumerate(spec.placements) if isinstance(each, Shard)
    )


def local_gradient(gradient: Tensor) -> Tensor:
    """The plain tensor inside a class with hooks around gathers. Others are returned as they are: a
    ShardTensor, too, knows its place among the ranks of its engine."""
    return inner_of(gradient) if has_gather_hooks(gradient) else gradient


def is_cut(parameter: Tensor) -> bool:
    """Whether other dimensions have cut it."""
    return isinstance(parameter, DTensor) and bool(cutting_groups(spec_of(parameter)))


def has_partial_sums(tensor: DTensor) -> bool:
    return any(each.is_partial() for each in tensor.placements)


def _with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    meta = spec.tensor_meta
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(*meta[:2], dtype))


def set_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    """Let the parameter have ``dtype``, which the caller gives its local tensor."""
    if parameter.dtype == dtype or local_of(parameter) is parameter:
        return
    if not isinstance(parameter, DTensor):
        follow(parameter, local_of(parameter).to(dtype))
        return
    spec = _with_dtype(spec_of(parameter), dtype)
    parameter.data = DTensor(local_of(parameter).to(dtype), spec, requires_grad=False)
    parameter._spec = spec


def convert(parameter: Tensor, dtype: torch.dtype) -> None:
    """Convert a parameter in place."""
    local = local_of(parameter)
    local.data = local.data.to(dtype)
    set_dtype(parameter, dtype)


def dimensions_of(spec: DTensorSpec) -> list[dist.ProcessGroup]:
    return [spec.mesh.get_group(d) for d in range(spec.mesh.ndim)]


def is_cut_over(parameter: Tensor, mesh: DeviceMesh | None) -> bool:
    """Whether ``mesh``, of one dimension, is one of those of a DTensor."""
    if mesh is None or not isinstance(parameter, DTensor):
        return False
    ranks = mesh.mesh.flatten().tolist()
    groups = dimensions_of(spec_of(parameter))
    return any(dist.get_process_group_ranks(group) == ranks for group in groups)


def reject_cut(what: str, parameter: Tensor, name: str | None, remedy: str) -> None:
    """Raise a TypeError that ``what`` needs whole parameters, where other dimensions cut it."""
    if is_cut(parameter):
        which = f"a parameter of shape {tuple(parameter.shape)}" if name is None else f"'{name}'"
        raise TypeError(
            f"zero_ext: {what} needs whole parameters, and {which} is a DTensor with placements "
            f"{parameter.placements}, which lies on several ranks of its mesh. {remedy}"
        )


class AcrossMeshes:
    """The DTensors among an engine's parameters, and what its steps must know of the ranks on
    their other dimensions; see csrc/step/step_agreement.h.

    Args:
        own: The group that the engine cuts tensors over; None: its ranks hold them whole.
        data: That of all ranks which average gradients; None: one rank.
        inside: The dimension among these that cuts experts, if one does.
        compare: Called in the first steps, when all ranks have come to them. It raises where
            gradients are unequal.
    """

    def __init__(
        self,
        own: dist.ProcessGroup | None,
        data: dist.ProcessGroup | None,
        compare: Callable[[], None],
        inside: DeviceMesh | None,
    ):
        self.groups: dict[dist.ProcessGroup, None] = {}  # of the other dimensions
        self._own, self._data, self._inside = own, data, inside
        self._compare, self._comparisons_left = compare, 2
        self._rows: list[tuple[dist.ProcessGroup, ...]] = [()]
        self._specs: dict[int, DTensorSpec] = {}

    def add(self, i: int, parameter: DTensor) -> int:
        """Returns the row of squares that the gradient of parameter i belongs to."""
        spec = self._specs[i] = spec_of(parameter)
        self.groups |= dict.fromkeys(filter(self._is_outside, dimensions_of(spec)))
        groups = cutting_groups(spec)
        if self._own is not None:  # its squares are summed over all of its ranks
            groups = tuple(filter(self._is_outside, groups))
        if groups not in self._rows:
            self._rows.append(groups)
        return self._rows.index(groups)

    def _is_outside(self, group: dist.ProcessGroup) -> bool:
        ranks = [] if self._inside is None else self._inside.mesh.flatten().tolist()
        return dist.get_process_group_ranks(group) != ranks

    @torch.no_grad()
    def local_gradient(self, i: int, gradient: Tensor) -> Tensor:
        """The local tensor of a DTensor that is a gradient of parameter i, in its placement.
        Others are returned as they are.

        Collective on the mesh of the parameter where the placements differ, as with partial sums.
        """
        if type(gradient) is not DTensor:
            return local_gradient(gradient)
        spec = self._specs[i]
        if gradient.device_mesh != spec.mesh:
            raise RuntimeError(
                f"zero_ext: a gradient lies on the mesh {gradient.device_mesh}, its parameter on "
                f"{spec.mesh}. Give the module inputs on the mesh of its parameters."
            )
        if gradient.placements != spec.placements:
            gradient = gradient.redistribute(spec.mesh, spec.placements)
        return gradient.to_local()

    @torch.no_grad()
    def find_unequal(
        self, tensors: Sequence[Tensor], tolerance: float, *, counts: bool = True
    ) -> int | None:
        """The first of ``tensors`` whose norm differs between ranks of the other dimensions.
        Collective.

        Args:
            tolerance: Relative. On some devices equal work has slightly different results.
            counts: Whether this rank's own matter.
        """
        if not tensors:
            return None
        norms = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors])
        ends = torch.cat([norms, -norms])
        with naming("a comparison between the other dimensions of the mesh"):
            for group in self.groups:
                all_reduce_(ends, group, dist.ReduceOp.MAX)
            largest, smallest = ends.chunk(2)
            differs = (counts & (largest + smallest > tolerance * largest)).to(torch.uint8)
            if self._data is not None:
                all_reduce_(differs, self._data, dist.ReduceOp.MAX)
        return int(differs.argmax()) if differs.any() else None

    def sum(self, values: Tensor) -> Tensor:
        """``values``: int64 [1 + rows, n]. Collective."""
        if self._comparisons_left > 0:
            self._compare()
            self._comparisons_left -= 1
        rows = values.shape[0] - 1
        if self._own is not None and rows > 0:
            _sum_rows(values, self._own, range(1, rows + 1))
        inside = () if self._own is not None else dict.fromkeys(chain(*self._rows))
        for group in dict.fromkeys((*self.groups, *inside)):
            cut = [1 + k for k, groups in enumerate(self._rows[:rows]) if group in groups]
            _sum_rows(values, group, [0, *cut])
        return values


def _sum_rows(values: Tensor, group: dist.ProcessGroup, rows: Sequence[int]) -> None:
    part = torch.stack([values[k] for k in rows])
    with naming("a step's verdict on the other dimensions of the mesh"):
        all_reduce_(part, group)
    for k, row in zip(rows, part, strict=True):
        values[k] = row
