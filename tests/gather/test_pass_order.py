"""The order of passes: every short history, against the definition read from the whole history."""

from itertools import product

import pytest

from zero_ext import _C

FORWARD, BACKWARD = _C.Pass.forward, _C.Pass.backward

# An event is (name, kind of pass) or ("enter", kind, unit).
EVENTS_OF_BOTH_KINDS = [
    (name, kind, *unit)
    for kind in (FORWARD, BACKWARD)
    for name, *unit in [("begin",), ("end",), ("enter", 0), ("enter", 1)]
]
EVENTS_OF_ONE_KIND = [
    (name, FORWARD, *unit)
    for name, *unit in [("begin",), ("end",), ("enter", 0), ("enter", 1), ("enter", 2)]
]


def passes(history, kind) -> tuple[list[list[int]], list[int] | None]:
    """The units of each pass of this kind that has ended, and of the one under way."""
    ended, current = [], None
    for name, of_kind, *unit in history:
        if of_kind is not kind:
            continue
        if name == "begin":
            current = []
        elif current is not None and name == "end":
            ended.append(current)
            current = None
        elif current is not None:
            current += unit
    return ended, current


def without_repeats(units: list[int]) -> list[int]:
    return [u for n, u in enumerate(units) if n == 0 or units[n - 1] != u]


def foretold(history, kind) -> list[int]:
    """The last ended pass; for the first backward, the last forward before its begin, reversed."""
    ended, _ = passes(history, kind)
    if kind is FORWARD:
        return without_repeats(ended[-1]) if ended else []
    order: list[int] = []
    for n, (name, *_) in enumerate(history):
        before = history[: n + 1]
        if before[-1][1] is kind and name == "end" and passes(before[:-1], kind)[1] is not None:
            order = without_repeats(passes(before, kind)[0][-1])
        if before[-1][1] is kind and name == "begin" and not order:
            order = foretold(before, FORWARD)[::-1]
    return order


def expected_upcoming(history, kind) -> list[int]:
    _, current = passes(history, kind)
    if current is None:
        return []
    rest = foretold(history, kind)
    for unit in current:
        if unit in rest:
            rest = rest[rest.index(unit) + 1 :]
    return rest


@pytest.mark.parametrize(
    ("events", "length"), [(EVENTS_OF_BOTH_KINDS, 5), (EVENTS_OF_ONE_KIND, 6)], ids=["both", "one"]
)
def test_every_short_history_foretells_what_the_last_pass_entered(events, length):
    for history in product(events, repeat=length):
        order = _C.PassOrder()
        for name, *arguments in history:
            getattr(order, name)(*arguments)
        for kind in (FORWARD, BACKWARD):
            assert order.upcoming(kind) == expected_upcoming(history, kind), history
        last = foretold(history, FORWARD)
        for unit in range(3):
            assert order.ends_forward(unit) == (len(last) > 1 and last[-1] == unit), history


def test_a_pass_follows_the_last_one_past_units_that_it_skips_or_adds():
    order = _C.PassOrder()
    order.begin(FORWARD)
    for unit in [0, 1, 2, 3]:
        order.enter(FORWARD, unit)
    order.end(FORWARD)
    order.begin(BACKWARD)
    assert order.upcoming(BACKWARD) == [3, 2, 1, 0]
    order.begin(FORWARD)
    for unit, rest in [(0, [1, 2, 3]), (7, [1, 2, 3]), (2, [3]), (1, [3]), (3, [])]:
        order.enter(FORWARD, unit)
        assert order.upcoming(FORWARD) == rest
    order.end(FORWARD)
    assert order.upcoming(FORWARD) == []
    assert order.ends_forward(3)


def test_what_is_forgotten_foretells_nothing():
    order, new = _C.PassOrder(), _C.PassOrder()
    for pass_ in (FORWARD, BACKWARD):
        order.begin(pass_)
        for unit in [0, 1, 2]:
            order.enter(pass_, unit)
        order.end(pass_)
    order.forget()
    for each in (order, new):
        assert not any(each.ends_forward(unit) for unit in range(3))
        for pass_ in (FORWARD, BACKWARD):
            each.begin(pass_)
            assert each.upcoming(pass_) == []
