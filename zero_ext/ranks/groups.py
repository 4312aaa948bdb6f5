"""Groups: the ranks that a model is sharded over."""

import datetime
import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

CPU = torch.device("cpu")
ALONE = "alone"  # in place of a mesh or a process group: this rank trains alone


class Experts(NamedTuple):
    """How experts lie among the ranks, which average the gradients of all else.

    Attributes:
        cut: The dimension that cuts the experts: each of its ranks has others.
        alike: The ranks that have the same experts as this one, and shard them together.
        places: Their ranks in ``Groups.parent``, which rise.
    """

    cut: DeviceMesh
    alike: DeviceMesh
    places: tuple[int, ...]


class Groups(NamedTuple):
    """The ranks that a model is sharded over, as this rank sees them.

    ``shards`` ranks in a row are a replica, which holds one copy of what is sharded. Without hybrid
    sharding all ranks are one replica.

    Attributes:
        parent: The group of all ranks; None where one rank trains alone.
        mesh: Of this rank's replica.
        rank, world: In ``parent``.
        device: Where this rank's parameters are, or will be if all of them are on the meta device.
        global_ranks: The launcher's names of the ranks, which messages use.
        experts: See ``shard(expert_mesh=)``.
    """

    parent: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    rank: int
    world: int
    shards: int
    device: torch.device
    global_ranks: tuple[int, ...]
    experts: Experts | None = None

    @property
    def global_rank(self) -> int:
        return self.global_ranks[self.rank]

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        return self.experts and self.experts.cut

    @property
    def where(self) -> str:
        """The beginning of a message."""
        return f"zero_ext [rank {self.global_rank}]: "


def rank_and_world() -> tuple[int, int]:
    """This rank among all, and their number; without a process group this one is alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def resolve(
    process_group: dist.ProcessGroup | Literal["alone"] | None,
    mesh: DeviceMesh | Literal["alone"] | None,
    parameters: Iterable[Tensor],
) -> Groups:
    """The ranks to shard over: ``mesh``, else ``process_group``, else all, else this one alone.

    Raises:
        RuntimeError: a launcher has started several processes, and there is no process group.
    """
    initialized = dist.is_available() and dist.is_initialized()
    device = next((p.device for p in parameters if not p.is_meta), None)
    if ALONE in (process_group, mesh):
        rank, _ = rank_and_world()
        return Groups(None, None, 0, 1, 1, device or _default_device(), (rank,))
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            "zero_ext: process_group must be a process group of torch.distributed, not a "
            f"{type(process_group).__name__}."
        )
    shards = None
    if mesh is not None:
        process_group, mesh, shards = _ranks_of(mesh)
    if not initialized:
        _refuse_forgotten_group()
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


def make_group(
    ranks: Sequence[int], backend: str | None = None, timeout: datetime.timedelta | None = None
) -> dist.ProcessGroup:
    """A new group of the global ``ranks``. They alone take part, and make such groups in one order.

    torch's ``new_group(use_local_synchronization=True)`` names it by a count: of the groups that
    each rank has made (torch 2.15), or is in. Ranks may differ in both. Here their store counts.
    """
    known = dist.distributed_c10d._world
    own, store = known.pg_map[dist.group.WORLD]
    kind, digest = dist.Backend(backend or own), hashlib.sha256(str([*ranks]).encode())
    name = f"zero_ext/ranks/{digest.hexdigest()[:16]}"
    group, _ = dist.distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        [*ranks],
        kind,
        store,
        f"{name}/{(store.add(name, 1) - 1) // len(ranks)}",
        timeout=timeout or dist.distributed_c10d._get_default_timeout(kind),
        device_id=dist.group.WORLD.bound_device_id,
    )
    known.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def mesh_of_this_rank(device: torch.device) -> DeviceMesh | None:
    """A mesh of this rank alone; None without a process group. No other rank takes part."""
    if not dist.is_initialized():
        return None
    return DeviceMesh.from_group(make_group([dist.get_rank()]), device.type)


def _ranks_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, DeviceMesh, int]:
    """The group of all ranks of ``mesh``, the mesh of this rank's replica, and the replica's
    number of ranks."""
    if not isinstance(mesh, DeviceMesh):
        remedy = "Make one with init_device_mesh()."
        if isinstance(mesh, dist.ProcessGroup):
            remedy = "Call DeviceMesh.from_group(group, device_type)."
        raise TypeError(
            f"zero_ext: mesh must be a DeviceMesh, not a {type(mesh).__name__}. {remedy}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"zero_ext [rank {dist.get_rank()}]: the mesh {mesh.mesh.tolist()} is without this "
            "rank. Call shard() on the mesh's ranks alone."
        )
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


def _refuse_forgotten_group() -> None:
    """Without a process group each process of a launcher would train a model of its own."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1" and "RANK" in os.environ:
        raise RuntimeError(
            f"zero_ext [rank {os.environ['RANK']}]: this is one of {processes} processes "
            "(WORLD_SIZE), and there is no process group: each would train a model of its own. "
            "Call torch.distributed.init_process_group() before sharding."
        )


def _default_device() -> torch.device:
    """Where a model on the meta device is made, also inside ``with torch.device("meta")``."""
    default = torch.get_default_device()
    return CPU if default.type == "meta" else default


def _device_of(parent: dist.ProcessGroup, mesh: DeviceMesh | None) -> torch.device:
    """The device of the mesh, or the one that the process group was made for, or the default."""
    if mesh is not None:
        kind = mesh.device_type
    else:
        kinds = {device.type for device in parent._device_types}
        kind = _default_device().type if "cpu" in kinds else next(iter(kinds))
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else CPU
