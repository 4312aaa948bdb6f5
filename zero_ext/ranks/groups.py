"""Process groups of an engine: one for reductions, one for gathers, beside the user's own."""

import contextlib
import datetime
import itertools
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

_CPU = torch.device("cpu")
_LONGEST_S = 1e9  # that deadlines in ns can hold
# Engines made on a parent group so far: all members count alike, and a name is never used again,
# because the store still holds the addresses of the group that had it.
_engine_counts: dict[str, itertools.count] = defaultdict(itertools.count)


class Groups(NamedTuple):
    """``parent`` is None where one rank trains alone. ``device``: where this rank's parameters are,
    or will be where all of them are on the meta device. Messages name ranks as the launcher does:
    ``global_ranks`` has those of the group.

    ``shards`` ranks in a row are a replica, which holds one copy of what is sharded; all of them,
    unless sharding is hybrid. ``mesh``: of this rank's replica."""

    parent: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    rank: int
    world: int
    shards: int
    device: torch.device
    global_ranks: tuple[int, ...]

    @property
    def global_rank(self) -> int:
        return self.global_ranks[self.rank]

    @property
    def where(self) -> str:
        """The beginning of a message."""
        return f"zero_ext [rank {self.global_rank}]: "


def resolve(
    process_group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    parameters: Iterable[Tensor],
) -> Groups:
    """The ranks to shard over: ``mesh``, else ``process_group``, else all, else this one alone."""
    device = next((p.device for p in parameters if not p.is_meta), None)
    shards = None
    if mesh is not None:
        process_group, mesh, shards = _ranks_of(mesh)
    if not dist.is_available() or not dist.is_initialized():
        _warn_of_forgotten_group()
        return Groups(None, None, 0, 1, 1, device or _default_device(), (0,))
    parent = process_group or dist.group.WORLD
    device = device or _device_of(parent, mesh)
    world = dist.get_world_size(parent)
    if dist.get_rank(parent) < 0:
        raise ValueError("zero_ext: this rank is not a member of the process group it shards over.")
    if world > 1 and mesh is None:
        mesh = DeviceMesh.from_group(parent, device.type)
    global_ranks = tuple(dist.get_process_group_ranks(parent))
    return Groups(parent, mesh, dist.get_rank(parent), world, shards or world, device, global_ranks)


def _ranks_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, DeviceMesh, int]:
    """All ranks of ``mesh``, this one's replica, and how many ranks that has."""
    if mesh.ndim == 1:
        return mesh.get_group(), mesh, mesh.size()
    names = mesh.mesh_dim_names
    named = "" if names is not None else " (names: init_device_mesh(..., mesh_dim_names=...))"
    if mesh.ndim != 2:
        known = "" if names is None else f" {names}"
        raise ValueError(
            f"zero_ext: mesh has {mesh.ndim} dimensions{known}; pass the one to shard over, "
            f"mesh['name'], or two of them, mesh['replicate', 'shard']{named}."
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"zero_ext: the ranks of a mesh must rise along its rows, not be {mesh.mesh.tolist()}: "
            "each row is a replica. init_device_mesh() makes such meshes."
        )
    replica = DeviceMesh.from_group(mesh.get_group(1), mesh.device_type)
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD, replica, mesh.size(1)
    if names is None:
        raise ValueError(
            f"zero_ext: the mesh {mesh.mesh.tolist()} is of some ranks alone. Give its dimensions "
            f"names{named}, so that its ranks can be made a group."
        )
    return mesh._flatten().get_group(), replica, mesh.size(1)


def _warn_of_forgotten_group() -> None:
    """A launcher's processes would train alone, each its own model."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1" and "RANK" in os.environ:
        warnings.warn(
            f"zero_ext: this is one of {processes} processes (WORLD_SIZE), and there is no process "
            "group: each trains a model of its own. Call "
            "torch.distributed.init_process_group() before sharding.",
            stacklevel=4,
        )


def _default_device() -> torch.device:
    """Where a model on the meta device is made, also inside ``with torch.device("meta")``."""
    default = torch.get_default_device()
    return _CPU if default.type == "meta" else default


def _device_of(parent: dist.ProcessGroup, mesh: DeviceMesh | None) -> torch.device:
    """Of the mesh, or that the process group was made for, or the default one."""
    if mesh is not None:
        kind = mesh.device_type
    else:
        kinds = {device.type for device in parent._device_types}
        kind = _default_device().type if "cpu" in kinds else next(iter(kinds))
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else _CPU


def on_wire(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``tensor``, or a copy on a device that ``group`` has a backend for."""
    kinds = {device.type for device in group._device_types}
    if tensor.device.type in kinds:
        return tensor
    return tensor.cpu() if "cpu" in kinds else tensor.to(next(iter(kinds)))


