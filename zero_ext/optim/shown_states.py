"""ShownStates: ``optimizer.state``, whose views are made when they are asked for."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Later(NamedTuple):
    """Stands for a parameter's state until it is asked for."""

    make: Callable[[Tensor, int], dict[str, Tensor]]
    i: int


class ShownStates(defaultdict):
    """By parameter, or by name what an optimizer keeps for no parameter.

    Who reads the state of one parameter gets its views made. Who reads all of them, to iterate,
    compare, copy or pickle them, gets all views made.
    """

    def show_later(
        self, parameter: Tensor, make: Callable[[Tensor, int], dict[str, Tensor]], i: int
    ) -> None:
        """``make(parameter, i)`` is the state of ``parameter``, which has none yet."""
        super().__setitem__(parameter, _Later(make, i))

    def show_anew(
        self,
        parameter: Tensor,
        names: Iterable[str],
        make: Callable[[Tensor, int], dict[str, Tensor]],
        i: int,
    ) -> None:
        """``make(parameter, i)`` shows ``names`` from now on, beside what else is there.

        A state that was emptied stays empty.
        """
        shown = super().get(parameter)
        if shown and type(shown) is not _Later:
            others = {name: value for name, value in shown.items() if name not in names}
            super().__setitem__(parameter, _Later(lambda *which: {**others, **make(*which)}, i))

    def __getitem__(self, key: Hashable) -> Any:
        value = super().__getitem__(key)
        if type(value) is _Later:
            with torch.inference_mode(False), torch.no_grad():
                value = value.make(key, value.i)
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
