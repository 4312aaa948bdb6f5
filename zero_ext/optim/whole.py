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
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_ext._torch import tree_map_only
from zero_ext.optim.groups import (
    Group,
    Trained,
    attributes_of,
    named_in,
    replace_named,
    settings_of,
)
from zero_ext.optim.lending import OwnStates, WatchedWrites, lent
from zero_ext.optim.owners import KeptMasters, Owners, Values
from zero_ext.optim.states import SavedState, ShownStates, Writer
from zero_ext.optim.verdicts import text_of
from zero_ext.ranks.agreement import all_or_none
from zero_ext.tensor.meshes import reject_cut

# Keys of what ranks tell each other.
_WRITTEN, _RESULT, _CHANGED = "written", "result", "changed"
_ITSELF = "the optimizer"
_META, _HALVES = torch.device("meta"), (torch.bfloat16, torch.float16)


class _WholeParameter(NamedTuple):
    """The tensor that stands for a parameter in the code: it has memory during a call alone.

    Attributes:
        g: The number of the parameter's group.
        nothing: Its data between two calls, which has the memory of one element.
    """

    parameter: Tensor
    i: int
    g: int
    whole: torch.nn.Parameter
    nothing: Tensor
    strides: list[int]


class Whole(OwnStates):
    """``optimizer.state`` has the class's states themselves, of what this rank owns."""

    def __init__(self, *of_all: Any, owners: Owners):
        super().__init__(*of_all)
        self._owners, self._masters = owners, KeptMasters(owners)
        self.of: dict[int, _WholeParameter] = {}  # what trains, by index, in the groups' order

    def check_added(self, group: Group) -> None:
        for shape in {tuple(p.shape) for p in group["params"]}:  # Muon takes matrices alone
            of_shape = torch.nn.Parameter(torch.empty(shape, device="meta"))
            # Some classes make their settings anew, such as a tensor of a rate.
            made = settings_of(self.code.made_for(of_shape, group).param_groups[0]).items()
            group.update((k, v) for k, v in made if getattr(v, "device", None) != _META)

    def arrange(self, groups: Sequence[Group], trained: Trained) -> None:
        for parameter, i, _ in trained if self._handle.across_meshes is not None else ():
            name = self._handle.engine.parameter_name(i)
            reject_cut(self.code.name, parameter, name, "Give it to an elementwise optimizer.")
        self.of = {i: self._lendable(p, i, g) for p, i, g in trained}
        self._owners.assign({i: self.of[i].parameter.numel() for i in sorted(self.of)})

    def _lendable(self, parameter: Tensor, i: int, g: int) -> _WholeParameter:
        if i in self.of:
            return self.of[i]._replace(g=g)
        engine = self._handle.engine
        nothing = engine.master_slice(i).new_zeros(()).expand(parameter.shape)
        whole = torch.nn.Parameter(nothing)
        return _WholeParameter(parameter, i, g, whole, nothing, engine.strides(i))

    def stats(self) -> dict[str, int]:
        return {"bytes_owner_masters": self._masters.nbytes}

    # The code of the class

    def update(self, optimizer: torch.optim.Optimizer, keywords: dict[str, Any]) -> None:
        """Run the class's step, after the ranks have agreed on it."""
        engine = self._handle.engine
        stepped = [i for i in sorted(self.of) if self.of[i].parameter.grad is not None]
        masters = {i: engine.master_slice(i) for i in stepped}
        gradients = {i: engine.grad_slice(i) for i in masters}
        step = functools.partial(self.code.step, optimizer, **keywords)
        run = _Run(optimizer, self, f"step() of {self.code.name}", step)
        try:
            out_of_date = self._masters.out_of_date(masters)
            for wave in self._owners.waves([*masters]):
                (whole_gradients,) = self._owners.to_owners(wave, gradients)()
                whole = self._masters.whole(wave, masters, out_of_date)
                run.run(whole, whole_gradients)
                parts = self._owners.from_owners(wave, whole, masters[wave.indices[0]])()
                self._masters.write(parts, masters)
            if not stepped:  # classes may count such steps
                run.run({}, {})
            optimizer.zero_core.shown.begun |= bool(stepped)
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
        if not self.of:
            return act()
        with_graph = torch.is_grad_enabled()

        def method() -> Any:
            with torch.set_grad_enabled(with_graph):
                return act()

        run = _Run(optimizer, self, f"{what} of {self.code.name}", method)
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
        masters = {i: handle.engine.current_master(i) for i in sorted(self.of)}
        with all_or_none(handle.groups, run.what) as lacking:
            lacking.update((i, b"") for i in masters if self.of[i].parameter.grad is None)
        graded = [i for i in masters if i not in lacking]
        parts = {i: self._gradient_of(self.of[i].parameter, i) for i in graded}
        out_of_date = self._masters.out_of_date(masters)
        for wave in owners.waves([*masters]):
            whole, gradients = self._masters.whole(wave, masters, out_of_date), {}
            if graded := [i for i in wave.indices if i in parts]:
                gradients = owners.to_owners(owners.wave(graded), parts, kept=True)()[0]
            run.run(whole, gradients, watched=WatchedWrites())
            written = run.found(_WRITTEN)
            if of_wave := [i for i in wave.indices if i in written]:
                like = masters[of_wave[0]]
                back = owners.from_owners(owners.wave(of_wave), whole, like, kept=True)()
                for i in of_wave:
                    handle.write_value(i, handle.as_parameter(back[i], i, self.of[i].parameter))

    def begun(self, parameter: Tensor, whole: Tensor, group: Group) -> dict[str, Any] | None:
        """The first state of a parameter that has none."""
        if first := self._first_states.pop(id(parameter), None):
            halves = {n: v for n, v in first.items() if getattr(v, "dtype", None) in _HALVES}
            return first | {name: value.float() for name, value in halves.items()}
        if not self.code.makes_states:
            return None
        made = self.code.made_for(torch.nn.Parameter(whole.data), group)  # from the values
        return made.state.get(made.param_groups[0]["params"][0])

    # Saving and loading

    def all_of(self, shown: ShownStates, trained: Trained) -> dict[Any, Any]:
        """The states of all ranks, whole. Collective."""
        mine = {i: dict(shown[p]) for p, i, _ in trained if p in shown and self._owners.owns(i)}
        everything = self._owners.gather(mine)
        whole = {p: everything[i] for p, i, _ in trained if i in everything}
        return defaultdict(dict, {**whole, **named_in(shown)})

    @torch.no_grad()
    def checked_write(self, saved: Sequence[SavedState]) -> Writer:
        self._check_there()
        loaded = {}
        for each in sorted(saved, key=attrgetter("i")):  # ranks may have other orders of groups
            # Values of the parameter's shape may be sharded: all ranks take part.
            cut = {k: v for k, v in each.values.items() if hasattr(v, "full_tensor")}
            values = {**each.values, **{k: cut[k].full_tensor() for k in sorted(cut, key=str)}}
            if values and self._owners.owns(each.i):
                loaded[each.parameter] = _loaded(values, self.of[each.i].nothing.device)

        def write(shown: ShownStates) -> None:
            for each in saved:  # others, which were taken out of their groups, keep their states
                self._first_states.pop(id(each.parameter), None)
                dict.pop(shown, each.parameter, None)
            shown.update(loaded)
            shown.begun = any(each.values for each in saved)

        return write

    def convert(self, optimizer: torch.optim.Optimizer) -> None:
        shown, lists = optimizer.zero_core.shown, [[] for _ in optimizer.param_groups]
        states: dict[Any, Any] = defaultdict(dict, named_in(shown))
        for each in self.of.values():
            if dict.get(shown, each.parameter):
                lists[each.g].append(each.whole)
                states[each.whole] = shown[each.parameter]
        with lent(optimizer, lists, states):
            optimizer.__setstate__({"state": states, "param_groups": optimizer.param_groups})

    def set_offloaded(self, shown: ShownStates, offloaded: bool) -> None:
        self._set_away(offloaded, shown)
        self._masters.forget()


