"""Arrivals: every short backward of two slots, against what its list of events says."""

from itertools import product
from typing import NamedTuple

import pytest

from zero_ext import _C

SLOTS = (0, 1)
EVENTS = ("empty 0", "gradient 0", "empty 1", "gradient 1", "module", "reduce")
LENGTH = 4
FLAGS = list(product((0, 1), repeat=len(SLOTS)))


class Backward(NamedTuple):
    expected: tuple[int, ...]
    events: tuple[str, ...] = ()
    trained: tuple[int, ...] | None = None  # None: no hidden gradients are possible
    modules: int = 0

    def reached(self, slot: int) -> int:
        return sum(event in (f"empty {slot}", f"gradient {slot}") for event in self.events)

    def hidden(self, slot: int) -> int:
        return max(self.reached(slot) - self.expected[slot], 0)

    @property
    def left(self) -> int:
        return self.events.count("module")


def run(arrivals, backward: Backward) -> None:
    arrivals.begin(list(backward.expected))
    if backward.trained is not None:
        arrivals.await_hidden(list(backward.trained), backward.modules)
    for event in backward.events:
        name, *slot = event.split()
        if name == "module":
            arrivals.leave_module()
        elif name == "reduce":
            arrivals.start_reduction()
        else:
            arrivals.reach(int(slot[0]))
            if name == "gradient":
                first = not arrivals.has_gradient(int(slot[0]))
                assert arrivals.fill(int(slot[0])) == first


def arrivals_after(*backwards: Backward):
    arrivals = _C.Arrivals(len(SLOTS))
    for backward in backwards:
        run(arrivals, backward)
        if backward is not backwards[-1]:
            arrivals.close()
            arrivals.remember()
    return arrivals


def is_complete(backward: Backward, last: Backward | None = None) -> bool:
    """The rule in words: it awaits what the graph shows, and as many modules as were left in the
    last backward, or, where there were none, as many hidden gradients; only if there were any."""
    hidden, modules = (0, 0), 0
    if backward.trained is not None and last is not None:
        hidden, modules = tuple(last.hidden(slot) for slot in SLOTS), last.left
    elif backward.trained is not None:
        hidden = tuple(int(t > e) for t, e in zip(backward.trained, backward.expected, strict=True))
        modules = backward.modules
    if not any(hidden):
        modules = 0
    if modules > 0:
        hidden = (0, 0)
    every = all(backward.reached(s) >= backward.expected[s] + hidden[s] for s in SLOTS)
    return every and backward.left >= modules


def event_lists(length: int):
    return (events for n in range(length + 1) for events in product(EVENTS, repeat=n))


@pytest.mark.parametrize("expected", FLAGS)
def test_every_backward_awaits_what_its_graph_shows(expected):
    for events in event_lists(LENGTH):
        backward = Backward(expected, events)
        arrivals = arrivals_after(backward)
        assert arrivals.complete == is_complete(backward), events
        waits = any(expected[s] and backward.reached(s) == 0 for s in SLOTS)
        assert arrivals.expects_any == waits, events


@pytest.mark.parametrize("expected", FLAGS)
def test_gradients_after_the_reduction_are_late_and_reduced_alone(expected):
    for events in event_lists(LENGTH):
        arrivals = arrivals_after(Backward(expected, events))
        reduced = "reduce" in events
        after = events[events.index("reduce") :] if reduced else ()
        filled = [f"gradient {slot}" in events for slot in SLOTS]
        late = [f"gradient {slot}" in after for slot in SLOTS]
        assert [arrivals.has_gradient(slot) for slot in SLOTS] == filled, events
        assert (arrivals.reduced, arrivals.late) == (reduced, any(late)), events
        arrivals.reopen_for_late_gradients()
        assert [arrivals.has_gradient(slot) for slot in SLOTS] == late, events
        assert (arrivals.reduced, arrivals.late) == (False, any(late)), events


@pytest.mark.parametrize("modules", [0, 1, 2])
def test_a_first_backward_awaits_a_hidden_gradient_of_each_trained_slot_or_its_modules(modules):
    for expected, trained, events in product(FLAGS, FLAGS, event_lists(3)):
        backward = Backward(expected, events, trained, modules)
        assert arrivals_after(backward).complete == is_complete(backward), backward


def test_a_later_backward_awaits_what_the_remembered_one_had():
    for expected, first, second in product(FLAGS, event_lists(3), event_lists(2)):
        last = Backward(expected, first, (1, 1), modules=1)
        backward = Backward(expected, second, (1, 1), modules=1)
        assert arrivals_after(last, backward).complete == is_complete(backward, last), (
            last,
            second,
        )


def test_what_one_backward_counted_is_not_left_in_the_next():
    for events in event_lists(3):
        arrivals = arrivals_after(Backward((1, 1), events), Backward((1, 0)))
        assert not arrivals.complete and arrivals.expects_any, events
        assert not (arrivals.reduced or arrivals.late or arrivals.has_gradient(0)), events


def test_a_closed_backward_awaits_nothing():
    for trained, modules, events in product(FLAGS, (0, 1), event_lists(2)):
        arrivals = arrivals_after(Backward((1, 0), events, trained, modules))
        arrivals.close()
        assert arrivals.complete and not arrivals.expects_any
