"""The memory of a sharded model: measured (``stats``), and planned (``estimate_memory``)."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import OffloadPolicy

from zero_ext import _C
from zero_ext.engine import options as settings
from zero_ext.engine.checks import (
    check_bool,
    check_count,
    check_module,
    check_state_dtype,
    stays_whole,
)
from zero_ext.engine.options import ShardingOptions
from zero_ext.engine.plan import Plan, parameters_of, plan_module
from zero_ext.engine.registry import Handle, handle_of
from zero_ext.engine.units import Block, Choice, Tree, UnitPlan
from zero_ext.ranks import owner_plan
from zero_ext.tensor.meshes import locals_of

_FP32_BYTES = 4  # of an element of a gradient sum, of a master, of each of two moments
_ALIGNMENT_BYTES = 64
# See Note [Blocks of a slot] in csrc/memory/layout.h.
_BLOCK_NUMEL = 256
_BLOCKED_NUMEL = 4096


def stats(sharded) -> dict[str, int]:
    """Counters of a sharded module or of an optimizer of this package.

    Returns:
        ``bytes_held`` and ``bytes_peak`` on this rank, ``bytes_<what>`` for what they are held,
        ``backwards``, ``reductions``, ``gathers``, ``steps``, ``units``; ``neighbors``: ranks of
        this host whose memory is read instead of sending messages; ``same_host``: 1 where each rank
        sees how far all others are; ``waited_us_rank_<N>``: how long the host waited for messages
        of rank N; ``reduced_in_no_sync``: backwards that stage 2 reduced although they ran inside
        ``no_sync``; ``skipped_steps``, of an optimizer.
    Raises:
        ValueError, TypeError: ``sharded`` is neither.
    """
    if isinstance(sharded, nn.Module) or not hasattr(sharded, "stats"):
        return handle_of(sharded).engine.stats()
    return sharded.stats()


def bytes_by_kind(handle: Handle) -> dict[str, int]:
    """The bytes that the engine of ``handle`` holds on this rank's device now, by kind."""
    held = handle.engine.stats()
    whole = held["bytes_full"]
    gathered = whole if handle.options.stage == 3 and not handle.replicated else 0
    return {
        "parameters": whole - gathered + held["bytes_shard"],
        "masters": held["bytes_master"],
        "gradients": held["bytes_grad"],
        "optimizer states": held["bytes_optimizer_state"],
        "gathered": gathered,
        "buckets": held["bytes_bucket"],
    }