class _Run:
    """One call of the class's code in waves. See note [What all owners share].

    Args:
        act: The code. It gets parameters by the optimizer's groups.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, states: Whole, what: str, act: Callable[[], Any]
    ):
        self._optimizer, self._states, self.what, self._act = optimizer, states, what, act
        self._core = optimizer.zero_core
        self._before, self._named = self._values(), named_in(self._core.shown)
        # What the first rank of the first wave has found: the indices of parameters that the code
        # has written to, results by how they are shown, and what has changed: groups by number,
        # after them the named states.
        self._found: dict[tuple[str, Any], bytes] = {}
        self._attributes: dict[str, Any] = {}  # as the last wave has left them

    def found(self, kind: str) -> dict[Any, bytes]:
        return {key: data for (its_kind, key), data in self._found.items() if its_kind == kind}

    def _values(self) -> list[dict[str, Any]]:
        """The settings of each group, and the attributes."""
        return [*map(settings_of, self._optimizer.param_groups), attributes_of(self._optimizer)]

    def _set_values(self, values: list[dict[str, Any]]) -> None:
        places = [*self._optimizer.param_groups, vars(self._optimizer)]
        for place, now, wanted in zip(places, self._values(), values, strict=True):
            for name in now.keys() - wanted.keys():
                del place[name]
            place.update(wanted)

    def run(self, masters: Values, gradients: Values, watched: WatchedWrites | None = None) -> None:
        """Run the code on one wave. Collective."""
        wholes = [each for i, each in self._states.of.items() if i in masters]
        for _, i, _, whole, _, strides in wholes:
            whole.data = masters[i].as_strided(whole.shape, strides)
            if i in gradients:
                whole.grad = gradients[i].as_strided(whole.shape, strides)
        try:
            with all_or_none(self._core.handle.groups, self.what) as found:
                result = self._run_here(wholes, found, watched)
                for _, i, _, whole, _, strides in wholes:
                    flat = masters[i]
                    if watched is not None and watched.moved(whole.data, flat):
                        found[_WRITTEN, i] = b""
                    if whole.data_ptr() != flat.data_ptr():  # another tensor was put there
                        flat.as_strided(whole.shape, strides).copy_(whole.data)
                if watched is not None:
                    self._note(result, found)
        finally:
            for _, _, _, whole, nothing, _ in wholes:
                whole.grad, whole.data = None, nothing
        self._found = {**found, **self._found}

    def _run_here(
        self,
        wholes: Sequence[_WholeParameter],
        found: dict[Any, bytes],
        watched: WatchedWrites | None,
    ) -> Any:
        optimizer, shown, groups = self._optimizer, self._core.shown, self._optimizer.param_groups
        lists: list[list[Tensor]] = [[] for _ in groups]
        states: dict[Any, Any] = defaultdict(dict, copy.deepcopy(self._named))
        had = []
        for p, _, g, whole, *_ in wholes:
            lists[g].append(whole)
            had.append(dict.get(shown, p))
            state = had[-1] or self._states.begun(p, whole, groups[g]) or had[-1]
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
            of_wholes = {id(key): state for key, state in dict.items(left[0])}
            for (p, _, _, whole, *_), before in zip(wholes, had, strict=True):
                state = of_wholes.get(id(whole))
                if state is None:
                    dict.pop(shown, p, None)
                elif state is not before:
                    dict.__setitem__(shown, p, state)
        self._attributes = now[-1]
        befores, afters = [*self._before[:-1], self._named], [*now[:-1], named_in(left[0])]
        for k, (before, after) in enumerate(zip(befores, afters, strict=True)):
            if (_CHANGED, k) not in self._found and text_of(before) != text_of(after):
                found[_CHANGED, k] = _packed(after)
        return result

    def keep(self) -> None:
        """Keep the values that the code has changed, on all ranks."""
        values = [*self._before[:-1], self._named]
        for k, data in self.found(_CHANGED).items():
            values[k] = _unpacked(data, self._core.handle.groups.device)
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
        results = self.found(_RESULT)
        if len(results) > 1:
            raise TypeError(
                f"zero_ext: {self.what} returns something else for some parameters: "
                f"{', '.join(sorted(results))}. Owners call it for their own parameters; "
                "what it has written is written."
            )
        ((text, data),) = results.items()
        device = self._core.handle.groups.device
        return self._optimizer if text == _ITSELF else _unpacked(data, device)


def _loaded(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies for an owner, each with memory of its own. Counts stay on the host."""
    own = {k: v.detach() for k, v in values.items() if isinstance(v, Tensor) and k != "step"}
    copies = {name: value.to(device, copy=True) for name, value in own.items()}
    return {k: copies[k] if k in copies else copy.deepcopy(v) for k, v in values.items()}


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
