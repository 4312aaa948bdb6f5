"""Residency: every pair of the table, against the table written down a second time, as rows."""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_ext import _C

EVENTS = list(_C.ResidencyEvent.__members__)
STATES = ("released", "gathering", "gathered")


class Holds(NamedTuple):
    forward: int = 0
    calls: int = 0
    graph: bool = False
    escaped: bool = False
    user: bool = False
    permanent: bool = False


class Context(NamedTuple):
    keep: bool = False
    escapes: bool = False
    expected: bool = False
    graph_kept: bool = False
    may_retain: bool = True


class Result(NamedTuple):
    state: str
    holds: Holds
    action: str


NO_CONTEXT = Context()


def run(state: str, holds: Holds, event: str, context: Context = NO_CONTEXT) -> Result:
    """The function under test."""
    next_state, next_holds, action = _C.transition(
        getattr(_C.Residency, state),
        _C.Holds(**holds._asdict()),
        getattr(_C.ResidencyEvent, event),
        **context._asdict(),
    )
    seen = Holds(*(getattr(next_holds, name) for name in Holds._fields))
    return Result(next_state.name, seen, action.name)


# The table. Holds change first, then the first row whose states and guard fit says what happens.


def retained(holds: Holds, context: Context) -> Holds:
    return holds._replace(graph=context.graph_kept and context.may_retain)


HOLDS_AFTER: dict[str, Callable[[str, Holds, Context], Holds]] = {
    "prefetch": lambda s, h, c: h,
    "enter_forward": lambda s, h, c: h._replace(forward=h.forward + 1),
    "enter_backward": lambda s, h, c: h._replace(calls=h.calls + 1),
    "hold": lambda s, h, c: h._replace(user=True),
    "leave_forward": lambda s, h, c: h._replace(
        forward=h.forward - 1, escaped=h.escaped or c.escapes
    ),
    "leave_backward": lambda s, h, c: (
        retained(h._replace(calls=max(0, h.calls - 1)), c)
        if s == "gathered"
        else h._replace(calls=max(0, h.calls - 1))
    ),
    "gradient": lambda s, h, c: retained(h, c) if s == "gathered" else h,
    "backward_ended": lambda s, h, c: h._replace(
        calls=0, escaped=False, graph=(h.graph or (h.calls > 0 and c.may_retain)) and c.graph_kept
    ),
    "drop": lambda s, h, c: h._replace(user=False),
    "step": lambda s, h, c: Holds(permanent=h.permanent),
    "reset": lambda s, h, c: Holds(permanent=h.permanent),
}


class Row(NamedTuple):
    events: str
    states: str
    guard: Callable[[Holds, Context], bool]  # of the holds as they are afterwards
    next: str  # "" = the same
    action: str


def always(holds: Holds, context: Context) -> bool:
    return True


def free(holds: Holds, context: Context) -> bool:
    return holds == Holds()


ENTRIES = "enter_forward enter_backward hold"
TABLE = [
    Row("prefetch", "released", always, "gathering", "start"),
    Row("prefetch", "gathering gathered", always, "", "none"),
    Row(ENTRIES, "released", always, "gathered", "gather"),
    Row(ENTRIES, "gathering", always, "gathered", "wait"),
    Row(ENTRIES, "gathered", always, "", "none"),
    Row(
        "leave_forward",
        "gathered",
        lambda h, c: free(h, c) and not c.keep and not c.expected,
        "released",
        "release",
    ),
    Row("leave_forward", "gathered", always, "", "none"),
    Row(
        "gradient leave_backward",
        "gathered",
        lambda h, c: free(h, c) and not c.expected,
        "released",
        "release",
    ),
    Row("gradient leave_backward", "released gathering gathered", always, "", "none"),
    Row(
        "backward_ended",
        "gathering gathered",
        lambda h, c: free(h, c) and not c.keep,
        "released",
        "release",
    ),
    Row("backward_ended", "released gathering gathered", always, "", "none"),
    Row(
        "drop",
        "gathering gathered",
        lambda h, c: free(h, c) and not c.expected,
        "released",
        "release",
    ),
    Row("drop", "released gathering gathered", always, "", "none"),
    Row("step reset", "gathering gathered", free, "released", "release"),
    Row("step reset", "released gathering gathered", always, "", "none"),
]


def impossible(state: str, holds: Holds, event: str) -> bool:
    if event == "leave_forward":
        return state != "gathered" or holds.forward == 0
    return event == "step" and (holds.forward > 0 or holds.calls > 0)


def specified(state: str, holds: Holds, event: str, context: Context) -> Result:
    if impossible(state, holds, event):
        return Result(state, holds, "error")
    after = HOLDS_AFTER[event](state, holds, context)
    for row in TABLE:
        fits = event in row.events.split() and state in row.states.split()
        if fits and row.guard(after, context):
            return Result(row.next or state, after, row.action)
    raise AssertionError(f"the table has no row for {event} in {state}")


FLAGS = (False, True)
ALL_HOLDS = [Holds(*h) for h in product(range(3), range(3), FLAGS, FLAGS, FLAGS, FLAGS)]
ALL_CONTEXTS = [Context(*c) for c in product(FLAGS, repeat=5)]