def estimate_memory(
    module: nn.Module,
    world_size: int,
    stage: int,
    *,
    shards: int | None = None,
    hosts: int | None = None,
    units: Choice = None,
    bucket_mb: float = 25.0,
    reduction: str | None = None,
    prefetch_mb: float | None = None,
    param_dtype: torch.dtype | None = None,
    local_accumulation: bool = False,
    state_dtype: str = "fp32",
    owners: bool = False,
    offload_policy: OffloadPolicy | None = None,
    copies: int = 0,
    device: torch.device | str | None = None,
    peer_memory: bool = False,
) -> dict[str, int]:
    """Bytes that sharding ``module`` over ``world_size`` ranks with AdamW will hold on each.

    A device keeps no shard where there is a master, unless other devices read it in place, see
    docs/stages.md. On a device ``grad`` is
    held only between the first gradient and ``zero_grad()``. Not counted is the copy that undoes a
    backward that throws: 4 bytes per element of a range, made when a backward is reduced onto a sum
    that holds something. Frozen parameters that every rank has whole are in ``full``, with stage 3
    those of a dtype that is not trained in. ``stats()`` does not count them: they are the module's
    own.

    Args:
        module: May be on the meta device.
        shards: Ranks of a replica, where sharding is hybrid: the second dimension of ``mesh``.
            Default: all.
        hosts: With ``host_copies`` of ``shard``: on how many hosts the ranks are, equally many on
            each. Default: without copies.
        units, prefetch_mb: As for ``shard``; of stage 3, and checked with all.
        offload_policy: As for ``shard``.
        reduction: As for ``shard``. Default: ``"collective"`` on a CUDA device, else
            ``"exchange"``.
        local_accumulation: Whether stages 0 and 1 accumulate inside ``no_sync()``.
        state_dtype: As for ``optim.AdamW``.
        owners: Whether the optimizer is one of ``optim.wrap`` that needs whole parameters. Their
            owners keep ``owner_masters`` then. ``optimizer_state`` is 0: add what the class keeps.
        copies: On how many hosts ``elastic.Run`` keeps each step of a rank: 1, or 2 with a buddy.
        device: Where it will be trained; default: where its parameters are, the CPU if that is the
            meta device.
        peer_memory: Whether the ranks' devices read each other's memory, as GPUs of one host can.
            Then the default ``reduction`` is ``"exchange"``, and a bucket receives nothing.
    Returns:
        ``full``, ``shard``, ``master``, ``grad``, ``optimizer_state``, ``owner_masters``, their sum
        ``persistent``, and what comes on top of it: ``gathered``, the most that stage 3 gathers at
        once while the passes keep their order (less where ranks of one host gather nothing ahead),
        and ``buckets``, the most that the two buckets can add. ``offloaded`` is what
        ``offload_policy`` keeps in host memory instead. ``copies``: two files on each host, without
        indices. Padding included. None of these grows with the number of ranks. Of 8-bit states and
        of ``owner_masters``, what the rank with the most of them holds.
    Raises:
        ValueError, TypeError: a stage, a number of ranks or of shards, a size, a reduction, a
            dtype, a form of states, units or a device that cannot be.
    """
    check_module(module, "estimate_memory()")
    options = ShardingOptions(
        stage=stage,
        bucket_mb=bucket_mb,
        reduction=reduction,
        prefetch_mb=prefetch_mb,
        param_dtype=param_dtype,
        offload_policy=offload_policy,
    )
    shards = world_size if shards is None else shards
    check_count("world_size", world_size)
    check_count("shards", shards)
    if world_size % shards != 0:
        raise ValueError(
            f"zero_ext: {world_size} ranks cannot be replicas of {shards!r}: shards must divide "
            "world_size."
        )
    kept_parts = 0 if hosts is None else parts_of_other_hosts(world_size, shards, hosts)
    check_bool("local_accumulation", local_accumulation)
    check_bool("owners", owners)
    if copies not in (0, 1, 2):
        raise ValueError(f"zero_ext: copies must be 0, 1 or 2, not {copies!r}.")
    check_state_dtype(state_dtype)
    kind = _device_of(module, device).type
    if peer_memory and kind == "cpu":
        raise ValueError("zero_ext: peer_memory is memory of a device. Pass device='cuda'.")
    if peer_memory and reduction is None:
        options = dataclasses.replace(options, reduction="exchange")
    if kept_parts and kind not in ("cpu", "meta"):
        raise ValueError(
            f"zero_ext: hosts={hosts} is for host_copies, which are on the CPU. Leave hosts out for"
            f" {kind}."
        )
    plan = plan_module(parameters_of(Tree(module)), options, units)
    direct = peer_memory and options.reduction == "exchange" and world_size > 1
    planned = planned_units(plan, world_size, shards, kind, direct)
    offloads = options.offloads and kind != "cpu"
    local = local_accumulation and stage < 2 and world_size > 1 and not offloads
    result = _persistent_bytes(planned, local, None if owners else state_dtype)
    result["shard"] *= 1 + kept_parts
    if owners:
        result["offloaded" if offloads else "owner_masters"] += _owner_bytes(planned)
    frozen = (p for p in module.parameters() if not p.requires_grad)
    full = [p for p in frozen if stays_whole(p) or stage < 3]
    result["full"] += sum(p.nbytes for p in full)
    result["persistent"] = sum(result.values()) - result["offloaded"]
    ahead = plan.prefetch_bytes
    result["gathered"] = 0 if plan.blocks is None else _gathered_bytes(plan.blocks, planned, ahead)
    in_buckets = (unit.bucket_bytes(local) for unit in planned if unit.plan.trainable)
    result["buckets"] = 2 * max(in_buckets, default=0) if world_size > 1 or offloads else 0
    if direct:  # for each rank two words of both slots and of meetings, and the numbers of these
        result["buckets"] += _lines(4 * (6 * world_size + 3))
    kept = [u.range_numel * (_FP32_BYTES if u.plan.trainable else u.itemsize) for u in planned]
    kept += [u.state_bytes(None if owners else state_dtype) for u in planned if u.plan.trainable]
    result["copies"] = 2 * copies * sum([*kept, *(t.nbytes for t in (*full, *module.buffers()))])
    return result


