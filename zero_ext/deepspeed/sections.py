"""Section: one object of a configuration. What is wrong in all of them is told at once."""

import math
from collections.abc import Iterator
from typing import Any

from zero_ext._warnings import warn
from zero_ext.deepspeed import keys


class Problems:
    """What is wrong with a configuration, in the order of the file.

    A reader that meets a wrong value records it and goes on with the default.
    """

    def __init__(self, config: dict[str, Any], strict: bool):
        self.strict = strict
        self._places = {path: place for place, path in enumerate(_paths(config))}
        self._found: list[tuple[int, str]] = []
        self.unknown: list[str] = []  # which DeepSpeed ignores

    def add(self, path: str, text: str) -> None:
        place = self._places.get(path)
        while place is None and "." in path:
            path = path.rpartition(".")[0]
            place = self._places.get(path)
        self._found.append((len(self._places) if place is None else place, text))

    def __bool__(self) -> bool:
        return bool(self._found)

    def finish(self) -> None:
        """Raise if anything was recorded. Warn of keys that DeepSpeed ignores."""
        texts = [text for _, text in sorted(self._found, key=lambda each: each[0])]
        if texts:  # a misspelt section may be the cause of the errors
            texts = [*self.unknown, *texts]
        if len(texts) == 1:
            raise ValueError(f"zero_ext: {texts[0]}")
        if texts:
            lines = "".join(f"\n  - {text}" for text in texts)
            raise ValueError(f"zero_ext: the configuration has {len(texts)} errors:{lines}")
        for text in self.unknown:
            warn(f"zero_ext: {text}")


def _paths(config: dict[str, Any], section: str = "") -> Iterator[str]:
    for key, value in config.items():
        path = keys.path_of(section, str(key))
        yield path
        if isinstance(value, dict):
            yield from _paths(value, path)


class Section:
    """Each setting is taken once; ``finish`` judges the others."""

    def __init__(self, path: str, values: Any, problems: Problems):
        self.path = path
        self.problems = problems
        if not isinstance(values, dict):
            problems.add(path, f"config '{path}' is {values!r}, not an object. Give it as {{…}}.")
            values = {}
        self._values = dict(values)
        for key in list(self._values):
            self._rename(key)

    def _rename(self, key: str) -> None:
        """Most keys of stage 3 may be written without their prefix."""
        longer = f"stage3_{key}"
        names = keys.known(self.path)
        if key not in names and longer in names:
            if longer in self._values:
                self.reject(key, self._values[key], f", and '{longer}' is given too. Give one.")
            self._values.setdefault(longer, self._values.pop(key))

    def name(self, key: str) -> str:
        return keys.path_of(self.path, key)

    def reject(self, key: str, value: Any, problem: str) -> None:
        """Record that the value of ``key`` is wrong, with the remedy."""
        self.problems.add(self.name(key), f"config '{self.name(key)}' is {value!r}{problem}")

    def has(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, default: Any) -> Any:
        value = self._values.pop(key, default)
        if any(isinstance(each, str) and each == "auto" for each in elements(value)):
            self.reject(key, value, ", which an integration is to fill in before. Give its value.")
            return default
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            self.reject(key, value, ", not true or false. Give one of them.")
            return default
        return value

    def text(self, key: str, choices: list[str] | None = None) -> str | None:
        value = self.take(key, None)
        if value is not None and not isinstance(value, str):
            self.reject(key, value, ", not a name. Give it in quotes.")
            return None
        if value is not None and choices is not None and value.lower() not in choices:
            self.reject(key, value, f": choose {' or '.join(repr(each) for each in choices)}.")
            return None
        return value

    def number(self, key: str, default: float, most: float = math.inf) -> float:
        value = self.take(key, default)
        value = default if value is None else value
        if not is_number(value) or not 0 <= value <= most or math.isinf(value):
            allowed = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
            self.reject(key, value, f", not a number {allowed}. Give one.")
            return default
        return value

    def count(self, key: str, default: int | None) -> int | None:
        """A whole number, which may be written as 1000.0."""
        value = self.take(key, default)
        if value is None:
            return default
        if not is_number(value) or not 1 <= value < math.inf or value % 1 != 0:
            self.reject(key, value, ", not a count of at least 1. Give one.")
            return default
        return int(value)

    def size(self, key: str) -> float | None:
        """A number of elements. None if it is left out or ``"auto"``: then the default holds."""
        if self._values.get(key) == "auto":
            del self._values[key]
        return self.number(key, -1) if self._values.get(key) is not None else None

    def names(self, key: str) -> tuple[str, ...] | None:
        """A list of names. None if it is left out or ``"auto"``: then the default holds."""
        value = self._values.pop(key, None)
        if value is None or value == "auto":
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self.reject(key, value, ", not a list of names. Give one.")
            return None
        return tuple(value)

    def section(self, key: str) -> "Section":
        return Section(self.name(key), self.take(key, None) or {}, self.problems)

    def rest(self) -> dict[str, Any]:
        """All that was not taken, which is then taken."""
        return {key: self.take(key, None) for key in list(self._values)}

    def forget(self) -> None:
        """Drop the known settings of a section that is not enabled, whatever their values."""
        for key in keys.known(self.path):
            self._values.pop(key, None)

    def finish(self) -> None:
        """Judge every setting that was not taken."""
        absent = keys.ABSENT.get(self.path, {})
        for key, value in self._values.items():
            if key in absent:
                if not is_off(value) and value not in (absent[key] or (None, False)):
                    self.reject(key, value, ": this library has no such feature. Switch it off.")
            elif key not in keys.ignored(self.path):
                self._unknown(key, value)

    def _unknown(self, key: str, value: Any) -> None:
        near = keys.nearest(self.path, key)
        meant = f"Did you mean '{near}'?" if near else "Correct its name, or leave it out."
        text = f": there is no such setting. {meant}"
        if self.path or self.problems.strict:
            self.reject(key, value, text)
        else:
            self.problems.unknown.append(f"config '{key}' is ignored{text}")


def elements(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_quoted_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def is_off(value: Any) -> bool:
    """Whether ``value`` is the section of a feature that is switched off."""
    if not isinstance(value, dict):
        return False
    off = [is_off(each) if isinstance(each, dict) else not each for each in value.values()]
    return value.get("enabled") is False or all(off)
