"""Slices: code of an elementwise optimizer runs on this rank's parts of the masters. Note [Lending]
in lending.py says how it gets them.

Note [What a method beside step gets]
Other ranks may be gathering from the masters themselves, so a method gets copies, which have what
users wrote to the parameters. What it wrote becomes the parameter and its master on all ranks.
Which parameters it wrote is seen in its operations and not in their values: ranks must agree about
it, and values may change on one rank alone. So a method that writes nothing is not collective.
"""

import contextlib
import copy
import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_ext.optim.groups import Group, Trained, named_in, replace_named
from zero_ext.optim.lending import OwnStates, WatchedWrites, lent
from zero_ext.optim.states import SavedState, ShownStates, Writer
from zero_ext.optim.verdicts import StepSettings


@dataclass(slots=True, eq=False)
class _Slice:
    """One parameter. ``shown`` is what ``optimizer.state`` shows of the values ``made``."""

    parameter: Tensor
    i: int
    master: torch.nn.Parameter
    group: Group
    shown: dict[str, Any] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)  # by id
    names: set[str] = field(default_factory=set)  # of states that ranks compare


class Slices(OwnStates):
    """The states of an elementwise optimizer, as its class keeps them of this rank's parts.

    Args:
        settings: Compares the states that have no value for each element.
    """

    def __init__(self, *of_all: Any, settings: StepSettings):
        super().__init__(*of_all)
        self._settings = settings
        self._slices: dict[int, _Slice] = {}  # by index, of what has ever trained
        self._lists: list[list[Tensor]] = []  # the masters of each group
        self._own: dict[Any, Any] = defaultdict(dict)  # as the class has them, by master
        self._cut: dict[str, bool] = {}  # by name, whether a state has a value for each element

    # Views of the states

    def check_added(self, group: Group) -> None:
        self.code.try_out(group)

    def show(self, shown: ShownStates, parameters: Trained, groups: Sequence[Group]) -> None:
        for parameter, i, g in parameters:
            each = self._slices.get(i)
            if each is None:
                master = torch.nn.Parameter(self._handle.engine.master_slice(i))
                each = self._slices[i] = _Slice(parameter, i, master, groups[g])
                if first := self._first_states.pop(id(parameter), None):
                    self._own[master] = self._taken(each, first)
                elif self.code.makes_states:
                    self._own[master] = self._begun(each)
            each.group = groups[g]
            self._show_one(each, self._own.get(each.master), shown)

    def arrange(self, groups: Sequence[Group], trained: Trained) -> None:
        self._lists = [[] for _ in groups]
        for _, i, g in trained:
            self._lists[g].append(self._slices[i].master)

    def _begun(self, each: _Slice) -> dict[str, Any]:
        """The state that the class makes when it is constructed."""
        return dict(self.code.made_for(each.master, each.group).state.get(each.master, {}))

    def _show_one(self, each: _Slice, state: dict[str, Any] | None, shown: ShownStates) -> None:
        each.made = list(map(id, (state or {}).values()))
        if not state:
            each.shown = {}
            dict.pop(shown, each.parameter, None)
            return
        for name, value in state.items():
            if name not in each.names:
                self._note_new(each, name, value)
        views = {
            name: self._handle.as_parameter(value, each.i, each.parameter)
            if self._is_per_element(name, value, each)
            else value
            for name, value in state.items()
        }
        each.shown, read = views, shown[each.parameter]
        for name in read.keys() - views.keys():
            del read[name]
        read.update(views)

    def forget(self, parameter: Tensor, i: int, group: Group) -> bool:
        each = self._slices.get(i)
        if each is None or not self._own.pop(each.master, None):
            return False
        if self.code.makes_states:
            self._own[each.master] = self._begun(each)
        each.shown, each.made = {}, []
        return True

    def end_copies(self, shown: ShownStates) -> None:
        """Give the class the values that users have put among the states."""
        found = {id(key): value for key, value in dict.items(shown)}
        for each in self._slices.values():
            before, now = each.shown, found.get(id(each.parameter)) or each.shown
            same = map(operator.is_, map(now.get, before), before.values())
            if len(now) == len(before) and all(same):
                continue
            state = self._own[each.master]
            for name in state.keys() - now.keys():
                del state[name]
            new = {n: v for n, v in now.items() if n not in before or before[n] is not v}
            state.update(self._taken(each, new))
            each.shown, each.made = dict(now), []  # so that they are shown anew

    # The code of the class

    def update(self, optimizer: torch.optim.Optimizer, keywords: dict[str, Any]) -> None:
        """Run the class's step, after the ranks have agreed on it."""
        for each in self._slices.values():
            each.master.grad = self._gradient_of(each.parameter, each.i)
        step = functools.partial(self.code.step, optimizer, **keywords)
        self._run(optimizer, step, self._state.apply_masters)

    def _run(
        self, optimizer: torch.optim.Optimizer, act: Callable[[], Any], write: Callable[[], None]
    ) -> Any:
        shown = optimizer.zero_core.shown
        replace_named(self._own, named_in(shown))
        left = [self._own]
        try:
            with lent(optimizer, self._lists, self._own) as left:
                return act()
        finally:  # masters that have moved are those of their parameters, whatever it raised
            for each in self._slices.values():
                each.master.grad = None  # which would count as kept by somebody
            write()
            (self._own,) = left
            self._show_own(shown)

    def _show_own(self, shown: ShownStates) -> None:
        """Show the states that the class has by now."""
        states = {id(key): state for key, state in dict.items(self._own)}
        for each in self._slices.values():
            state = states.get(id(each.master), {})
            if list(map(id, state.values())) != each.made:
                self._show_one(each, state, shown)
        named = named_in(self._own)
        for name, value in named.items():
            if name not in shown:
                self._settings.add_state(-1, name, None, value)
        replace_named(shown, named)

    def _note_new(self, each: _Slice, name: str, value: Any) -> None:
        """States that appeared, and have no value for each element, must be equal on all ranks."""
        each.names.add(name)
        engine = self._handle.engine
        # Some optimizers make no state where there are no elements.
        everywhere = all(itertools.starmap(operator.lt, itertools.pairwise(engine.bounds(each.i))))
        if (self._handle.replicated or everywhere) and not self._is_per_element(name, value, each):
            self._settings.add_state(each.i, name, engine.parameter_name(each.i), value)

    def call(self, optimizer: torch.optim.Optimizer, what: str, act: Callable[[], Any]) -> Any:
        """See note [What a method beside step gets]."""
        if not self._slices:  # nothing to train
            return act()
        result = self._called(optimizer, act)
        if isinstance(result, contextlib.AbstractContextManager):
            return self._entered(optimizer, result)
        return result

    @contextlib.contextmanager
    def _entered(
        self, optimizer: torch.optim.Optimizer, context: contextlib.AbstractContextManager
    ) -> Iterator[Any]:
        """``context``, whose beginning and end change parameters."""
        with contextlib.ExitStack() as stack:
            value = self._called(optimizer, context.__enter__)
            stack.push(lambda *error: self._called(optimizer, lambda: context.__exit__(*error)))
            yield value

    def _called(self, optimizer: torch.optim.Optimizer, act: Callable[[], Any]) -> Any:
        self._check_there()
        engine, slices, watched = self._handle.engine, [*self._slices.values()], WatchedWrites()
        masters = [each.master.data for each in slices]
        with torch.no_grad():
            copies = [engine.current_master(each.i) for each in slices]
            for each, values in zip(slices, copies, strict=True):
                each.master.grad, each.master.data = (
                    self._gradient_of(each.parameter, each.i),
                    values,
                )

        def watch() -> Any:
            with watched:
                return act()

        def write() -> None:
            """Collective. In an order that all ranks have."""
            moved = []
            for each, master, copied in zip(slices, masters, copies, strict=True):
                values, each.master.data = each.master.data, master
                if watched.moved(values, copied):
                    moved.append((each.i, each.parameter, values.float()))
            for i, parameter, values in sorted(moved, key=operator.itemgetter(0)):
                self._handle.write_value(i, self._handle.as_parameter(values, i, parameter))

        return self._run(optimizer, watch, torch.no_grad()(write))

    # Loading

    def checked_write(self, saved: Sequence[SavedState]) -> Writer:
        self._check_there()
        of_shapes: dict[str, list[bool]] = defaultdict(list)  # by name, whether each has its own
        for each in saved:
            for name, value in each.values.items():
                if value is not None:
                    of_shapes[name].append(_has_shape(value, each.parameter.shape))
        for name, found in of_shapes.items():
            self._is_cut(name, saved[0].group, found)
        writes = []
        for each in saved:
            lacking = self.code.try_out(each.group).keys() - each.values if each.values else ()
            if lacking:
                raise ValueError(
                    f"zero_ext: the state of {each.name} lacks '{min(lacking)}', which "
                    f"{self.code.name} has. Load what it has saved."
                )
            for name in filter(self._cut.get, each.values):
                each.check_shape(name, each.parameter.shape)
            of_rank = self._slices[each.i]
            writes.append((of_rank, self._taken(of_rank, each.values)))

        def write(shown: ShownStates) -> None:
            for each, state in writes:
                self._own[each.master] = state
                each.names.clear()
                dict.pop(shown, each.parameter, None)
                self._show_one(each, state, shown)

        return write

    def convert(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the class convert what older versions have saved, as torch does."""
        with lent(optimizer, self._lists, self._own):
            optimizer.__setstate__({"state": self._own, "param_groups": optimizer.param_groups})

    def set_offloaded(self, shown: ShownStates, offloaded: bool) -> None:
        self._set_away(offloaded, self._own)

    def _taken(self, each: _Slice, values: dict[str, Any]) -> dict[str, Any]:
        """The states for the class, from values that users or its constructor have put there."""
        return {
            name: self._piece_of(value, each.parameter, each.i)
            if _has_shape(value, each.parameter.shape) and self._is_cut(name, each.group, [True])
            else copy.deepcopy(value)
            for name, value in values.items()
        }

    # States with a value for each element

    def _is_per_element(self, name: str, value: Any, each: _Slice) -> bool:
        if not _has_shape(value, each.master.shape):
            return False
        states = ((other, self._own.get(other.master, {})) for other in self._slices.values())
        of_shapes = (_has_shape(own[name], o.master.shape) for o, own in states if name in own)
        return self._is_cut(name, each.group, of_shapes)

    def _is_cut(self, name: str, group: Group, of_shapes: Iterable[bool]) -> bool:
        """Whether a state is cut. ``of_shapes``: of one that no first step makes, whether each has
        its parameter's shape."""
        if name not in self._cut:
            with contextlib.suppress(TypeError):  # settings that a user has made since
                self._cut = {**self.code.try_out(group), **self._cut}
        if name not in self._cut:
            self._cut[name] = all(of_shapes)
        return self._cut[name]


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape
