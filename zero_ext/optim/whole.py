"""Whole: code of an optimizer that updates each parameter by itself runs on whole ones at owners.

Note [Owners] in owners.py says where they are, note [Lending] in lending.py how the code gets them.
The states lie at the owners, whole and in whatever form the class keeps them.

Note [What all owners share]
The code runs once for each wave of parameters, on every rank. What it keeps in the settings of a
group, under a name (``state["k"]``) or as an attribute, such as a count of steps, counts once for
all waves. So each wave begins with copies of the values from before the call. Of settings and named
states, those of the first wave and rank that have changed become those of all ranks, with the
message that says whether the code has raised. The trial rejects classes where these values depend
on which parameters a rank has.
"""

import contextlib
import copy
import functools
import operator
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext._torch import tree_map_only
from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import find
from zero_ext.optim.groups import (
    Group,
    Trained,
    attributes_of,
    named_in,
    replace_named,
    settings_of,
    sharded_in,
)
from zero_ext.optim.lending import OwnCode, OwnStates, WatchedWrites, lent
from zero_ext.optim.owners import KeptMasters, Owners, Values
from zero_ext.optim.states import Loader, SavedState, ShownStates
from zero_ext.optim.verdicts import shown as text_of
from zero_ext.ranks.agreement import all_or_none

# Keys of what ranks tell each other.
_WRITTEN, _RESULT = "written", "result"
_ITSELF = "the optimizer"
_META = torch.device("meta")


class Whole(OwnStates):
    """``optimizer.state`` has the class's states themselves, of what this rank owns."""

    def __init__(self, handle: Handle, state: _C.OptimizerState, code: OwnCode, owners: Owners):
        super().__init__(handle, state, code)
        self._owners, self._masters = owners, KeptMasters(owners)
        self._trained: list[tuple[Tensor, int, int]] = []  # in the order of indices
        self._order: dict[int, int] = {}  # by id, where they stand in the groups
        # By index, what the code gets: of a parameter's shape, with memory during a call alone.
        self._wholes: dict[int, torch.nn.Parameter] = {}

    def check_added(self, group: Group) -> None:
        for shape in {tuple(p.shape) for p in group["params"]}:  # Muon takes matrices alone
            of_shape = torch.nn.Parameter(torch.empty(shape, device="meta"))
            # Some classes make their settings anew, such as a tensor of a rate.
            made = settings_of(self.code.made_for(of_shape, group).param_groups[0]).items()
            group.update((k, v) for k, v in made if getattr(v, "device", None) != _META)

    def arrange(self, groups: Sequence[Group], trained: Trained) -> None:
        self._trained = sorted(trained, key=operator.itemgetter(1))
        self._order = {id(p): k for k, (p, _, _) in enumerate(trained)}
        self._owners.assign({p: p.numel() for p, _, _ in self._trained})

    def stats(self) -> dict[str, int]:
        return {"bytes_owner_masters": self._masters.nbytes}

    # The code of the class

    def update(self, optimizer: torch.optim.Optimizer, keywords: dict[str, Any]) -> None:
        """Run the class's step, after the ranks have agreed on it."""
        engine = self._handle.engine
        stepped = [each for each in self._trained if each[0].grad is not None]
        masters = {p: engine.master_slice(i) for p, i, _ in stepped}
        gradients = {p: engine.grad_slice(i) for p, i, _ in stepped}
        step = functools.partial(self.code.step, optimizer, **keywords)
        run = _Run(optimizer, self, f"step() of {self.code.name}", step, stepped)
        try:
            out_of_date = self._masters.out_of_date(masters)
            for wave in self._owners.waves([*masters]):
                (whole_gradients,) = self._owners.to_owners(wave, gradients)()
                whole = self._masters.whole(wave, masters, out_of_date)
                run.run(whole, whole_gradients)
                parts = self._owners.from_owners(wave, whole, masters[wave.parameters[0]])()
                self._masters.write(parts, masters)
            if not stepped:  # classes may count such steps
                run.run({}, {})
        except BaseException:
            self._masters.forget()
            raise
        finally:  # masters that have moved are those of their parameters, whatever was raised
            self._state.apply_masters()
        run.keep()

    def call(self, optimizer: torch.optim.Optimizer, what: str, act: Callable[[], Any]) -> Any:
        """Run a method beside ``step``, on every rank. What it writes is written on all.

        Raises:
            TypeError: it returns a context manager, or something else for some parameters.
        """
        self._check_there()
        if not self._trained:
            return act()
        with_graph = torch.is_grad_enabled()

        def method() -> Any:
            with torch.set_grad_enabled(with_graph):
                return act()

        run = _Run(optimizer, self, f"{what} of {self.code.name}", method, self._trained)
        try:
            with torch.no_grad():
                self._call_in_waves(run)
        except BaseException:
            self._masters.forget()
            raise
        run.keep()
        return run.result()

    def _call_in_waves(self, run: "_Run") -> None:
        handle, owners = self._handle, self._owners
        masters = {p: handle.engine.current_master(i) for p, i, _ in self._trained}
        with all_or_none(handle.groups, run.what) as lacking:
            lacking.update((i, b"") for p, i, _ in self._trained if p.grad is None)
        parts = {p: self._gradient_of(p, i) for p, i, _ in self._trained if i not in lacking}
        out_of_date = self._masters.out_of_date(masters)
        for wave in owners.waves([*masters]):
            whole, gradients = self._masters.whole(wave, masters, out_of_date), {}
            if graded := [p for p in wave.parameters if p in parts]:
                gradients = owners.to_owners(owners.wave(graded), parts, kept=True)()[0]
            written = run.run(whole, gradients, watched=WatchedWrites())
            if of_wave := [p for p in wave.parameters if find(p)[1] in written]:
                like = masters[of_wave[0]]
                back = owners.from_owners(owners.wave(of_wave), whole, like, kept=True)()
                for p in of_wave:
                    i = find(p)[1]
                    handle.write_value(i, handle.as_parameter(back[p], i, p))

    def whole_of(self, i: int, values: Tensor, gradient: Tensor | None) -> torch.nn.Parameter:
        """Parameter i with ``values``, which are flat, as the code gets it."""
        whole, shaped = self._wholes.get(i), self.shaped(values, i)
        if whole is None:
            whole = self._wholes[i] = torch.nn.Parameter(shaped)
        whole.data = shaped
        whole.grad = None if gradient is None else self.shaped(gradient, i)
        return whole

    def shaped(self, flat: Tensor, i: int) -> Tensor:
        shape = self._handle.parameters[i].shape
        return flat.as_strided(shape, self._handle.engine.strides(i))

    def in_users_order(self, wholes: dict[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        places = map(self._order.__getitem__, map(id, wholes))
        return [pair for _, pair in sorted(zip(places, wholes.items(), strict=True))]

    def state_of(
        self, shown: ShownStates, p: Tensor, whole: Tensor, group: Group
    ) -> dict[str, Any] | None:
        """What the code gets as the state of a parameter."""
        state = shown.get(p)
        if not state and (given := self._given.pop(id(p), None)):
            state = {name: _in_fp32(value) for name, value in given.items()}
        if not state and self.code.makes_states:  # when it is constructed, from the values
            made = self.code.made_for(torch.nn.Parameter(whole.data), group)
            state = made.state.get(made.param_groups[0]["params"][0])
        return state

    # Saving and loading

    def all_of(self, shown: ShownStates, groups: Sequence[Group]) -> dict[Any, Any]:
        """The states of all ranks, whole. Collective."""
        places = [place for group in groups for place in sharded_in(group)]
        mine = {i: dict(shown[p]) for p, i in places if p in shown and self._owners.owns(p)}
        everything = self._owners.gather(mine)
        whole = {p: everything[i] for p, i in places if i in everything}
        return defaultdict(dict, {**whole, **named_in(shown)})

    @torch.no_grad()
    def checked_write(self, shown: ShownStates, saved: Sequence[SavedState]) -> Loader:
        self._check_there()
        trained, loaded = {id(p) for p, _, _ in self._trained}, {}
        for each in saved:
            if id(each.parameter) not in trained:
                each.warn_of_frozen()
                continue
            # Values of the parameter's shape may be sharded: all ranks take part.
            values = {
                name: value.full_tensor() if hasattr(value, "full_tensor") else value
                for name, value in each.values.items()
            }
            if values and self._owners.owns(each.parameter):
                loaded[each.parameter] = self._loaded(values)

        def write() -> None:
            for each in saved:  # others, which were taken out of their groups, keep their states
                self._given.pop(id(each.parameter), None)
                dict.pop(shown, each.parameter, None)
            shown.update(loaded)

        return write

    def _loaded(self, values: dict[str, Any]) -> dict[str, Any]:
        device, state = self._handle.engine.master_slice(self._trained[0][1]).device, {}
        for name, value in values.items():
            if isinstance(value, Tensor) and name != "step":  # counts stay on the host
                value = value.detach().to(device, copy=True)
            state[name] = copy.deepcopy(value)
        return state

    def convert(self, optimizer: torch.optim.Optimizer) -> None:
        shown, lists = optimizer.zero_core.shown, [[] for _ in optimizer.param_groups]
        states: dict[Any, Any] = defaultdict(dict, named_in(shown))
        for p, i, g in self._trained:
            if dict.get(shown, p):
                like = self._handle.engine.master_slice(i)
                whole = torch.nn.Parameter(_without_memory(like, p.shape))
                lists[g].append(self._wholes.setdefault(i, whole))
                states[self._wholes[i]] = shown[p]
        with lent(optimizer, lists, states):
            optimizer.__setstate__({"state": states, "param_groups": optimizer.param_groups})

    def set_offloaded(self, shown: ShownStates, offloaded: bool) -> None:
        self._set_away(offloaded, shown)
        self._masters.forget()


class _Run:
    """One call of the class's code in waves. See note [What all owners share].

    Args:
        act: The code. It gets parameters by the optimizer's groups.
        parameters: Those that it is called for, with their indices and the numbers of their groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: Whole,
        what: str,
        act: Callable[[], Any],
        parameters: Trained,
    ):
        self._optimizer, self._states, self.what, self._act = optimizer, states, what, act
        self._core = optimizer.zero_core
        self._places = {id(p): (i, g) for p, i, g in parameters}
        self._before, self._named = self._values(), named_in(self._core.shown)
        # Of each group, by number, and of named states: what this rank and the others have changed.
        self._changed: dict[int, dict[Any, Any]] = {}
        self._of_others: dict[int, bytes] = {}
        self._attributes: dict[str, Any] = {}  # as the last wave has left them
        self._results: dict[str, Any] = {}  # by how they are shown

    def _values(self) -> list[dict[str, Any]]:
        """The settings of each group, and the attributes."""
        return [*map(settings_of, self._optimizer.param_groups), attributes_of(self._optimizer)]

    def _set_values(self, values: list[dict[str, Any]]) -> None:
        places = [*self._optimizer.param_groups, vars(self._optimizer)]
        for place, now, wanted in zip(places, self._values(), values, strict=True):
            for name in now.keys() - wanted.keys():
                del place[name]
            place.update(wanted)

    def run(
        self, masters: Values, gradients: Values, watched: WatchedWrites | None = None
    ) -> set[int]:
        """Run the code on one wave. Collective. Returns the indices of what it has written to."""
        wholes = {}
        for p, values in masters.items():
            i, _ = self._places[id(p)]
            wholes[p] = self._states.whole_of(i, values, gradients.get(p))
        try:
            with all_or_none(self._core.handle.groups, self.what) as found:
                result = self._run_here(wholes, found, watched)
                for p, whole in wholes.items():
                    i, _ = self._places[id(p)]
                    flat = masters[p]
                    if watched is not None and watched.moved(whole.data, flat):
                        found[_WRITTEN, i] = b""
                    if whole.data_ptr() != flat.data_ptr():  # another tensor was put there
                        self._states.shaped(flat, i).copy_(whole.data)
                if watched is not None:
                    self._note(result, found)
        finally:
            for p, whole in wholes.items():
                whole.grad, whole.data = None, _without_memory(masters[p], whole.shape)
        for key in found.keys() - self._changed.keys():
            if isinstance(key, int):
                self._of_others.setdefault(key, found[key])
        self._results.update((k[1], data) for k, data in found.items() if _is(k, _RESULT))
        return {key[1] for key in found if _is(key, _WRITTEN)}

    def _run_here(
        self, wholes: dict[Tensor, Tensor], found: dict[Any, bytes], watched: WatchedWrites | None
    ) -> Any:
        optimizer, shown, groups = self._optimizer, self._core.shown, self._optimizer.param_groups
        lists: list[list[Tensor]] = [[] for _ in groups]
        states: dict[Any, Any] = defaultdict(dict, copy.deepcopy(self._named))
        for p, whole in self._states.in_users_order(wholes):
            g = self._places[id(p)][1]
            lists[g].append(whole)
            state = self._states.state_of(shown, p, whole, groups[g])
            if state is not None:
                states[whole] = state
        left, now = [states], []
        try:
            self._set_values([*copy.deepcopy(self._before[:-1]), _copied(self._before[-1])])
            with lent(optimizer, lists, states) as left, watched or contextlib.nullcontext():
                result = self._act()
            now = self._values()
        finally:
            self._set_values(self._before)
            for p, whole in wholes.items():
                if whole in left[0]:
                    dict.__setitem__(shown, p, left[0][whole])
                else:
                    dict.pop(shown, p, None)
        self._attributes = now[-1]
        befores, afters = [*self._before[:-1], self._named], [*now[:-1], named_in(left[0])]
        for key, (before, after) in enumerate(zip(befores, afters, strict=True)):
            known = key in self._changed or key in self._of_others
            if not known and text_of(before) != text_of(after):
                self._changed[key], found[key] = after, _packed(after)
        return result

    def keep(self) -> None:
        """What the code has changed stays, on all ranks."""
        device, values = self._core.handle.groups.device, [*self._before[:-1], self._named]
        for key, data in self._of_others.items():
            values[key] = _unpacked(data, device)
        for key, now in self._changed.items():
            values[key] = now
        replace_named(self._core.shown, values[-1])
        self._set_values([*values[:-1], self._attributes])

    def _note(self, result: Any, found: dict[Any, bytes]) -> None:
        if isinstance(result, contextlib.AbstractContextManager):
            raise TypeError(
                f"{self.what} returns a context manager, which is not available where owners "
                "update whole parameters. Call methods before and after the block instead."
            )
        itself = result is self._optimizer
        text = _ITSELF if itself else text_of(result)
        found[_RESULT, text] = _packed(None if itself else result)

    def result(self) -> Any:
        if len(self._results) > 1:
            raise TypeError(
                f"zero_ext: {self.what} returns something else for some parameters: "
                f"{', '.join(sorted(self._results))}. Owners call it for their own parameters; "
                "what it has written is written."
            )
        ((text, data),) = self._results.items()
        device = self._core.handle.groups.device
        return self._optimizer if text == _ITSELF else _unpacked(data, device)


def _is(key: Any, kind: str) -> bool:
    return isinstance(key, tuple) and key[0] == kind


def _copied(value: Any) -> Any:
    """Copies of tensors and collections; anything else, such as a module, is shared."""
    if isinstance(value, torch.nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple, set):
        return type(value)(map(_copied, value))
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update((key, _copied(each)) for key, each in value.items())
        return copied
    return value


class _OnDevice:
    """A tensor on its way to a rank that has another device."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.cpu()


def _packed(value: Any) -> bytes:
    def on_host(tensor: Tensor) -> Any:
        return tensor if tensor.device.type == "cpu" else _OnDevice(tensor)

    return pickle.dumps(tree_map_only(Tensor, on_host, value))


def _unpacked(data: bytes, device: torch.device) -> Any:
    return tree_map_only(_OnDevice, lambda each: each.tensor.to(device), pickle.loads(data))


def _in_fp32(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def _without_memory(like: Tensor, shape: torch.Size) -> Tensor:
    """With the memory of one element."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(shape)
