"""The plan of Muon's owners for models of Llama's shapes: traffic and balance.

    python benchmarks/plan_muon.py

Each layer is one unit, as with stage 3. The traffic of a rank is what it sends: 2 bytes per element
to the owners, 2 bytes per element back. It is compared with one bf16 reduce-scatter of the same
matrices, in which a rank sends 2 bytes for each element that it does not keep.
"""

from collections.abc import Sequence
from typing import NamedTuple

from zero_ext.ranks.owner_plan import assign, held_by, newton_schulz_cost

RANKS = (8, 64, 256, 1024)


class Shapes(NamedTuple):
    """Of the matrices of a decoder; query and key-value heads share their width."""

    layers: int
    hidden: int
    key_value: int
    inner: int

    def of_layer(self) -> list[tuple[int, int]]:
        hidden, key_value, inner = self.hidden, self.key_value, self.inner
        attention = [(hidden, hidden), (key_value, hidden), (key_value, hidden), (hidden, hidden)]
        return [*attention, (inner, hidden), (inner, hidden), (hidden, inner)]


MODELS = {
    "Llama-3 8B": Shapes(layers=32, hidden=4096, key_value=1024, inner=14336),
    "Llama-3 70B": Shapes(layers=80, hidden=8192, key_value=1024, inner=28672),
}


class Plan(NamedTuple):
    """``share``: mean traffic of a rank, of one bf16 reduce-scatter; ``busiest_share``: of the rank
    with most. ``load``: the operations of the busiest owner, over the mean."""

    share: float
    busiest_share: float
    load: float


def even_bounds(numels: Sequence[int], ranks: int) -> list[list[int]]:
    """Of each parameter of one unit, as ``assign`` takes it: the unit is cut into equal ranges.

    Without the padding of a few elements that a layout adds.
    """
    size, offset, bounds = -(-sum(numels) // ranks), 0, []
    for numel in numels:
        bounds.append([min(max(r * size - offset, 0), numel) for r in range(ranks + 1)])
        offset += numel
    return bounds


def travelling(owners: Sequence[int], bounds: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """How many elements of other ranks' parameters each rank holds, and of its own it does not.

    They are sent to owners or received as an owner, and the other way with the results.
    """
    moved = [0] * ranks
    for owner, cut in zip(owners, bounds, strict=True):
        for r, held in held_by(cut).items():
            if r != owner:
                moved[r] += held
                moved[owner] += held
    return moved


def plan(shapes: Shapes, ranks: int) -> Plan:
    layer = shapes.of_layer()
    cut = even_bounds([rows * columns for rows, columns in layer], ranks)
    bounds = cut * shapes.layers
    costs = [newton_schulz_cost(*shape) for shape in layer] * shapes.layers
    loads = [0.0] * ranks
    moved = travelling(assign(costs, bounds, loads), bounds, ranks)
    numel = shapes.layers * sum(rows * columns for rows, columns in layer)
    reduce_scatter = numel * (ranks - 1) / ranks  # elements that a rank sends
    return Plan(
        share=sum(moved) / ranks / reduce_scatter,
        busiest_share=max(moved) / reduce_scatter,
        load=max(loads) / (sum(loads) / ranks),
    )


def table() -> list[str]:
    lines = [
        "| model | ranks | traffic of a step, of one bf16 reduce-scatter | of the busiest rank "
        "| busiest owner, of the mean |",
        "|---|---|---|---|---|",
    ]
    for name, shapes in MODELS.items():
        for ranks in RANKS:
            share, busiest, load = plan(shapes, ranks)
            lines.append(f"| {name} | {ranks:,} | {share:.1%} | {busiest:.1%} | {load:.2f} |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