def all_reduce_(tensor: Tensor, group: dist.ProcessGroup, op=dist.ReduceOp.SUM) -> None:
    """In place, on any device."""
    wire = on_wire(tensor, group)
    dist.all_reduce(wire, op, group)
    if wire is not tensor:
        tensor.copy_(wire)


def broadcast_(tensor: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    """In place, on any device; contiguous."""
    wire = on_wire(tensor, group)
    dist.broadcast(wire, group=group, group_src=rank)
    if wire is not tensor:
        tensor.copy_(wire)


def _timeout() -> datetime.timedelta | None:
    """How long a rank waits for another one; None: as long as the user's process group says."""
    text = os.environ.get("ZERO_EXT_TIMEOUT_S")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.001 <= seconds <= _LONGEST_S:
        raise ValueError(
            f"zero_ext: ZERO_EXT_TIMEOUT_S={text!r} is not a number of seconds from 0.001 to "
            f"{_LONGEST_S:g}."
        )
    return datetime.timedelta(seconds=seconds)


def shared_host_transport_allowed() -> bool:
    """Whether ranks may read each other's memory instead of sending messages."""
    text = os.environ.get("ZERO_EXT_CROSS_MEMORY", "1")
    if text not in ("0", "1"):
        raise ValueError(f"zero_ext: ZERO_EXT_CROSS_MEMORY={text!r} is neither 0 nor 1.")
    return text == "1"


def check_environment(groups: Groups) -> None:
    """Raise on every rank for what an engine would find wrong on one, among collectives."""
    with all_or_none(groups, "sharding"):
        _timeout()
        shared_host_transport_allowed()


class _Maker(NamedTuple):
    """Makes groups like the parent: of its device's own backend, or of gloo, which then carries a
    device's tensors through host memory."""

    make: Callable[[dist.Store, int, int], dist.ProcessGroup]  # of a store, rank and size
    kind: object  # of the backend
    timeout: datetime.timedelta


def _backend_of(groups: Groups) -> dist.Backend | None:
    """The parent's own one for the ranks' device, else for the CPU."""
    kinds = {device.type for device in groups.parent._device_types}
    for device in (groups.device, _CPU):
        if device.type in kinds:
            backend = groups.parent._get_backend(device)
            # TORCH_DISTRIBUTED_DEBUG=DETAIL puts another one around it.
            return getattr(backend, "wrapped_pg", backend)
    return None


def timeout_of(groups: Groups) -> datetime.timedelta:
    """How long a rank waits for another one."""
    options = getattr(_backend_of(groups), "options", None)
    return _timeout() or (options and options._timeout) or dist.default_pg_timeout


def _maker(groups: Groups) -> _Maker:
    backend, timeout = _backend_of(groups), timeout_of(groups)
    kinds = dist.ProcessGroup.BackendType
    plugin = dist.Backend._plugins.get(backend.name().upper()) if backend is not None else None
    if dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL):
        last = dist.ProcessGroupNCCL.Options()
        last._timeout = timeout
        made, kind, device = dist.ProcessGroupNCCL, kinds.NCCL, groups.device
    elif isinstance(backend, dist.ProcessGroupGloo):
        made, kind, device, last = dist.ProcessGroupGloo, kinds.GLOO, _CPU, timeout
    elif plugin is not None and not plugin.extended_api:
        made, kind, device, last = plugin.creator_fn, kinds.CUSTOM, groups.device, timeout
    else:
        raise ValueError(
            f"{groups.where}the process group has no backend for tensors on "
            f"{groups.device}. Use init_process_group('gloo'), or 'nccl' on GPUs."
        )

    def make(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
        group = dist.ProcessGroup(store, rank, size)
        group._register_backend(device, kind, made(store, rank, size, last))
        group._set_default_backend(kind)
        return group

    return _Maker(make, kind, timeout)


class CommGroups:
    """New groups over a parent's ranks, registered under their names while this is open: two of
    all ranks, for reductions and for gathers. Where these are several replicas, also two of this
    rank's replica, and one of the ranks that hold the same range in each.

    The engine resolves the names and from then on keeps the groups alive by itself; they go when it
    goes.
    """

    def __init__(self, groups: Groups):
        self.names: dict[str, str] = {}  # by attribute of EngineOptions
        self.default_reduction = "exchange"
        self.timeout = datetime.timedelta()
        self._groups: list[dist.ProcessGroup] = []
        if groups.world == 1:
            return
        parent = groups.parent
        maker = _maker(groups)
        self.timeout = maker.timeout
        if maker.kind == dist.ProcessGroup.BackendType.NCCL:
            self.default_reduction = "collective"
        number = next(_engine_counts[parent.group_name])
        store = distributed_c10d._get_process_group_store(parent)

        def make(purpose: str, part: int, rank: int, size: int) -> None:
            name = f"zero_ext/{parent.group_name}/{number}/{purpose}/{part}"
            group = maker.make(dist.PrefixStore(name, store), rank, size)
            group._set_group_name(name)
            torch._C._distributed_c10d._register_process_group(name, group)
            self.names[f"{purpose}_group"] = name
            self._groups.append(group)

        for purpose in ("reduce", "gather"):
            make(purpose, 0, groups.rank, groups.world)
        if groups.shards == groups.world:
            return
        replica, shard = divmod(groups.rank, groups.shards)
        for purpose in ("within_reduce", "within_gather"):
            make(purpose, replica, shard, groups.shards)
        make("across", shard, replica, groups.world // groups.shards)

    def __enter__(self) -> "CommGroups":
        return self

    def __exit__(self, *exception) -> None:
        for name in self.names.values():
            torch._C._distributed_c10d._unregister_process_group(name)


@contextlib.contextmanager
def naming(where: str, what: str) -> Iterator[None]:
    """What collectives inside raise says who waited for what.

    Raises:
        RuntimeError: whatever RuntimeError they raise, behind ``where`` and ``what``.
    """
    try:
        yield
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise RuntimeError(
            f"{where}{what} waited for the other ranks: {cause}. Call it on every rank."
        ) from error


def of_all_ranks(value: Any, groups: Groups, what: str) -> list:
    """In rank order. Collective."""
    values: list = [None] * groups.world
    own = contextlib.nullcontext()
    # NCCL carries objects through the current device, which need not be ours.
    if groups.device.type != "cpu" and groups.device.index is not None:
        own = torch.accelerator.device_index(groups.device.index)
    with naming(groups.where, what), own:
        dist.all_gather_object(values, value, group=groups.parent)
    return values


def check_same_on_all_ranks(
    groups: Groups,
    description: list[str],
    what: str,
    remedy: str = "Build the same model on every rank before sharding it.",
) -> None:
    """Raise on every rank if ``description`` differs, naming the first difference.

    Raises:
        ValueError: on all ranks.
    """
    if groups.world == 1:
        return
    comparing = f"comparing {what}"
    if len(set(of_all_ranks(hash_of(description), groups, comparing))) == 1:
        return
    everyone = of_all_ranks(description, groups, comparing)
    other = next(r for r in range(groups.world) if everyone[r] != everyone[0])
    pairs = itertools.zip_longest(everyone[0], everyone[other], fillvalue="nothing")
    number, (first, second) = next((n, p) for n, p in enumerate(pairs) if p[0] != p[1])
    raise ValueError(
        f"{groups.where}{what} differ between ranks: number {number} is "
        f"'{first}' on rank {groups.global_ranks[0]} and '{second}' on rank "
        f"{groups.global_ranks[other]} ({len(everyone[0])} and "
        f"{len(everyone[other])} in all). {remedy}"
    )


@contextlib.contextmanager
def all_or_none(groups: Groups, what: str) -> Iterator[None]:
    """Raise on every rank if the body raised on one. Collective.

    Raises:
        RuntimeError: on the ranks where it did not, naming the first rank where it did.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    failures: list = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    if groups.world > 1:
        failures = of_all_ranks(failures[0], groups, what)
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text is not None:
            raise RuntimeError(f"{groups.where}{what}: rank {groups.global_ranks[rank]}: {text}")


def hash_of(description: list[str]) -> str:
    import hashlib

    return hashlib.sha256("\n".join(description).encode()).hexdigest()
