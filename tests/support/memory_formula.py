"""Bytes of a unit's ranges by hand, from the shapes of its parameters."""

from torch import nn

LINE_BYTES = 64  # slots and ranges begin at cache lines of the compute dtype
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