@pytest.mark.parametrize("event", EVENTS)
def test_every_pair_of_state_and_event_is_as_the_table_says(event):
    """All states, holds (up to two forwards and two calls) and contexts."""
    for state, holds, context in product(STATES, ALL_HOLDS, ALL_CONTEXTS):
        actual = run(state, holds, event, context)
        assert actual == specified(state, holds, event, context), (state, holds, context)


@pytest.mark.parametrize("event", EVENTS)
def test_an_error_changes_nothing(event):
    seen = 0
    for state, holds in product(STATES, ALL_HOLDS):
        result = run(state, holds, event)
        if result.action == "error":
            seen += 1
            assert (result.state, result.holds) == (state, holds)
    assert (seen > 0) == (event in ("leave_forward", "step"))


@pytest.mark.parametrize("event", EVENTS)
def test_nothing_is_released_that_something_holds(event):
    for state, holds, context in product(STATES, ALL_HOLDS, ALL_CONTEXTS):
        result = run(state, holds, event, context)
        if result.action == "release":
            assert state != "released"
            assert result.state == "released" and result.holds == Holds()


@pytest.mark.parametrize("event", EVENTS)
def test_memory_goes_with_a_release_and_comes_with_a_gather_alone(event):
    """The state says whether there is memory; the action is what changes it."""
    for state, holds, context in product(STATES, ALL_HOLDS, ALL_CONTEXTS):
        result = run(state, holds, event, context)
        change = (state, result.state)
        if result.action in ("none", "error"):
            assert state == result.state
        else:
            assert (
                change
                in {
                    "start": [("released", "gathering")],
                    "gather": [("released", "gathered")],
                    "wait": [("gathering", "gathered")],
                    "release": [("gathered", "released"), ("gathering", "released")],
                }[result.action]
            )


@pytest.mark.parametrize("event", EVENTS)
def test_permanent_parameters_never_leave(event):
    for holds, context in product(ALL_HOLDS, ALL_CONTEXTS):
        result = run("gathered", holds._replace(permanent=True), event, context)
        assert result.state == "gathered" and result.holds.permanent
        assert result.action in ("none", "error")


@pytest.mark.parametrize("event", sorted(set(EVENTS) - {"backward_ended", "step", "reset"}))
def test_no_release_while_a_gradient_is_expected(event):
    """What ends a backward ends its expectations too, so those three do not ask."""
    for state, holds, context in product(STATES, ALL_HOLDS, ALL_CONTEXTS):
        result = run(state, holds, event, context._replace(expected=True))
        assert result.action != "release"


@pytest.mark.parametrize("event", ["enter_forward", "enter_backward", "hold"])
def test_whoever_enters_finds_the_parameters(event):
    for state, holds, context in product(STATES, ALL_HOLDS, ALL_CONTEXTS):
        assert run(state, holds, event, context).state == "gathered"


def test_a_graph_hold_is_for_graphs_that_are_kept_within_the_bound():
    kept = Context(graph_kept=True)
    assert run("gathered", Holds(calls=1), "leave_backward", kept).holds == Holds(graph=True)
    too_much = kept._replace(may_retain=False)
    assert run("gathered", Holds(calls=1), "leave_backward", too_much).state == "released"
    # The next backward does not keep it.
    result = run("gathered", Holds(calls=1, graph=True), "leave_backward")
    assert result == ("released", Holds(), "release")


moves = st.lists(
    st.tuples(
        st.sampled_from(EVENTS),
        st.builds(Context, *[st.booleans()] * 5),
    ),
    max_size=40,
)


def legal(state: str, holds: Holds, event: str) -> bool:
    """What the callers promise: a forward or call is left only by whom it was entered."""
    if event == "leave_backward":
        return holds.calls > 0
    return not impossible(state, holds, event)


def walk(state: str, holds: Holds, steps) -> tuple[str, Holds]:
    for event, context in steps:
        if not legal(state, holds, event):
            continue
        state, holds, action = run(state, holds, event, context)
        assert action != "error"
        assert state == "gathered" or holds == Holds(), "held, but not in memory"
    return state, holds


@given(moves)
def test_after_any_legal_walk_a_step_leaves_nothing(steps):
    """Forwards are left, the backward ends, step(): released and no hold, whatever came before."""
    state, holds = walk("released", Holds(), steps)
    closing = ["leave_forward"] * holds.forward + ["backward_ended", "step"]
    state, holds = walk(state, holds, [(event, NO_CONTEXT) for event in closing])
    assert (state, holds) == ("released", Holds())


@given(moves)
def test_without_kept_graphs_and_a_user_the_end_of_a_backward_leaves_nothing(steps):
    steps = [(e, c._replace(graph_kept=False)) for e, c in steps if e != "hold"]
    state, holds = walk("released", Holds(), steps)
    closing = ["leave_forward"] * holds.forward + ["backward_ended"]
    assert walk(state, holds, [(event, NO_CONTEXT) for event in closing]) == ("released", Holds())


@given(moves)
def test_permanent_parameters_stay_through_any_walk(steps):
    state, holds = "gathered", Holds(permanent=True)
    for event, context in steps:
        if legal(state, holds, event):
            state, holds, action = run(state, holds, event, context)
            assert (state, holds.permanent, action) == ("gathered", True, "none")
