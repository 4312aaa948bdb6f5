"""The states of an optimizer: how ``optimizer.state`` shows them, and what is loaded into them.

Views of states are made when they are asked for. A state that is loaded is checked whole before any
of it is written.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_ext import _C
from zero_ext.engine.handle import Handle
from zero_ext.optim.blocks import dequantized, quantize_
from zero_ext.optim.groups import (
    Group,
    Trained,
    name_in_module,
)
from zero_ext.ranks.agreement import check_same_on_all_ranks
from zero_ext.ranks.groups import Groups
from zero_ext.tensor.meshes import copy_whole
from zero_ext.tensor.shard_tensor import ShardTensor

Writer = Callable[["ShownStates"], None]  # of states, which it then shows


class Later(tuple):
    """Stands for a parameter's state until it is asked for: what makes it, and the index."""

    __slots__ = ()


class ShownStates(defaultdict):
    """States by parameter, and by name those that belong to no parameter.

    Who reads the state of one parameter gets its views made. Who reads all of them, to iterate,
    compare, copy or pickle them, gets all views made.

    Attributes:
        begun: Whether the ranks have stepped or loaded states, although this one may own none.
    """

    begun = False

    def __bool__(self) -> bool:
        """torch asks it whether to make states by a step, which all ranks must do or none."""
        return self.begun or len(self) > 0

    def __getitem__(self, key: Hashable) -> Any:
        value = super().__getitem__(key)
        if type(value) is Later:
            with torch.inference_mode(False), torch.no_grad():
                make, i = value
                value = make(key, i)
            super().__setitem__(key, value)
        return value

    def get(self, key: Hashable, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Hashable, default: Any = None) -> Any:
        super().setdefault(key, default)
        return self[key]

    def pop(self, key: Hashable, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def _make_all(self) -> None:
        for key in [*dict.keys(self)]:
            self.get(key)

    def __reduce_ex__(self, protocol) -> tuple:
        return defaultdict, (dict, {key: self[key] for key in dict.keys(self)})


def _of_all(name: str) -> Callable:
    of_dict = getattr(defaultdict, name)

    def method(self, *args):
        self._make_all()
        return of_dict(self, *args)

    method.__name__ = name
    return method


# Without __iter__ here dict() and ** would copy what stands for a state.
for _name in (
    *("__iter__", "__reversed__", "items", "values", "popitem", "copy", "__copy__", "__repr__"),
    *("__eq__", "__ne__", "__or__", "__ror__"),
):
    setattr(ShownStates, _name, _of_all(_name))


class SavedState(NamedTuple):
    """The saved states of parameter i, and its group with the settings that it will have."""

    key: int | str
    parameter: Tensor
    i: int
    group: Group
    values: dict[str, Any]

    @property
    def name(self) -> str:  # for messages
        name = name_in_module(self.parameter)
        return f"parameter {self.key}" if name is None else f"'{name}'"

    def check_shape(self, name: str, shape: torch.Size) -> None:
        """Raise where a saved value has another shape than the optimizer's."""
        value = self.values[name]
        if isinstance(value, Tensor) and value.shape != shape:
            raise ValueError(
                f"zero_ext: state '{name}' of {self.name} has shape "
                f"{tuple(value.shape)}, the optimizer's has {tuple(shape)}."
            )


class States:
    """The states of an optimizer's parameters, wherever they lie."""

    def count_of(self, group: Group) -> int:
        """How many states in C++ the parameters of ``group`` have."""
        return 0

    def check(self, groups: Sequence[Group]) -> None:
        """Raise where a group needs a state that there is no memory for."""

    def check_added(self, group: Group) -> None:
        """Raise where a group that was added needs such a state, or an update of another kind."""
        self.check([group])

    def show(self, shown: ShownStates, parameters: Trained, groups: Sequence[Group]) -> None:
        """Show the states of ``parameters``, which are now of these groups."""

    def arrange(self, groups: Sequence[Group], trained: Trained) -> None:
        """Take over the groups as they are now, and which of their parameters train."""

    def forget(self, parameter: Tensor, i: int, group: Group) -> bool:
        """Let its state begin anew. Returns whether there was one."""
        return False

    def checked_write(self, saved: Sequence[SavedState]) -> Writer:
        """Check all states. What is returned writes them, and zeros what was not saved."""
        raise NotImplementedError

    def convert(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the class convert a loaded state that older versions have saved."""

    def end_copies(self, shown: ShownStates) -> None:
        """Take what users have written to states that they read since the last step."""

    def set_offloaded(self, shown: ShownStates, offloaded: bool) -> None:
        """Move the states to host memory, or back."""
        raise NotImplementedError

    def stats(self) -> dict[str, int]:
        """See ``zero_ext.stats``."""
        return {}


def check_same_states(state_dict: dict[str, Any], groups: Groups) -> None:
    """Raise where some ranks pass their parts of a state and others all of it, or other values.
    Collective. Of the tensors that each rank passes whole, the smallest stands for all."""
    states = [each for each in state_dict["state"].values() if isinstance(each, dict)]
    tensors = [t for each in states for t in each.values() if isinstance(t, Tensor) and t.numel()]
    kind = "this rank's parts" if any(isinstance(t, ShardTensor) for t in tensors) else "all of it"
    whole = [t for t in tensors if t.dim() > 0 and not isinstance(t, DTensor)]
    if whole:
        smallest = min(whole, key=Tensor.numel).detach().cpu().contiguous().view(-1)
        kind += f" with digest {_C.digest(smallest.view(torch.uint8).numpy()):x}"
    remedy = "Pass the same state on every rank, for example by torch.load(path, mmap=True)."
    check_same_on_all_ranks(groups, [kind], "the optimizer states that are loaded", remedy)


class Layout(NamedTuple):
    """The states that a class keeps in C++.

    Attributes:
        names: In the order in which C++ numbers them.
        count_of: How many of them the parameters of a group have, the first ones.
        counts_steps: Whether torch's class has the state "step" as well.
    """

    names: tuple[str, ...]
    count_of: Callable[[Group], int]
    counts_steps: bool = True

    def first_names(self, count: int) -> tuple[str, ...]:
        return ("step", *self.names[:count]) if self.counts_steps else self.names[:count]


class _Copy(NamedTuple):
    """What blocks stand for, as it was shown beside the parameter's states ``names``."""

    parameter: Tensor
    i: int
    names: tuple[str, ...]
    values: Tensor  # fp32 [numel], this rank's part
    shown: Tensor  # the same in the parameter's shape
    versions: tuple[int, int]
    codes: Tensor
    scales: Tensor

    def versions_now(self) -> tuple[int, int]:
        """Both versions: a write through a ShardTensor counts in its own alone."""
        return self.values._version, self.shown._version


class FusedStates(States):
    """States in C++, which updates in C++ use. ``optimizer.state`` shows views of them.

    States in blocks (``state_dtype="int8"``) are shown as fp32 copies, which are made when they are
    asked for and hold until the next step. What was written to a copy is written to its blocks
    then.
    """

    def __init__(
        self, layout: Layout, kind: str, handle: Handle, state: _C.OptimizerState, held: int
    ):
        self._layout, self._kind, self._handle, self._state = layout, kind, handle, state
        self._held = held  # so many of the names have memory
        self._copies: list[_Copy] = []  # made since the last step

    def count_of(self, group: Group) -> int:
        return self._layout.count_of(group)

    def check(self, groups: Sequence[Group]) -> None:
        if max(map(self.count_of, groups), default=0) > self._held:
            raise ValueError(
                f"zero_ext: a group of this {self._kind} needs "
                f"'{self._layout.names[self._held]}', which no group needed at construction: "
                "there is no memory for it. Set amsgrad or momentum in the constructor, and switch "
                "it off in the other groups."
            )

    def _make(
        self, names: tuple[str, ...], others: dict[str, Any], parameter: Tensor, i: int
    ) -> dict[str, Any]:
        """``others``, the count of steps of parameter i if it is among ``names``, and its first
        states."""
        made = others | ({"step": self._state.step(i)} if "step" in names else {})
        for k, name in enumerate(name for name in names if name != "step"):
            local, scales = self._state.slice(k, i), self._state.scales(k, i)
            values = local if scales is None else dequantized(local, scales)
            made[name] = self._handle.as_parameter(values, i, parameter)
            if scales is not None:
                copied = _Copy(parameter, i, names, values, made[name], (0, 0), local, scales)
                self._copies.append(copied._replace(versions=copied.versions_now()))
        return made

    def _held_state(self, parameter: Tensor, i: int) -> dict[str, Tensor]:
        """The count of steps, and each state that there is memory for."""
        return self._make(self._layout.first_names(self._held), {}, parameter, i)

    def _names_in(self, group: Group) -> tuple[str, ...]:
        return self._layout.first_names(self.count_of(group))

    def show(self, shown: ShownStates, parameters: Trained, groups: Sequence[Group]) -> None:
        makers = [functools.partial(self._make, self._names_in(group), {}) for group in groups]
        known = set(map(id, dict.keys(shown)))
        for parameter, i, g in parameters:
            if id(parameter) in known:
                shown[parameter].update(makers[g](parameter, i))
            else:
                dict.__setitem__(shown, parameter, Later((makers[g], i)))

    def forget(self, parameter: Tensor, i: int, group: Group) -> bool:
        for value in self._held_state(parameter, i).values():
            value.zero_()
        self._write_back()
        return True

    def checked_write(self, saved: Sequence[SavedState]) -> Writer:
        saved = list(map(self._completed, saved))
        writes = [(each, self._held_state(each.parameter, each.i)) for each in saved]
        for each, held in writes:
            for name in each.values:
                if name not in held:
                    raise ValueError(
                        f"zero_ext: {self._kind} has no state '{name}'. Load the kind that was "
                        "saved."
                    )
                each.check_shape(name, held[name].shape)

        def write(shown: ShownStates) -> None:
            for each, held in writes:
                for name, target in held.items():
                    value = each.values.get(name)
                    if value is None:
                        target.zero_()
                    else:
                        tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                        copy_whole(target, tensor)
                names = {*self._names_in(each.group), *each.values}
                shown[each.parameter].update((k, v) for k, v in held.items() if k in names)
            self.end_copies(shown)

        return write

    def _completed(self, saved: SavedState) -> SavedState:
        """Add the values that torch does not save, and leave out those that it saves as None."""
        values = {name: value for name, value in saved.values.items() if value is not None}
        if values and self._layout.counts_steps and "momentum_buffer" in self._layout.names:
            # torch counts no steps of SGD: its first one with momentum makes the buffer.
            values["step"] = values.get("step", 1) if "momentum_buffer" in values else 0
        return saved._replace(values=values)

    def end_copies(self, shown: ShownStates) -> None:
        self._write_back()
        copies, self._copies = self._copies, []
        for each in {each.i: each for each in copies}.values():
            values = dict.get(shown, each.parameter)
            if values and type(values) is not Later:  # one that was emptied stays empty
                others = {name: v for name, v in values.items() if name not in each.names}
                make = functools.partial(self._make, each.names, others)
                dict.__setitem__(shown, each.parameter, Later((make, each.i)))

    def _write_back(self) -> None:
        """Write the copies that a user has changed."""
        for k, each in enumerate(self._copies):
            if each.versions_now() != each.versions:
                quantize_(each.values, each.codes, each.scales)
                self._copies[k] = each._replace(versions=each.versions_now())

    def set_offloaded(self, shown: ShownStates, offloaded: bool) -> None:
        self.end_copies(shown)
        self._state.set_offloaded(offloaded)
