"""Bytes of a unit's ranges by hand, from the shapes of its parameters."""

from harness import DIRECT
from torch import nn

LINE_BYTES = 64  # slots and ranges begin at cache lines of the compute dtype
PEER_LINE_BYTES = 256  # parts of what other ranks' devices read begin at one
HELD = ("full", "master", "grad", "bucket", "optimizer_state")


def ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def ranges_of(model: nn.Module, units: list[list[str]], world: int, stage: int) -> list[tuple]:
    """(elements of one range, number of ranges, bytes of an element) of each unit, by hand."""
    parameters = dict(model.named_parameters())
    result = []
    for names in units:
        itemsize = parameters[names[0]].element_size()
        line = LINE_BYTES // itemsize
        used = sum(ceil_to(parameters[name].numel(), line) for name in names)
        ranges = 1 if stage == 0 else world
        result.append((max(line, ceil_to(ceil_to(used, ranges) // ranges, line)), ranges, itemsize))
    return result


def peer_bytes(
    model: nn.Module, units: list[list[str]], world: int, stage: int, shards: int | None = None
) -> int:
    """The buckets where ranks read each other's devices, from the start on; elsewhere 0.

    Two slots hold the gradients of the largest unit, in fp32 as local sums are. Each rank has two
    words for both slots and for the meetings, and these have a number each.
    """
    if not DIRECT or world == 1:
        return 0
    of_units = ranges_of(model, units, shards or world, stage)
    largest = max(share * ranges for share, ranges, _ in of_units)
    words = 2 * 3 * world + 3
    return 2 * ceil_to(4 * largest, PEER_LINE_BYTES) + ceil_to(4 * words, PEER_LINE_BYTES)
