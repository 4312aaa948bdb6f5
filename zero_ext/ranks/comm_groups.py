"""The process groups that an engine communicates on, beside the user's own."""

import contextlib
import datetime
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zero_ext.ranks import environment
from zero_ext.ranks.groups import CPU, Groups

# Engines made on a parent group so far. All members count alike. A name is never used again:
# the store still holds the addresses of the group that had it.
_engine_counts: dict[str, itertools.count] = defaultdict(itertools.count)


def _backend_of(groups: Groups) -> dist.Backend | None:
    """The parent's own one for the ranks' device, else for the CPU."""
    kinds = {device.type for device in groups.parent._device_types}
    for device in (groups.device, CPU):
        if device.type in kinds:
            backend = groups.parent._get_backend(device)
            # TORCH_DISTRIBUTED_DEBUG=DETAIL puts another one around it.
            return getattr(backend, "wrapped_pg", backend)
    return None


def timeout_of(groups: Groups) -> datetime.timedelta:
    """How long a rank waits for another one."""
    options = getattr(_backend_of(groups), "options", None)
    return environment.timeout() or (options and options._timeout) or dist.default_pg_timeout


def _new_group(groups: Groups, store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A group like the parent: of its device's own backend, or of gloo, which then carries a
    device's tensors through host memory."""
    backend, timeout = _backend_of(groups), timeout_of(groups)
    kinds = dist.ProcessGroup.BackendType
    plugin = dist.Backend._plugins.get(backend.name().upper()) if backend is not None else None
    if _uses_nccl(groups):
        last = dist.ProcessGroupNCCL.Options()
        last._timeout = timeout
        make, kind, device = dist.ProcessGroupNCCL, kinds.NCCL, groups.device
    elif isinstance(backend, dist.ProcessGroupGloo):
        make, kind, device, last = dist.ProcessGroupGloo, kinds.GLOO, CPU, timeout
    elif plugin is not None and not plugin.extended_api:
        make, kind, device, last = plugin.creator_fn, kinds.CUSTOM, groups.device, timeout
    else:
        raise ValueError(
            f"{groups.where}the process group has no backend for tensors on "
            f"{groups.device}. Use init_process_group('gloo'), or 'nccl' on GPUs."
        )
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(device, kind, make(store, rank, size, last))
    group._set_default_backend(kind)
    return group


def _uses_nccl(groups: Groups) -> bool:
    backend = _backend_of(groups)
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)


class CommGroups(NamedTuple):
    """Names of process groups by attribute of ``EngineOptions``, and what goes with them."""

    names: dict[str, str]
    default_reduction: str = "exchange"
    timeout: datetime.timedelta = datetime.timedelta()


@contextlib.contextmanager
def comm_groups(groups: Groups) -> Iterator[CommGroups]:
    """New groups over a parent's ranks, registered under their names inside the context.

    Two are of all ranks, for reductions and for gathers. With several replicas two more are of this
    rank's replica, and one is of the ranks that hold the same range in each. The engine resolves
    the names and from then on keeps the groups alive by itself.
    """
    if groups.world == 1:
        yield CommGroups({})
        return
    parent = groups.parent
    number = next(_engine_counts[parent.group_name])
    store = distributed_c10d._get_process_group_store(parent)
    replica, shard = divmod(groups.rank, groups.shards)
    replicas = groups.world // groups.shards
    wanted = [(purpose, 0, groups.rank, groups.world) for purpose in ("reduce", "gather")]
    if replicas > 1:
        within = [(f"within_{purpose}", replica, shard, groups.shards) for purpose, *_ in wanted]
        wanted += [*within, ("across", shard, replica, replicas)]
    reduction = "collective" if _uses_nccl(groups) else "exchange"
    names, made = {}, []  # nothing else keeps the groups alive
    try:
        for purpose, part, rank, size in wanted:
            name = f"zero_ext/{parent.group_name}/{number}/{purpose}/{part}"
            made.append(_new_group(groups, dist.PrefixStore(name, store), rank, size))
            made[-1]._set_group_name(name)
            torch._C._distributed_c10d._register_process_group(name, made[-1])
            names[f"{purpose}_group"] = name
        yield CommGroups(names, reduction, timeout_of(groups))
    finally:
        for name in names.values():
            torch._C._distributed_c10d._unregister_process_group(name)
