"""Whether an optimizer can be run on pieces of its parameters, found by trying."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_ext.optim.groups import settings_of


class _Piece(NamedTuple):
    parameter: int
    start: int
    stop: int
    shape: tuple[int, ...]


def _flat(parameter: int, start: int, stop: int) -> _Piece:
    return _Piece(parameter, start, stop, (stop - start,))


# The large one has a size from which optimizers quantise their states. In what follows, each tuple
# of pieces has an optimizer of its own.
_WHOLE = ((_Piece(0, 0, 12, (3, 4)), _Piece(1, 0, 8192, (64, 128))),)
_WHOLE_ALONE = tuple((piece,) for piece in _WHOLE[0])
# As on two ranks: uneven, and one piece is empty.
_SLICES = (
    (_flat(0, 0, 5), _flat(0, 5, 5), _flat(1, 0, 1088)),
    (_flat(0, 5, 12), _flat(1, 1088, 8192)),
)
_SMALL = (_WHOLE[0][:1],)
_SMALL_SLICES = tuple(pieces[:1] for pieces in _SLICES)
# Of the gradients, four steps each: an optimizer may clip them beyond a bound, or update its
# parameters in every fourth step only. Rising, so that earlier ones do not hide later ones.
_SCALES = (1e-4, 1.0, 1e4)
_STEPS_PER_SCALE = 4
# In place of every given rate: with a rate of 0, where warm-ups begin, nothing moves.
_LR = 0.1
_UPDATE = "update of one element"


class WholeParametersError(TypeError):
    """Not elementwise, but each parameter is updated by itself."""


_Make = Callable[[list[list[torch.nn.Parameter]]], torch.optim.Optimizer]


def kind_of(group: dict[str, Any]) -> str:
    """Equal for groups of which only one has to be tried.

    Rates and names are left out: each layer may have its own.
    """
    settings = {k: v for k, v in settings_of(group).items() if k not in ("lr", "name")}
    return repr((settings, isinstance(group.get("lr"), Tensor)))


def check(
    optimizer_class: type[torch.optim.Optimizer],
    kwargs: dict,
    group: dict[str, Any],
    keywords: dict[str, Any] | None = None,
) -> None:
    """Run twelve steps on two matrices and on their flat pieces, on the CPU.

    Args:
        group: With settings of its own, or empty. LARS, for example, is elementwise where weights
            do not decay.
        keywords: Of its ``step``.
    Raises:
        WholeParametersError: whole parameters, each with an optimizer of its own, become what they
            do with one optimizer.
        TypeError: it can be run in neither way: elements, states or settings differ.
        Exception: whatever the optimizer's constructor raises.
    """
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    if keywords:
        name += f" with step({', '.join(f'{k}={v!r}' for k, v in keywords.items())})"

    def make(groups: list[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
        settings = _for_trial(settings_of(group))
        made = [{**settings, "params": parameters} for parameters in groups]
        optimizer = optimizer_class(made, **_for_trial(kwargs))
        if keywords:
            optimizer.step = functools.partial(optimizer.step, **_for_trial(keywords))
        return optimizer

    # A mode, which every call passes: entered only where it changes something.
    default = torch.get_default_device().type
    with contextlib.nullcontext() if default == "cpu" else torch.device("cpu"):
        make([[torch.nn.Parameter(torch.zeros(3, 4))]])
        values = _values()
        whole = _run(make, _WHOLE, values, one_group=True)
        if isinstance(whole, Exception):
            raise TypeError(
                f"zero_ext: {name} cannot be sharded: the trial of its step() without a closure, "
                f"with dense gradients, raises {type(whole).__name__}: {whole}."
            ) from whole
        # Small ones first: for a long vector some classes make a matrix of its length squared.
        small, pieces = (_run(make, cut, values) for cut in (_SMALL, _SMALL_SLICES))
        slices = _run(make, _SLICES, values) if _difference(small, pieces) is None else pieces
        # An object of the class's own may hold matrices that are used after the trial's last step.
        if slices is not pieces and whole.comparable and _difference(whole, slices) is None:
            return
        what, reason = _reason(make, values, whole)
    if what is None:
        raise WholeParametersError(
            f"zero_ext: {name} is not elementwise with these settings: it needs whole parameters. "
            "Pass all groups to wrap() at once."
        )
    raise TypeError(
        f"zero_ext: {name} cannot be sharded: it is not elementwise, and its {what} depends on "
        f"{reason}. Use AdamW, Adam or SGD of zero_ext.optim, or wrap an optimizer that updates "
        "each parameter by itself."
    )


def _for_trial(given: dict[str, Any]) -> dict[str, Any]:
    """Copies, because optimizers write to tensors among their settings."""
    settings = {}
    for name, value in given.items():
        if name == "capturable":  # for other devices only
            continue
        settings[name] = _copy(value)
        if name == "lr" and isinstance(value, float | int):
            settings[name] = _LR
        elif name == "lr" and isinstance(value, Tensor):
            settings[name].fill_(_LR)
    return settings


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    return value


def _values() -> list[Tensor]:
    """For each parameter, the values that it begins with and the gradients of each step."""
    generator = torch.Generator().manual_seed(0)
    scales = [scale for scale in _SCALES for _ in range(_STEPS_PER_SCALE)]
    factors = torch.tensor([1.0, *scales])[:, None]
    return [
        torch.randn(len(factors), piece.stop, generator=generator) * factors for piece in _WHOLE[0]
    ]


class _Outcome:
    """What a run leaves: values for each element, and values that all pieces share.

    By what it is called in an error and the number of the parameter, in the order of the pieces.
    """

    def __init__(self):
        self.comparable = True
        self.elements: dict[tuple, list[Tensor]] = defaultdict(list)
        self.shared: dict[tuple, list[Any]] = defaultdict(list)

    def add_update(self, piece: _Piece, step: int, parameter: Tensor) -> None:
        self.elements[_UPDATE, piece.parameter, step].append(parameter.detach().flatten().clone())

    def add_states(
        self,
        pieces: Sequence[_Piece],
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        for piece, parameter in zip(pieces, parameters, strict=True):
            # Some optimizers make no state for a parameter without elements.
            state = optimizer.state.get(parameter, {}) if parameter.numel() else {}
            for name, value in state.items():
                key = f"state '{name}'", piece.parameter
                if isinstance(value, Tensor) and value.numel() == parameter.numel():
                    self.elements[key].append(_plain(value).flatten())
                else:
                    self.shared[key].append(value)
                    self.comparable &= _is_comparable(value)
        for name, value in optimizer.state.items():
            if not isinstance(name, Tensor):
                self.shared[f"state '{name}'", None].append(value)
        for group in optimizer.param_groups:
            for name, value in settings_of(group).items():
                self.shared[f"group setting '{name}'", None].append(value)


def _plain(value: Tensor) -> Tensor:
    """Of a quantised state that is a class of tensors, the values that it stands for."""
    return value.detach() if type(value) in (Tensor, torch.nn.Parameter) else value.dequantize()


def _run(
    make: _Make,
    optimizers: Sequence[Sequence[_Piece]],
    values: list[Tensor],
    *,
    one_group: bool = False,
) -> _Outcome | Exception:
    outcome = _Outcome()
    try:
        for pieces in optimizers:
            _run_one(make, pieces, values, outcome, one_group)
    except Exception as error:
        return error
    return outcome


def _run_one(
    make: _Make, pieces: Sequence[_Piece], values: list[Tensor], outcome: _Outcome, one_group: bool
) -> None:
    taken = [values[p.parameter][:, p.start : p.stop] for p in pieces]
    parts = [rows.reshape(len(rows), *p.shape) for p, rows in zip(pieces, taken, strict=True)]
    parameters = [torch.nn.Parameter(part[0].clone()) for part in parts]
    optimizer = make([parameters] if one_group else [[p] for p in parameters])
    begin_training(optimizer)
    for step in range(1, len(values[0])):
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part[step].clone()  # which an optimizer may write to
        optimizer.step()
        if step % _STEPS_PER_SCALE == 0:
            for piece, parameter in zip(pieces, parameters, strict=True):
                outcome.add_update(piece, step, parameter)
    outcome.add_states(pieces, parameters, optimizer)


def begin_training(optimizer: torch.optim.Optimizer) -> None:
    """Schedule-free optimizers step in no other mode."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()


