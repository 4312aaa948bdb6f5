"""States of a wrapped optimizer that are not cut with the parameters, such as a count of steps.

What is saved of them is one rank's. So they must be equal on all ranks, which the first step after
they appeared compares, without a message of its own.
"""

import hashlib
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from zero_ext.ranks.agreement import check_same_on_all_ranks
from zero_ext.ranks.groups import Groups


class SharedStates:
    """The states that appeared since the ranks last agreed, as they were when they appeared.

    Owner: the settings of the optimizer's steps.
    """

    def __init__(self) -> None:
        self._appeared: dict[tuple[int, str], str] = {}  # by parameter (-1: none) and by name

    def add(self, i: int, name: Any, owner: str | None, value: Any) -> None:
        """``value`` has appeared as state ``name`` of parameter i, whose name is ``owner``."""
        of_owner = "" if owner is None else f" of '{owner}'"
        self._appeared[i, str(name)] = f"'{name}'{of_owner}: {shown(value)}"

    def hash(self) -> int:
        """Equal on ranks where the same states have appeared with the same values."""
        if not self._appeared:
            return 0
        digest = hashlib.sha256("\n".join(self._described()).encode()).digest()
        return int.from_bytes(digest[:8], signed=True)

    def agreed(self) -> None:
        self._appeared.clear()

    def check_same(self, groups: Groups) -> None:
        """Raise for the first one that differs, or is on some ranks only. Collective."""
        check_same_on_all_ranks(
            groups,
            self._described(),
            "states of the wrapped optimizer that have no value for each element",
            remedy="Such a state cannot be saved, because every rank would load one rank's. Use "
            "stage 0, where every rank has all elements.",
        )

    def _described(self) -> list[str]:
        return [self._appeared[key] for key in sorted(self._appeared)]


@torch.no_grad()
def shown(value: Any) -> str:
    """Equal texts for equal values, on every rank."""
    if isinstance(value, Tensor):
        kind = f"{value.dtype} {tuple(value.shape)}"
        if type(value) not in (Tensor, torch.nn.Parameter):  # whose values may have any form
            return f"{type(value).__name__} {kind}"
        return f"{value.item()} {kind}" if value.numel() == 1 else f"{kind} {_digest(value)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {shown(value[key])}' for key in value)}}}"
    if value is None or isinstance(value, Number | str):
        return repr(value)
    return type(value).__name__  # others need not be comparable


def _digest(value: Tensor) -> str:
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    return f"with digest {hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()[:8]}"
