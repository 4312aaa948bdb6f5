"""What the library holds, and what it would hold."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from zero_ext.engine.handle import _check_stage, check_sizes, handle_of, stays_whole
from zero_ext.engine.units import (
    Block,
    Choice,
    cut_by_module,
    cut_by_size,
    parts,
    prefetch_bytes,
    split_block,
    used_several_times,
)

# Gradient sum, master, two moments.
_FP32_BYTES = 4
_ALIGNMENT_BYTES = 64


def stats(sharded) -> dict[str, int]:
    """Counters of a sharded module or of an optimizer of this package.

    Returns:
        ``bytes_held`` and ``bytes_peak`` on this rank, ``bytes_<what>`` for what they are held,
        ``backwards``, ``reductions``, ``gathers``, ``steps``, ``units``; ``neighbors``: ranks of
        this host whose memory is read instead of sending messages; ``reduced_in_no_sync``:
        backwards that stage 2 reduced although they ran inside ``no_sync``; ``skipped_steps``, of
        an optimizer.
    Raises:
        ValueError, TypeError: ``sharded`` is neither.
    """
    if isinstance(sharded, nn.Module) or not hasattr(sharded, "stats"):
        return handle_of(sharded).stats()
    return sharded.stats()


class _Unit(NamedTuple):
    """What the memory of one unit follows from. ``ranges``: how many it is cut into."""

    numels: list[int]
    itemsize: int
    ranges: int
    trainable: bool = True
    in_fp32: bool = False  # its gradients

    @property
    def range_numel(self) -> int:
        alignment = _ALIGNMENT_BYTES // self.itemsize
        numel = sum(_round_up(numel, alignment) for numel in self.numels)
        return max(alignment, _round_up(-(-numel // self.ranges), alignment))

    @property
    def has_master(self) -> bool:
        return self.trainable and self.itemsize != _FP32_BYTES

    @property
    def full_bytes(self) -> int:
        return self.range_numel * self.ranges * self.itemsize


def estimate_memory(
    module: nn.Module,
    world_size: int,
    stage: int,
    *,
    shards: int | None = None,
    units: Choice = None,
    bucket_mb: float = 25.0,
    prefetch_mb: float | None = None,
    param_dtype=None,
    local_accumulation: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, int]:
    """Bytes that sharding ``module`` over ``world_size`` ranks with AdamW will hold on each.

    A device keeps no shard where there is a master, see docs/stages.md.
    Without the copy that undoes a backward that throws, 4 bytes per element of a range, which is
    made when a backward is reduced onto a sum, reduced or local, that holds something. On a device
    ``grad`` is held between the first gradient and ``zero_grad()`` alone.
    Frozen parameters that every rank has whole, with stage 3 those of a dtype that is not trained
    in, are in ``full``; ``stats()`` does not count them, they are the module's own.

    Args:
        module: May be on the meta device.
        shards: Ranks of a replica, where sharding is hybrid: the second dimension of ``mesh``.
            Default: all.
        units, prefetch_mb: As for ``shard``; of stage 3.
        local_accumulation: Whether stages 0 and 1 accumulate inside ``no_sync()``.
        device: Where it will be trained; default: where its parameters are, the CPU if that is the
            meta device.
    Returns:
        ``full``, ``shard``, ``master``, ``grad``, ``optimizer_state``, their sum ``persistent``,
        and what comes on top of it: ``gathered``, the most that stage 3 gathers at once while the
        passes keep their order (less where ranks of one host gather nothing ahead), and
        ``buckets``, the most that the two buckets can add with ``reduction="exchange"``. Padding
        included.
    Raises:
        ValueError: a stage, a number of ranks or of shards, or a size that cannot be.
    """
    _check_stage(stage)
    check_sizes(bucket_mb, prefetch_mb)
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"zero_ext: world_size must be at least 1, not {world_size!r}.")
    shards = world_size if shards is None else shards
    if not isinstance(shards, int) or shards < 1 or world_size % shards != 0:
        raise ValueError(
            f"zero_ext: {world_size} ranks cannot be replicas of {shards!r}: shards must divide "
            "world_size."
        )
    several = {id(p) for p in used_several_times(module)}
    bucket_bytes = bucket_mb * 2**20
    ranges = 1 if stage == 0 else shards
    on_device = _device_of(module, device).type not in ("cpu", "meta")

    def home(unit: _Unit) -> str:
        """Where its parameters are while nobody needs them whole."""
        if stage == 3 and on_device and unit.has_master:
            return "master"
        return "shard" if stage == 3 and shards > 1 else "full"

    local = local_accumulation and stage < 2 and world_size > 1
    result = dict.fromkeys(("full", "shard", "master", "grad", "optimizer_state"), 0)
    result["full"] = sum(
        p.nbytes
        for p in module.parameters()
        if stays_whole(p) or (stage < 3 and not p.requires_grad)
    )
    gathered = 0
    if stage == 3:
        parameters = [p for p in module.parameters() if not stays_whole(p)]
        blocks = cut_by_module(module, parameters, units, bucket_bytes, param_dtype)
        cut: list[list[_Unit]] = [[] for _ in blocks]
        for block, members in parts(blocks):
            cut[block].extend(_units_of(members, parameters, several, param_dtype, ranges))
        all_units = [unit for part in cut for unit in part]
        ahead = prefetch_bytes(blocks, parameters, prefetch_mb, bucket_mb, param_dtype)
        released = [[unit for unit in part if home(unit) != "full"] for part in cut]
        gathered = _gathered_bytes(blocks, released, ahead)
    else:
        all_units = _units_by_size(module, bucket_bytes, several, param_dtype, ranges)
    in_buckets = [0]
    for unit in all_units:
        share = unit.range_numel
        if home(unit) == "full":
            result["full"] += unit.full_bytes
        if home(unit) == "shard":
            result["shard"] += share * unit.itemsize
        if not unit.trainable:
            continue
        result["master"] += share * _FP32_BYTES if unit.has_master else 0
        result["grad"] += share * (ranges if local else 1) * _FP32_BYTES
        result["optimizer_state"] += 2 * share * _FP32_BYTES
        # Local sums are sent in fp32.
        gradient_bytes = _FP32_BYTES if unit.in_fp32 or local else unit.itemsize
        in_buckets.append(share * (ranges + world_size - 1) * gradient_bytes)
    result["persistent"] = sum(result.values())
    result["gathered"] = gathered
    result["buckets"] = 2 * max(in_buckets) if world_size > 1 else 0
    return result


def _device_of(module: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _is_in_fp32(parameter, several: set[int], param_dtype) -> bool:
    """Its gradients arrive in fp32 although it is in half precision, as ``Handle`` arranges."""
    half = (param_dtype or parameter.dtype).itemsize != _FP32_BYTES
    return half and id(parameter) in several


def _units_by_size(
    module: nn.Module, bucket_bytes: float, several: set[int], param_dtype, ranges: int
) -> list[_Unit]:
    units = []
    for in_fp32 in (False, True):
        parameters = [
            p
            for p in module.parameters()
            if p.requires_grad and _is_in_fp32(p, several, param_dtype) == in_fp32
        ]
        numels = [p.numel() for p in parameters]
        for plan in cut_by_size(numels, [p.dtype for p in parameters], bucket_bytes):
            members = [numels[i] for i in plan.members]
            itemsize = (param_dtype or plan.dtype).itemsize
            units.append(_Unit(members, itemsize, ranges, in_fp32=in_fp32))
    return units


def _units_of(
    part: Sequence[int], parameters, several: set[int], param_dtype, ranges: int
) -> list[_Unit]:
    apart = {i for i in part if _is_in_fp32(parameters[i], several, param_dtype)}
    return [
        _Unit(
            [parameters[i].numel() for i in members],
            (param_dtype or dtype).itemsize,
            ranges,
            trainable,
            members[0] in apart,
        )
        for members, dtype, trainable in split_block(part, parameters, apart)
    ]


def _gathered_bytes(blocks: Sequence[Block], cut: Sequence[list[_Unit]], ahead: int) -> int:
    """A pass is inside one block and those that its modules lie in; others are prefetched."""
    sizes = [sum(unit.full_bytes for unit in part) for part in cut]
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


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
