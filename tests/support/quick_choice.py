"""Which items of a parametrized test the quick runs make: enough of them, not each combination.

A test over 4 stages, 3 dtypes and 2 ways of reduction has 24 items. On several ranks and on a
device the quick runs make as few as show each value. In one process on the CPU, where an item is
cheap, they show each pair.
`make test-all` makes the rest. What one ``parametrize`` lists together by hand is one value.
"""

import inspect
import itertools
import zlib
from collections.abc import Hashable, Sequence


def choose(items: Sequence[dict[str, Hashable]], size: int, salt: str) -> list[int]:
    """Indices of items that show each combination of ``size`` values. ``items``: values by name.

    ``salt``: the order in which they are tried depends on it. So other tests, and other runs of the
    same test, show other combinations of more values.
    """

    def shown(index: int) -> set:
        values = sorted(items[index].items())
        return set(itertools.combinations(values, min(size, len(values))))

    left = {index: shown(index) for index in range(len(items))}
    by_chance = sorted(left, key=lambda index: zlib.crc32(f"{salt} {index}".encode()))
    missing = set().union(*left.values())
    chosen = []
    while missing:
        best = max(by_chance, key=lambda index: len(left[index] & missing))
        chosen.append(best)
        missing -= left[best]
    return sorted(chosen)


def values_of(item) -> dict[str, Hashable]:
    """What distinguishes a parametrized item of pytest from the others of its test."""
    params = dict(item.callspec.params)
    values: dict[str, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = names.split(",") if isinstance(names, str) else names
        names = [name.strip() for name in names]
        # The value itself need not be hashable; the list of `parametrize` keeps it alive.
        values[",".join(names)] = tuple(id(params.pop(name)) for name in names if name in params)
    return values | {name: id(value) for name, value in params.items()}


def unneeded(items: Sequence, size: int, salt: str) -> list:
    """Those of pytest's ``items`` that quick runs need not make."""
    tests: dict[str, list] = {}
    for item in items:
        # An item that skips itself shows nothing.
        if hasattr(item, "callspec") and "pytest.skip(" not in inspect.getsource(item.function):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = []
    for name, members in tests.items():
        chosen = set(choose([values_of(item) for item in members], size, f"{name} {salt}"))
        left += [item for index, item in enumerate(members) if index not in chosen]
    return left
