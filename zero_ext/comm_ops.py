"""``torch.ops.zero_ext.reduce_scatter_accumulate_``: the reduce-scatter of a bucket, stateless.

It is what the engine does with a unit's bucket under ``reduction="exchange"``, for training loops
that keep buckets and gradient sums of their own.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def reduce_scatter_accumulate_(
    bucket: Tensor,
    acc: Tensor,
    group: dist.ProcessGroup | None = None,
    scale: float = 1.0,
    *,
    fresh: bool = False,
) -> None:
    """Add every rank's gradients of this rank's range to ``acc``, in rank order. Collective.

    ``acc = (0 if fresh else acc) + scale * part_0 + scale * part_1 + …`` in float32, a fused
    multiply-add and one rounding per rank, where ``part_r`` is ``bucket[rank * n :
    (rank + 1) * n]`` of rank r. The gradients travel in the bucket's dtype, exactly. ``acc`` is
    written after all parts have arrived, so an error leaves it as it was.

    Args:
        bucket: [world * n], contiguous; float32, bfloat16 or float16. Only read.
        acc: [n], contiguous float32; shares no memory with ``bucket``.
        group: The ranks; default all, or this one alone without a process group. Its timeout holds,
            and other calls on it must come in the same order on every rank.
        scale: Factor of every gradient, such as 1/world.
        fresh: ``acc`` holds nothing yet and is overwritten, not read.
    Raises:
        RuntimeError: sizes, dtypes or layouts do not fit (before anything is sent); a rank did not
            take part within the group's timeout, which it names.
    Source: Rajbhandari et al. 2020 (ZeRO), section 5.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    name = "" if group is None else group.group_name
    torch.ops.zero_ext.reduce_scatter_accumulate_(bucket, acc, name, scale, fresh)


@torch.library.register_fake("zero_ext::reduce_scatter_accumulate_")
def _(bucket, acc, group_name, scale, fresh):
    world = distributed_c10d._resolve_process_group(group_name).size() if group_name else 1
    torch._check(
        bucket.numel() == world * acc.numel(),
        lambda: f"'bucket' must have {world} times as many elements as 'acc'",
    )
