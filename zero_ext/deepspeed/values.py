"""Values: a configuration, read by the table of keys. All of its errors are one exception."""

from collections.abc import Iterator
from typing import Any

from zero_ext._warnings import warn
from zero_ext.deepspeed.keys import KEYS, nearest, path_of
from zero_ext.deepspeed.readers import Reader, is_auto


class Values:
    """The values of a configuration, by path: ``values["fp16.loss_scale"]``.

    A key that is left out or wrong has its default. So have those of a section that is not enabled.

    Attributes:
        wrong: The paths that have an error.
    """

    def __init__(self, config: dict[str, Any], strict: bool):
        self.wrong: set[str] = set()
        self._strict = strict
        self._places = {path: place for place, path in enumerate(_paths(config))}
        self._errors: list[tuple[int, str]] = []
        self._unknown: list[str] = []  # which DeepSpeed ignores
        self._read: dict[str, Any] = {}
        config = dict(config)
        if older := config.pop("bfloat16", None):
            config["bf16"] = config.get("bf16") or older
        self._read_section("", config)

    def __getitem__(self, path: str) -> Any:
        section, _, key = path.rpartition(".")
        return self._read.get(path, KEYS[section][key].reader.default)

    def __contains__(self, path: str) -> bool:
        return path in self._read

    def _read_section(self, section: str, given: dict[str, Any]) -> None:
        keys = KEYS[section]
        enabled = "enabled" not in keys or given.get("enabled") is True
        for name, value in given.items():
            key, longer = name, f"stage3_{name}"
            if name not in keys and longer in keys:  # keys of stage 3 may be written without it
                if longer in given:
                    problem = f", and '{longer}' is given too. Give one."
                    self.reject(path_of(section, name), value, problem)
                    continue
                key = longer
            path = path_of(section, key)
            if key not in keys:
                self._reject_unknown(section, key, value)
            elif enabled or key == "enabled":
                self._take(path, value, keys[key].reader)
                if path in KEYS:
                    self._read_section(path, self[path])

    def _take(self, path: str, value: Any, reader: Reader) -> None:
        if value in reader.left_out:
            self._read[path] = reader.default
        elif reader.fits(value):
            self._read[path] = reader.becomes(value)
        else:
            self.reject(path, value, reader.problem)

    def _reject_unknown(self, section: str, key: str, value: Any) -> None:
        near = nearest(section, key)
        meant = f"Did you mean '{near}'?" if near else "Correct its name, or leave it out."
        problem = f": there is no such setting. {meant}"
        if section or self._strict:
            self.reject(path_of(section, key), value, problem)
        else:
            self._unknown.append(f"config '{key}' is ignored{problem}")

    def reject(self, path: str, value: Any, problem: str) -> None:
        """Record that ``value`` is wrong, with the remedy."""
        if is_auto(value):
            problem = ", which an integration is to fill in before. Give its value."
        self.add(path, f"config '{path}' is {value!r}{problem}")

    def add(self, path: str, error: str) -> None:
        """Record an error at the place of ``path`` in the file, or of a section around it."""
        self.wrong.add(path)
        around = path
        while around not in self._places and "." in around:
            around = around.rpartition(".")[0]
        self._errors.append((self._places.get(around, len(self._places)), error))

    def finish(self) -> None:
        """Raise what was recorded. Warn of keys that DeepSpeed ignores."""
        texts = [text for _, text in sorted(self._errors, key=lambda each: each[0])]
        if texts:  # a misspelt section may be the cause of the errors
            texts = [*self._unknown, *texts]
        if len(texts) == 1:
            raise ValueError(f"zero_ext: {texts[0]}")
        if texts:
            lines = "".join(f"\n  - {text}" for text in texts)
            raise ValueError(f"zero_ext: the configuration has {len(texts)} errors:{lines}")
        for text in self._unknown:
            warn(f"zero_ext: {text}")


def _paths(config: dict[str, Any], section: str = "") -> Iterator[str]:
    for key, value in config.items():
        path = path_of(section, str(key))
        yield path
        if isinstance(value, dict):
            yield from _paths(value, path)
