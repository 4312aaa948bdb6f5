"""Methods of an optimizer whose parameters lie whole at owners, and what their optimizers share.

Note [What all owners share]
One process has one object, and here each parameter has one. What the class keeps in the settings of
a group or under a name (``state["k"]``), such as a count of steps, must be one for all of them. So
each gets copies of the values from before the call, and the values that the first one has after it
become those of all ranks, with the message that says whether the call has raised. The trial of
``wrap`` rejects classes where these values depend on which parameters a rank has.
"""

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zero_ext.engine.registry import find
from zero_ext.optim.groups import Group, named_in, replace_named, settings_of
from zero_ext.optim.lending import WatchedWrites, moved
from zero_ext.optim.owners import Values, Wave
from zero_ext.optim.shared_states import shown
from zero_ext.ranks.agreement import all_or_none, calling

if TYPE_CHECKING:
    from zero_ext.optim.owned_optimizer import OwnedOptimizer

# Keys of what ranks tell each other.
_NAMED, _WRITTEN, _RESULT = "named", "written", "result"
_ITSELF = "the optimizer"


class SharedValues:
    """Those of one call. See note [What all owners share].

    Owner: the call. It begins with ``give``, and ends with ``adopt``.
    """

    def __init__(self, optimizer: "OwnedOptimizer"):
        self._optimizer = optimizer
        self._groups = {id(group): k for k, group in enumerate(optimizer.param_groups)}
        self._looked_for = {*self._groups.values(), _NAMED}
        self._looked_at: set[int | str] = set()  # by group, or ``_NAMED``
        self._taken: dict[int | str, dict[Any, Any]] = {}
        self._of_others: dict[int | str, bytes] = {}
        self._found: dict[Any, bytes] = {}

    def give(self, inner: torch.optim.Optimizer, group: Group) -> None:
        inner.param_groups[0].update(copy.deepcopy(settings_of(group)))
        replace_named(inner.state, copy.deepcopy(named_in(self._optimizer.state)))

    def take(self, inner: torch.optim.Optimizer, group: Group) -> None:
        """Note what has changed, once for each group."""
        place = self._groups[id(group)]
        for key, before, now in (
            (place, settings_of(group), settings_of(inner.param_groups[0])),
            (_NAMED, named_in(self._optimizer.state), named_in(inner.state)),
        ):
            if key in self._looked_at:
                continue
            self._looked_at.add(key)
            if shown(before) != shown(now):
                self._taken[key], self._found[key] = now, _packed(now)

    @contextlib.contextmanager
    def agreed(self, what: str) -> Iterator[dict[Any, bytes]]:
        """As ``all_or_none``."""
        self._found = {}
        with all_or_none(self._optimizer._handle.groups, what) as found:
            try:
                yield found
            finally:
                found.update(self._found)
        for key in self._looked_for & found.keys():
            self._of_others.setdefault(key, found[key])

    def adopt(self) -> None:
        optimizer = self._optimizer
        device = optimizer._handle.groups.device
        others = {
            k: _unpacked(v, device) for k, v in self._of_others.items() if k not in self._taken
        }
        for key, now in (others | self._taken).items():
            if key == _NAMED:
                replace_named(optimizer.state, now)
            else:
                optimizer.param_groups[key].update(now)


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


def method_of(optimizer: "OwnedOptimizer", name: str) -> Callable[..., Any]:
    """Method ``name`` of the wrapped class. Collective, whatever it does.

    Each parameter's owner calls it on the whole parameter, with its gradient where all ranks have
    one. What it writes to parameters is written on all ranks.

    Raises:
        TypeError: it returns a context manager, or something else for each parameter.
    """

    @functools.wraps(getattr(optimizer._probe, name))
    def call(*args: Any, **kwargs: Any) -> Any:
        with_graph = torch.is_grad_enabled()

        def act(inner: torch.optim.Optimizer) -> Any:
            with torch.set_grad_enabled(with_graph):
                return getattr(inner, name)(*args, **kwargs)

        with calling(f"{name}()"), torch.no_grad():
            return _Call(optimizer, name, act).run()

    return call


