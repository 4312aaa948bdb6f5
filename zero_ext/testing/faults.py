"""Fault: what goes wrong on one rank, and when."""

import importlib
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

_ACTIONS = ("raise", "kill", "delay")


class InjectedError(RuntimeError):
    """The error of ``Fault(action="raise")``."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on one rank.

    Args:
        rank: The rank.
        action: ``"raise"`` an ``InjectedError``, ``"kill"`` the process, or ``"delay"`` it.
        at: The full name of a function or method that Python code calls, such as
            ``"torch.Tensor.backward"`` or ``"my_trainer.Loop.step"``.
        call: Which call of it, on this rank, counted from 1. The fault comes before the call.
        seconds: Length of a delay.
    Raises:
        ValueError: an argument is wrong.
    """

    rank: int
    action: str
    at: str
    call: int = 1
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise ValueError(
                f"zero_ext: a fault's action is {self.action!r}: choose one of {_ACTIONS}."
            )
        if not isinstance(self.call, int) or self.call < 1:
            raise ValueError(f"zero_ext: a fault's call is {self.call!r}: count from 1.")
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"zero_ext: a fault's delay is {self.seconds!r} s. Give a finite one.")
        owner, name = _place(self.at)
        if not callable(getattr(owner, name, None)):
            raise ValueError(f"zero_ext: a fault's place '{self.at}' is not a function.")

    @contextmanager
    def injected(self):
        """Let it happen inside the context, in this process."""
        owner, name = _place(self.at)
        with mock.patch.object(owner, name, self._counted(getattr(owner, name))):
            yield

    def _counted(self, function: Callable) -> Callable:
        calls = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.call:
                self._happen()
            return function(*args, **kwargs)

        return counted

    def _happen(self) -> None:
        if self.action == "delay":
            time.sleep(self.seconds)
        elif self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise InjectedError(f"rank {self.rank}, before call {self.call} of {self.at}")


def _place(name: str) -> tuple[Any, str]:
    """The module or class that ``name`` is an attribute of, and the attribute."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:-1]:
            owner = getattr(owner, part, None)
        return owner, parts[-1]
    raise ValueError(f"zero_ext: a fault's place '{name}' is in no module that can be imported.")
