"""The process groups that an engine communicates on, beside the user's own."""

import contextlib
import copy
import datetime
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zero_ext._torch import let_threads_finish_at_exit
from zero_ext.ranks import environment
from zero_ext.ranks.groups import CPU, Groups


def _backend_for(wanted: torch.device, groups: Groups) -> tuple[str | None, torch.device, Any]:
    """The parent's backend for ``wanted``, else for the CPU: its registered name, whose
    tensors it sends (gloo: the host's), and its options, where it shows them."""
    names = dict(n.split(":") for n in dist.get_backend_config(groups.parent).split(","))
    device = wanted if wanted.type in names else CPU
    if device.type not in names:
        return None, CPU, None
    backend, options = groups.parent._get_backend(device), None
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    with contextlib.suppress(AttributeError, RuntimeError):
        options = backend.options
    return names[device.type], CPU if backend.name() == "gloo" else device, options


def store_of(groups: Groups) -> dist.Store:
    """Where the ranks have met."""
    return distributed_c10d._get_process_group_store(groups.parent)


def timeout_of(groups: Groups) -> datetime.timedelta:
    """How long a rank waits for another one."""
    # A plugin's backend shows no options. The host's has the same timeout.
    options = (_backend_for(device, groups)[2] for device in (groups.device, CPU))
    own = next(filter(None, (getattr(each, "_timeout", None) for each in options)), None)
    return environment.timeout() or own or dist.default_pg_timeout


def _new_group(groups: Groups, name: str, store: dist.Store, rank: int, ranks: tuple[int, ...]):
    """A group of the global ``ranks`` with a backend of the parent's kind, and its options."""
    kind, device, options = _backend_for(groups.device, groups)
    asked, place = distributed_c10d._DistributedBackendOptions(), (store, rank, len(ranks))
    asked.store, asked.group_rank, asked.group_size = place
    asked.group_id, asked.global_ranks_in_group, asked.timeout = name, ranks, timeout_of(groups)
    with contextlib.suppress(TypeError, AttributeError):  # some are not copied: groups share them
        options = copy.deepcopy(options)
        options._timeout = asked.timeout
        options.split_from = None
        options.global_ranks_in_group, options.group_name = list(ranks), name
    group = dist.ProcessGroup(*place)
    if device.index is not None:
        # NCCL of torch 2.15 connects when it is made, on this device. Without it, it would take the
        # GPU with the number of the rank.
        group.bound_device_id = device
        with contextlib.suppress(AttributeError):  # before torch 2.15
            asked.process_group = group
    plugin = dist.Backend._plugins.get(str(kind).upper())  # since torch 2.15 of gloo and NCCL, too
    if plugin is not None and plugin.extended_api:
        made = plugin.creator_fn(asked, options)
    elif kind == "nccl":
        made = dist.ProcessGroupNCCL(*place, options)
    elif kind == "gloo" or plugin is not None:
        made = (plugin.creator_fn if plugin else dist.ProcessGroupGloo)(*place, asked.timeout)
    else:
        raise ValueError(
            f"{groups.where}the process group has no backend for tensors on "
            f"{groups.device}. Use init_process_group('gloo'), or 'nccl' on GPUs."
        )
    number = dist.Backend.backend_type_map.get(kind, dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(device, number, made)
    group._set_default_backend(number)
    return group


class CommGroups(NamedTuple):
    """Names of process groups by attribute of ``EngineOptions``, and what goes with them."""

    names: dict[str, str]
    default_reduction: str = "exchange"
    timeout: datetime.timedelta = datetime.timedelta()
    on_device: bool = False  # they carry tensors of a device


@contextlib.contextmanager
def comm_groups(groups: Groups) -> Iterator[CommGroups]:
    """New groups over a parent's ranks, registered under their names inside the context.

    Two are of all ranks, for reductions and for gathers. With replicas two more are of this rank's
    one, and one of the ranks that hold the same range. On a device two more are of the ranks with
    the same experts. The engine then keeps the groups alive.
    """
    if groups.world == 1:
        yield CommGroups({})
        return
    let_threads_finish_at_exit()
    parent, store = groups.parent, store_of(groups)
    # The store keeps a name's addresses: none is used again, also by a rank that has come later.
    number = (store.add(f"zero_ext/{parent.group_name}", 1) - 1) // groups.world
    replica, shard = divmod(groups.rank, groups.shards)
    wanted = [(purpose, 0, groups.rank, groups.global_ranks) for purpose in ("reduce", "gather")]
    if groups.world > groups.shards:
        ranks = groups.global_ranks[replica * groups.shards :][: groups.shards]
        within = [(f"within_{purpose}", replica, shard, ranks) for purpose, *_ in wanted]
        wanted += [*within, ("across", shard, replica, groups.global_ranks[shard :: groups.shards])]
    kind, device, _ = _backend_for(groups.device, groups)
    if groups.experts is not None and device != CPU and len(groups.experts.places) > 1:
        ranks = tuple(groups.global_ranks[place] for place in groups.experts.places)
        own = groups.experts.cut.get_local_rank(), groups.experts.alike.get_local_rank(), ranks
        wanted += [("expert_reduce", *own), ("expert_gather", *own)]
    reduction = "collective" if "nccl" in str(kind) else "exchange"
    names, made = {}, []  # nothing else keeps the groups alive
    try:
        for purpose, part, rank, ranks in wanted:
            name = f"zero_ext/{parent.group_name}/{number}/{purpose}/{part}"
            made.append(_new_group(groups, name, dist.PrefixStore(name, store), rank, ranks))
            made[-1]._set_group_name(name)
            torch._C._distributed_c10d._register_process_group(name, made[-1])
            names[f"{purpose}_group"] = name
        yield CommGroups(names, reduction, timeout_of(groups), device != CPU)
    finally:
        for name in names.values():
            torch._C._distributed_c10d._unregister_process_group(name)
