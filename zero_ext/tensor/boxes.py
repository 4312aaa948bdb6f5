"""The boxes that a flat slice of a tensor consists of: how it is saved and loaded."""

from collections.abc import Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, one per dimension


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the row-major elements ``[start, stop)`` of a tensor into boxes.

    In flat order and at most ``2 * len(shape) - 1`` of them. A tensor without elements is one empty
    box, so that a checkpoint knows of it.
    """
    if not prod(shape):
        return [((0,) * len(shape), tuple(shape))]
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row_numel = prod(shape[1:])
    row, first_full, last_full = start // row_numel, -(-start // row_numel), stop // row_numel

    def inside(row: int, start: int, stop: int) -> list[Box]:
        parts = boxes(shape[1:], start - row * row_numel, stop - row * row_numel)
        return [((row, *offsets), (1, *sizes)) for offsets, sizes in parts]

    if first_full > last_full:
        return inside(row, start, stop)
    result = inside(row, start, first_full * row_numel)
    if first_full < last_full:
        zeros = (0,) * (len(shape) - 1)
        result.append(((first_full, *zeros), (last_full - first_full, *shape[1:])))
    return result + inside(last_full, last_full * row_numel, stop)
