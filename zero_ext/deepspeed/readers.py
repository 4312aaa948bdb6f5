"""Readers: what a value of a DeepSpeed configuration may be, and what it becomes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_NAMES = {
    torch.float16: ("fp16", "float16", "half", "torch.float16"),
    torch.bfloat16: ("bf16", "bfloat16", "torch.bfloat16", "bfp16"),
    torch.float32: ("fp32", "float32", "float", "torch.float32"),
}
_DTYPES = {name: dtype for dtype, names in _NAMES.items() for name in names}


class Reader(NamedTuple):
    """
    Args:
        fits: Whether a value is right.
        problem: What is wrong with another one, after "config 'key' is value", and the remedy.
        default: What a key that is left out means.
        becomes: What a value that fits becomes.
        left_out: Values that mean the same as a key that is left out.
    """

    fits: Callable[[Any], bool]
    problem: str
    default: Any = None
    becomes: Callable[[Any], Any] = lambda value: value
    left_out: tuple = (None,)


def elements(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def is_auto(value: Any) -> bool:
    return any(isinstance(each, str) and each == "auto" for each in elements(value))


def name_of(dtype: torch.dtype) -> str:
    return _NAMES[dtype][0]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "auto"


def _is_off(value: Any) -> bool:
    """Whether ``value`` is the section of a feature that is switched off."""
    if not isinstance(value, dict):
        return False
    off = [_is_off(each) if isinstance(each, dict) else not each for each in value.values()]
    return value.get("enabled") is False or all(off)


def flag(default: bool | None) -> Reader:
    problem = ", not true or false. Give one of them."
    return Reader(lambda value: isinstance(value, bool), problem, default, left_out=())


def number(default: float | None, most: float = math.inf, left_out: tuple = (None,)) -> Reader:
    allowed = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
    return Reader(
        lambda value: _is_number(value) and 0 <= value <= most and value != math.inf,
        f", not a number {allowed}. Give one.",
        default,
        left_out=left_out,
    )


def count(default: int | None) -> Reader:
    """A whole number, which may be written as 1000.0."""
    return Reader(
        lambda value: _is_number(value) and 1 <= value < math.inf and value % 1 == 0,
        ", not a count of at least 1. Give one.",
        default,
        int,
    )


def choice(meanings: dict[str, Any], default: Any = None, problem: str | None = None) -> Reader:
    """Read a name, in small letters or capitals, as its meaning."""
    return Reader(
        lambda value: _is_text(value) and value.lower() in meanings,
        problem or f": choose {' or '.join(repr(each) for each in meanings)}.",
        default,
        lambda value: meanings[value.lower()],
    )


def dtype(problem: str, *allowed: torch.dtype) -> Reader:
    return choice({k: v for k, v in _DTYPES.items() if v in allowed}, problem=problem)


def off(accepted: tuple) -> Reader:
    """A feature that this library lacks, with the values that switch it off."""
    return Reader(
        lambda value: _is_off(value) or value in (accepted or (None, False)),
        ": this library has no such feature. Switch it off.",
        left_out=(),
    )


ANY = Reader(lambda value: True, "")
TEXT = Reader(_is_text, ", not a name. Give it in quotes.")
NAMES = Reader(
    lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    ", not a list of names. Give one.",
    becomes=tuple,
    left_out=(None, "auto"),
)
OBJECT = Reader(
    lambda value: isinstance(value, dict),
    ", not an object. Give it as {…}.",
    default={},
    left_out=(None, False, 0, "", []),
)
STAGE = Reader(
    lambda value: not isinstance(value, bool) and value in (0, 1, 2, 3),
    ", not 0 to 3. Choose one of them.",
    default=0,
    becomes=int,
    left_out=(),
)