def _difference(
    one: _Outcome | Exception,
    other: _Outcome | Exception,
    of_elements: Callable[[Tensor, bool], Tensor] = lambda value, _: value,
) -> str | None:
    """What differs by more than rounding, or None.

    Args:
        of_elements: Given the values for each element of one run, and whether it is ``one``,
            returns those to compare.
    """
    if isinstance(one, Exception) or isinstance(other, Exception):
        return _UPDATE
    for key in {**one.shared, **other.shared}:
        first, *rest = [*one.shared.get(key, ()), *other.shared.get(key, ())]
        in_both = key in one.shared and key in other.shared
        if not in_both or not all(_same(first, value) for value in rest):
            return key[0]
    for key in {**one.elements, **other.elements}:
        if key not in one.elements or key not in other.elements:
            return key[0]
        a, b = (torch.cat(run.elements[key]) for run in (one, other))
        if a.shape != b.shape or not _same(of_elements(a, True), of_elements(b, False)):
            return key[0]
    return None


def _is_comparable(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_is_comparable, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, Tensor | Number | str)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        # Kernels round the last elements of a tensor, which fill no vector register, in their way.
        return torch.equal(a, b) or torch.allclose(
            _plain(a).double(), _plain(b).double(), rtol=1e-4, atol=1e-6, equal_nan=True
        )
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or _same(torch.tensor(float(a)), torch.tensor(float(b)))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return type(a) is type(b)  # others need not be comparable


def _reason(make: _Make, values: list[Tensor], whole: _Outcome) -> tuple[str | None, str]:
    """What keeps whole parameters from having an optimizer each, and what it depends on."""
    for reason, cut in (("random numbers", _WHOLE), ("other parameters", _WHOLE_ALONE)):
        what = _difference(whole, _run(make, cut, values, one_group=cut is _WHOLE))
        if what is not None:
            return what, reason
    return None, ""