class _Call:
    def __init__(self, optimizer: "OwnedOptimizer", name: str, act: Callable[..., Any]):
        self._optimizer, self._name, self._act = optimizer, name, act
        self._what = f"{name}() of {optimizer._class_name}"
        self._shared = SharedValues(optimizer)
        self._results: dict[str, Any] = {}  # by how they are shown

    def run(self) -> Any:
        optimizer, handle = self._optimizer, self._optimizer._handle
        optimizer._begin_method(f"{self._name}()")
        groups = optimizer._find_owners()
        if not groups:
            return self._act(optimizer._probe)
        masters = {p: handle.engine.current_master(find(p)[1]) for p in groups}
        with all_or_none(handle.groups, self._what) as lacking:
            lacking.update((find(p)[1], b"") for p in groups if p.grad is None)
        graded = {p for p in groups if find(p)[1] not in lacking}
        try:
            out_of_date = optimizer._masters.out_of_date(masters)
            for wave in optimizer._owners.waves([*groups]):
                whole = optimizer._masters.whole(wave, masters, out_of_date)
                gradients = self._whole_gradients(
                    [p for p in wave.parameters if p in graded], masters
                )
                self._run_wave(wave, groups, whole, gradients)
        except BaseException:
            optimizer._masters.forget()
            raise
        self._shared.adopt()
        return self._result()

    def _whole_gradients(self, parameters: list[Tensor], masters: Values) -> Values:
        if not parameters:
            return {}
        owners, part_of = self._optimizer._owners, self._optimizer._gradient_of
        parts = {p: part_of(p, masters[p]) for p in parameters}
        return owners.to_owners(owners.wave(parameters), parts, kept=True)()[0]

    def _run_wave(
        self, wave: Wave, groups: dict[Tensor, Group], whole: Values, gradients: Values
    ) -> None:
        """And write on all ranks what the method has written to parameters."""
        optimizer, handle = self._optimizer, self._optimizer._handle
        with self._shared.agreed(self._what) as found:
            for p, master in whole.items():
                values, watched = optimizer._shaped(master, p), WatchedWrites()
                lent = optimizer._lent(p, groups[p], values, gradients.get(p), self._shared)
                with lent as (parameter, inner):
                    with watched:
                        result = self._act(inner)
                    if moved(watched, parameter.data, values):
                        found[_WRITTEN, find(p)[1]] = b""
                        if parameter.data_ptr() != values.data_ptr():
                            values.copy_(parameter.data)
                    self._note(result, inner, found)
        for key, data in found.items():
            if isinstance(key, tuple) and key[0] == _RESULT:
                self._results[key[1]] = data
        written = [p for p in wave.parameters if (_WRITTEN, find(p)[1]) in found]
        if written:
            owners, like = optimizer._owners, handle.engine.master_slice(find(written[0])[1])
            parts = owners.from_owners(owners.wave(written), whole, like, kept=True)()
            for p in written:
                i = find(p)[1]
                handle.write_value(i, handle.as_parameter(parts[p], i, p))

    def _note(self, result: Any, inner: torch.optim.Optimizer, found: dict[Any, bytes]) -> None:
        if isinstance(result, contextlib.AbstractContextManager):
            raise TypeError(
                f"{self._name}() returns a context manager, which is not available where owners "
                "update whole parameters. Call methods before and after the block instead."
            )
        text = _ITSELF if result is inner else shown(result)
        if (_RESULT, text) not in found:
            found[_RESULT, text] = _packed(None if result is inner else result)

    def _result(self) -> Any:
        if len(self._results) > 1:
            raise TypeError(
                f"zero_ext: {self._what} returns something else for each parameter: "
                f"{', '.join(sorted(self._results))}. Owners call it for each parameter by itself; "
                "what it has written is written."
            )
        ((text, data),) = self._results.items()
        device = self._optimizer._handle.groups.device
        return self._optimizer if text == _ITSELF else _unpacked(data, device)
