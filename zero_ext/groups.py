"""Process groups of an engine: one for reductions, one for gathers, beside the user's own."""

import datetime
import itertools
import os
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

_CPU = torch.device("cpu")
# Engines made on a parent group so far: all members count alike, and a name is never used again,
# because the store still holds the addresses of the group that had it.
_engine_counts: dict[str, itertools.count] = defaultdict(itertools.count)


class Groups(NamedTuple):
    """``parent`` is None where one rank trains alone."""

    parent: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    rank: int
    world: int


def resolve(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> Groups:
    """The ranks to shard over: ``mesh``, else ``process_group``, else all, else this one alone."""
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(
                f"zero_ext: mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; pass the one to "
                "shard over, mesh['name']."
            )
        process_group = mesh.get_group()
    if not dist.is_available() or not dist.is_initialized():
        return Groups(None, None, 0, 1)
    parent = process_group or dist.group.WORLD
    world = dist.get_world_size(parent)
    if dist.get_rank(parent) < 0:
        raise ValueError("zero_ext: this rank is not a member of the process group it shards over.")
    if world > 1 and mesh is None:
        mesh = DeviceMesh.from_group(parent, "cpu")
    return Groups(parent, mesh, dist.get_rank(parent), world)


def _timeout() -> datetime.timedelta | None:
    """How long a rank waits for another one; None: as long as the user's process group says."""
    text = os.environ.get("ZERO_EXT_TIMEOUT_S")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"zero_ext: ZERO_EXT_TIMEOUT_S={text!r} is not a number of seconds.")
    return datetime.timedelta(seconds=seconds)


class CommGroups:
    """Two new groups over a parent's ranks, registered under their names while this is open.

    The engine resolves the names and from then on keeps the groups alive by itself; they go when it
    goes.
    """

    def __init__(self, groups: Groups):
        self.names: list[str] = []
        self._groups: list[dist.ProcessGroup] = []
        if groups.world == 1:
            return
        parent = groups.parent
        backend = parent._get_backend(_CPU)
        if not isinstance(backend, dist.ProcessGroupGloo):
            raise ValueError(
                f"zero_ext [rank {groups.rank}]: the process group has no gloo backend for CPU "
                "tensors. Use init_process_group('gloo')."
            )
        number = next(_engine_counts[parent.group_name])
        store = distributed_c10d._get_process_group_store(parent)
        timeout = _timeout() or backend.options._timeout
        for purpose in ("reduce", "gather"):
            name = f"zero_ext/{parent.group_name}/{number}/{purpose}"
            prefixed = dist.PrefixStore(name, store)
            group = dist.ProcessGroup(prefixed, groups.rank, groups.world)
            gloo = dist.ProcessGroupGloo(prefixed, groups.rank, groups.world, timeout)
            group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._set_group_name(name)
            torch._C._distributed_c10d._register_process_group(name, group)
            self.names.append(name)
            self._groups.append(group)

    def __enter__(self) -> list[str]:
        return self.names

    def __exit__(self, *exception) -> None:
        for name in self.names:
            torch._C._distributed_c10d._unregister_process_group(name)


def check_same_on_all_ranks(groups: Groups, description: list[str], what: str) -> None:
    """Raise on every rank if ``description`` differs, naming the first difference.

    Raises:
        ValueError: on all ranks.
    """
    if groups.world == 1:
        return
    digests: list = [None] * groups.world
    dist.all_gather_object(digests, hash_of(description), group=groups.parent)
    if len(set(digests)) == 1:
        return
    everyone: list = [None] * groups.world
    dist.all_gather_object(everyone, description, group=groups.parent)
    other = next(r for r in range(groups.world) if everyone[r] != everyone[0])
    pairs = itertools.zip_longest(everyone[0], everyone[other], fillvalue="nothing")
    number, (first, second) = next((n, p) for n, p in enumerate(pairs) if p[0] != p[1])
    raise ValueError(
        f"zero_ext [rank {groups.rank}]: {what} differ between ranks: number {number} is "
        f"'{first}' on rank 0 and '{second}' on rank {other} ({len(everyone[0])} and "
        f"{len(everyone[other])} in all). Build the same model on every rank before sharding it."
    )


def hash_of(description: list[str]) -> str:
    import hashlib

    return hashlib.sha256("\n".join(description).encode()).hexdigest()