def parts_of_other_hosts(world_size: int, shards: int, hosts: int) -> int:
    """How many ranges of other hosts a rank brings to its host, at most. The ranks of a host have
    consecutive numbers, and so have those of a replica."""
    check_count("hosts", hosts)
    if world_size % hosts != 0:
        raise ValueError(f"zero_ext: {world_size} ranks cannot be evenly on {hosts} hosts.")
    here = min(world_size // hosts, shards)
    return -(-(shards - here) // here)


def planned_units(
    plan: Plan, world_size: int, shards: int, device_type: str = "cpu", direct: bool = False
) -> list["PlannedUnit"]:
    """The units of ``plan`` on ``world_size`` ranks. ``direct``: see ``PlannedUnit``."""
    reduction = plan.options.reduction or ("collective" if device_type == "cuda" else "exchange")
    on_device = device_type not in ("cpu", "meta")
    policy = plan.options.offload_policy if on_device else None
    options = dataclasses.replace(plan.options, reduction=reduction, offload_policy=policy)
    numels = [p.numel() for p in locals_of([p for _, p in plan.parameters])]
    ranges = 1 if options.stage == 0 else shards

    def unit_of(unit: UnitPlan) -> PlannedUnit:
        sizes = [numels[i] for i in unit.members]
        alignment = _ALIGNMENT_BYTES // unit.dtype.itemsize
        layout = _C.Layout(sizes, ranges=ranges, alignment=alignment)
        return PlannedUnit(unit, layout, options, world_size, on_device, direct)

    return [unit_of(unit) for unit in plan.units]


def _device_of(module: nn.Module, device: torch.device | str | None) -> torch.device:
    first = next((p.device for p in module.parameters()), "cpu")
    try:
        return torch.device(first if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            "zero_ext: device must be a torch.device or the name of one, such as 'cuda', not "
            f"{device!r}."
        ) from error


class PlannedUnit(NamedTuple):
    """The facts that give one unit's memory. ``options``: on the unit's device. ``direct``: the
    other ranks read it in place."""

    plan: UnitPlan
    layout: _C.Layout
    options: ShardingOptions
    world: int
    on_device: bool
    direct: bool

    @property
    def itemsize(self) -> int:
        return self.plan.dtype.itemsize

    @property
    def range_numel(self) -> int:
        return self.layout.range_numel

    def state_bytes(self, state_dtype: str | None) -> int:
        """The bytes of both moments, if there are any."""
        if state_dtype != "int8":
            return 2 * self.range_numel * {"fp32": _FP32_BYTES, "bf16": 2, None: 0}[state_dtype]
        held: Counter[int] = Counter()  # bytes by range
        for i in range(self.layout.size):
            in_blocks = self.layout.slot(i).numel >= _BLOCKED_NUMEL
            for piece in self.layout.pieces(i):
                numel = piece.numel + piece.gap_numel
                blocks = -(-numel // _BLOCK_NUMEL) * (_BLOCK_NUMEL + _FP32_BYTES)
                held[piece.range] += 2 * (blocks if in_blocks else numel * _FP32_BYTES)
        return max(held.values(), default=0)

    @property
    def has_copy_on_host(self) -> bool:
        """Whether the host has a copy of the unit's range, for an offloaded update."""
        return self.plan.trainable and self.options.offloads and self.home != "host"

    @property
    def has_master(self) -> bool:
        return self.plan.trainable and (self.itemsize != _FP32_BYTES or self.has_copy_on_host)

    @property
    def full_bytes(self) -> int:
        return self.layout.padded_numel * self.itemsize

    @property
    def home(self) -> str:
        """Where its parameters are while nobody needs them whole."""
        offloads = self.options.offloads
        if self.options.offloads_parameters and (offloads or not self.plan.trainable):
            return "host"
        is_cast = self.plan.trainable and self.itemsize != _FP32_BYTES and not offloads
        is_read = self.direct and self.layout.ranges > 1 and not self.options.offloads_parameters
        if self.options.stage == 3 and self.on_device and is_cast and not is_read:
            return "master"
        return "shard" if self.options.stage == 3 and self.layout.ranges > 1 else "full"

    def bucket_bytes(self, local: bool) -> int:
        """``local``: sums of several backwards are sent, which are in fp32."""
        in_fp32 = self.plan.gradient_is_fp32 or local or self.options.reduction == "collective"
        itemsize = _FP32_BYTES if in_fp32 else self.itemsize
        message = self.layout.padded_numel
        if self.options.reduction == "collective":
            received = self.range_numel if self.layout.ranges > 1 or self.options.offloads else 0
            return (message + received) * itemsize
        places = self.world - (0 if self.options.offloads else 1)
        alignment = _ALIGNMENT_BYTES // itemsize
        most = max(message * itemsize, settings.window_bytes) // itemsize
        window = max(most // places // alignment * alignment, alignment)
        if self.world == 1:
            window = self.range_numel
        received = min(window, self.range_numel) * places * itemsize
        if self.direct:
            return _lines(message * _FP32_BYTES) + (received if self.options.offloads else 0)
        return message * itemsize + received


def _lines(size: int) -> int:
    """Bytes of memory that other devices read: each part begins a line."""
    return -(-size // 256) * 256


def _persistent_bytes(
    units: Iterable[PlannedUnit], local: bool, state_dtype: str | None
) -> dict[str, int]:
    kinds = ("full", "shard", "master", "grad", "optimizer_state", "owner_masters", "offloaded")
    result = dict.fromkeys(kinds, 0)
    for unit in units:
        share = unit.range_numel
        if unit.home == "full":
            result["full"] += unit.full_bytes
        if unit.home == "shard":
            result["shard"] += share * unit.itemsize
        if unit.home == "host" or unit.has_copy_on_host:
            result["offloaded"] += share * unit.itemsize
        if unit.plan.trainable:
            for kind, size in (
                ("master", share * _FP32_BYTES if unit.has_master else 0),
                ("grad", (unit.layout.padded_numel if local else share) * _FP32_BYTES),
                ("optimizer_state", unit.state_bytes(state_dtype)),
            ):
                result["offloaded" if unit.options.offloads else kind] += size
    return result


def _owner_bytes(units: Sequence[PlannedUnit]) -> int:
    """The bytes of masters at the owner of most elements. See Note [Kept masters]."""
    trained = [unit for unit in units if unit.plan.trainable]
    if not trained or trained[0].layout.ranges == 1:  # every rank holds all of them
        return 0
    bounds = {i: u.layout.bounds(k) for u in trained for k, i in enumerate(u.plan.members)}
    ordered = [bounds[i] for i in sorted(bounds)]
    loads = [0.0] * trained[0].layout.ranges
    owner_plan.assign([each[-1] for each in ordered], ordered, loads)
    return _FP32_BYTES * int(max(loads))


def _gathered_bytes(blocks: Sequence[Block], units: Iterable[PlannedUnit], ahead: int) -> int:
    """A pass is inside one block and those that its modules lie in; others are prefetched."""
    sizes = [0] * len(blocks)
    for unit in units:
        if unit.home != "full":
            sizes[unit.plan.block] += unit.full_bytes
    inside = [{id(m) for module in block.modules for m in module.modules()} for block in blocks]
    held = [
        sum(
            size
            for size, modules in zip(sizes, inside, strict=True)
            if all(id(module) in modules for module in block.modules)
        )
        for block in blocks
    ]
    return min(max(held) + ahead, sum(sizes))
