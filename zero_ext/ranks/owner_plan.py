"""The owner of each parameter: numbers alone, without torch."""

import itertools
from collections.abc import Sequence


def newton_schulz_cost(rows: int, columns: int) -> int:
    """Proportional to the operations of one iteration of Muon on a matrix."""
    short, long = sorted((rows, columns))
    return short * short * (2 * long + short)


def assign(costs: Sequence[int], bounds: Sequence[Sequence[int]], loads: list[float]) -> list[int]:
    """The owner of each parameter.

    The most expensive one comes first. It goes to the rank that holds most of it, unless that
    rank's load would pass the mean. Then it goes to the rank with the smallest load.

    Args:
        bounds: Of each parameter, where each rank's elements begin, and the end: [ranks + 1]. Empty
            where every rank holds all.
        loads: The cost of what each rank owns already. Changed.
    """
    limit = max([(sum(loads) + sum(costs)) / len(loads), *costs])
    owners = [0] * len(costs)
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):  # a stable sort
        held = held_by(bounds[k])
        owner = max(held, key=lambda r: (held[r], -r), default=None)
        if owner is None or loads[owner] + costs[k] > limit:
            owner = min(range(len(loads)), key=lambda r: (loads[r], -held.get(r, 0), r))
        owners[k] = owner
        loads[owner] += costs[k]
    return owners


def held_by(bounds: Sequence[int]) -> dict[int, int]:
    """How many elements each rank holds that has some."""
    pieces = enumerate(itertools.pairwise(bounds))
    return {r: stop - start for r, (start, stop) in pieces if stop > start}


def waves(sizes: Sequence[int], owners: Sequence[int], limit: float) -> list[list[int]]:
    """The numbers of the parameters in waves: in each, every owner has at most ``limit``, or one.

    Every owner has its share of each wave, so that none waits for another one's.
    """
    wave_of: dict[int, int] = {}
    filled: dict[int, int] = {}
    result: list[list[int]] = []
    for k, owner in enumerate(owners):
        wave, size = wave_of.get(owner, 0), filled.get(owner, 0)
        if size and size + sizes[k] > limit:
            wave, size = wave + 1, 0
        wave_of[owner], filled[owner] = wave, size + sizes[k]
        if wave == len(result):
            result.append([])
        result[wave].append(k)
    return result
