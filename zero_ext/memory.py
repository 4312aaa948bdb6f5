"""What the library holds, and what it would hold."""

from torch import nn

from zero_ext import units

# Gradient sum, master, two moments.
_FP32_BYTES = 4
_ALIGNMENT_BYTES = 64


def stats(sharded) -> dict[str, int]:
    """Counters of a sharded module or of an optimizer of this package.

    Returns:
        ``bytes_held`` and ``bytes_peak`` on this rank, ``bytes_<what>`` for what they are held,
        ``backwards``, ``reductions``, ``gathers``, ``steps``, ``units``; ``reduced_in_no_sync``:
        backwards that stage 2 reduced although they ran inside ``no_sync``; ``extra_buckets``:
        how often two were not enough.
    """
    return sharded.stats()


def estimate_memory(
    module: nn.Module,
    world_size: int,
    stage: int,
    *,
    bucket_mb: float = 25.0,
    param_dtype=None,
    local_accumulation: bool = False,
) -> dict[str, int]:
    """Bytes that sharding ``module`` over ``world_size`` ranks with AdamW will hold on each.

    Without the copy that undoes a backward that throws, 4 bytes per element of a range, which is
    made when a backward adds to a reduced sum that holds something.

    Args:
        local_accumulation: Whether stages 0 and 1 accumulate inside ``no_sync()``.
    Returns:
        ``full``, ``master``, ``grad``, ``optimizer_state``, their sum ``persistent``, and
        ``buckets``: the most that the two buckets can add with ``reduction="exchange"``. Padding
        included.
    """
    several = {id(p) for p in units.used_several_times(module)}
    parameters = [p for p in module.parameters() if p.requires_grad]
    ranges = 1 if stage == 0 else world_size
    result = dict.fromkeys(("full", "master", "grad", "optimizer_state"), 0)
    bucket_bytes = [0]
    for in_fp32, members, plan_dtype in _plans(parameters, several, param_dtype, bucket_mb):
        dtype = param_dtype or plan_dtype
        alignment = _ALIGNMENT_BYTES // dtype.itemsize
        numel = sum(_round_up(p.numel(), alignment) for p in members)
        share = max(alignment, _round_up(-(-numel // ranges), alignment))
        padded = share * ranges
        result["full"] += padded * dtype.itemsize
        result["master"] += 0 if dtype.itemsize == _FP32_BYTES else share * _FP32_BYTES
        local = local_accumulation and stage < 2 and world_size > 1
        result["grad"] += (padded if local else share) * _FP32_BYTES
        result["optimizer_state"] += 2 * share * _FP32_BYTES
        gradient_bytes = _FP32_BYTES if in_fp32 else dtype.itemsize
        # Local sums are sent in fp32, and a bucket keeps the memory of both uses.
        received_bytes = share * (world_size - 1) * (_FP32_BYTES if local else gradient_bytes)
        bucket_bytes.append(padded * gradient_bytes + received_bytes)
    result["persistent"] = sum(result.values())
    result["buckets"] = 2 * max(bucket_bytes) if world_size > 1 else 0
    return result


def _plans(parameters, several: set[int], param_dtype, bucket_mb: float):
    """Units, as ``Handle`` cuts them: those whose gradients are fp32 beside half-precision
    parameters apart from the others."""
    half = [(param_dtype or p.dtype).itemsize != _FP32_BYTES for p in parameters]
    for in_fp32 in (False, True):
        chosen = [
            p
            for p, is_half in zip(parameters, half, strict=True)
            if (is_half and id(p) in several) == in_fp32
        ]
        plans = units.cut_by_size(
            [p.numel() for p in chosen], [p.dtype for p in chosen], bucket_mb * 2**20
        )
        for plan in plans:
            yield in_fp32, [chosen[i] for i in plan.members], plan.dtype


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
