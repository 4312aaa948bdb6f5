"""The ranks' verdict about a step: whether their settings agree, and whether it is skipped.

Note [States that all parameters share]
Of states that are not cut with the parameters, such as a count of steps, one rank's are saved. So
they must be equal on all ranks. The first step after they appeared compares them with the settings,
without a message of its own.
"""

import hashlib
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext._warnings import warn
from zero_ext.engine.handle import Handle
from zero_ext.optim.groups import Group, Trained
from zero_ext.optim.scaler import LossScaler
from zero_ext.ranks.agreement import check_same_on_all_ranks

# So many steps skipped in a row raise: the training does nothing any more.
MAX_SKIPPED_IN_A_ROW = 1000
# After so many the cause is not one batch.
DIVERGED_IN_A_ROW = 4
# These choose between torch's implementations and change no value of an update.
_SWITCHES = frozenset(("foreach", "fused", "capturable", "differentiable"))


class SkippedSteps:
    """The verdicts of an optimizer's steps, as the host learns of them.

    On a device the update is queued before the host knows whether the device will skip it.
    """

    def __init__(self, handle: Handle) -> None:
        self.count = 0
        self._handle = handle
        self._in_a_row = 0
        self._unreported: list[_C.StepVerdict] = []  # in the order of the steps

    def add(self, verdict: _C.StepVerdict) -> None:
        self._unreported.append(verdict)

    def report(
        self, trained: Trained, raises: bool, scaler: LossScaler | None, *, wait: bool
    ) -> None:
        """Warn or raise for the skipped steps among those that the host knows by now.

        Args:
            wait: For the device, until all are known.
        """
        while self._unreported and (wait or self._unreported[0].is_settled):
            verdict = self._unreported.pop(0)
            if not self._handle.knows_on_host:
                self._handle.engine.settle(verdict)  # reads it from the device
            if not verdict.nonfinite:
                self._in_a_row = 0
            elif scaler is not None and scaler.expects_overflow:
                self.count += 1
            else:
                self._report_one(verdict, trained, raises)

    def _report_one(self, verdict: _C.StepVerdict, trained: Trained, raises: bool) -> None:
        if verdict.rank < 0:
            place = "on some rank"
        else:
            place = f"first in '{verdict.parameter}' on rank {verdict.rank}"
            if verdict.micro_batch >= 0:
                place += f", micro-batch {verdict.micro_batch}"
        message = f"{self._handle.groups.where}gradients hold NaN or Inf, {place}"
        if raises:
            raise RuntimeError(
                f"{message}. Nothing was updated. To skip such steps, pass nonfinite='skip'."
            )
        self.count += 1
        self._in_a_row += 1
        said = f"step skipped on all ranks ({self.count} so far)"
        if self._in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RuntimeError(
                f"{message}; {said}, {self._in_a_row} in a row. The training does nothing "
                "any more. Load a checkpoint from before."
            )
        # In a row: at the first, second, fourth, eighth …, which all ranks count alike.
        if self._in_a_row & (self._in_a_row - 1):
            return
        bad = _nonfinite_parameter(self._handle.engine, trained)
        if self._in_a_row >= DIVERGED_IN_A_ROW:
            message += (
                f"; {self._in_a_row} steps in a row were skipped: the run has diverged. Lower the "
                "learning rate, and load a checkpoint from before"
            )
        elif bad is not None:
            message += (
                f"; the parameter '{bad}' itself holds NaN or Inf, and skipping steps cannot mend "
                "it: load a checkpoint from before"
            )
        if bad is not None or self._in_a_row == 1 or self._handle.groups.rank == 0:
            warn(f"{message}; {said}.")


def _nonfinite_parameter(engine: _C.Engine, trained: Trained) -> str | None:
    """The name of the first parameter that is not finite in this rank's part: its master, or what
    was written to it since the last step."""
    for _, i, _ in trained:
        if not engine.current_master(i).isfinite().all():
            return engine.parameter_name(i)
    return None


class StepSettings:
    """The settings that an update multiplies with, and the shared states that have appeared since
    the ranks last agreed, with their first values. Each step compares a hash of them between ranks.

    See note [States that all parameters share].
    """

    def __init__(self, handle: Handle, defaults: dict[str, Any]):
        self._handle = handle
        self._names = [name for name in defaults if name not in _SWITCHES]
        self._appeared: dict[tuple[int, str], str] = {}  # by parameter (-1: none) and by name

    def add_state(self, i: int, name: Any, owner: str | None, value: Any) -> None:
        """``value`` has appeared as state ``name`` of parameter i, whose name is ``owner``."""
        of_owner = "" if owner is None else f" of '{owner}'"
        self._appeared[i, str(name)] = f"'{name}'{of_owner}: {text_of(value)}"

    @property
    def new_states(self) -> list[str]:
        """Texts that are equal on ranks where the same states have appeared with equal values."""
        return [self._appeared[key] for key in sorted(self._appeared)]

    def agreed(self) -> None:
        self._appeared.clear()

    def values(self, groups: Sequence[Group], of_step: dict[str, Any]) -> list[Any]:
        """Numbers, tuples of them, or strings of a step, that must be equal on all ranks."""
        keywords = [v if isinstance(v, str) else _number_of(v) for v in of_step.values()]
        return keywords + [_number_of(group.get(name)) for group in groups for name in self._names]

    def hash(self, groups: Sequence[Group], of_step: dict[str, Any]) -> int:
        """Equal on ranks where all settings are equal. The engine adds its divide factor.
        ``of_step``: by how an error shows them."""
        if self._handle.groups.world == 1 and self._handle.across_meshes is None:
            return 0
        digest = hashlib.sha256("\n".join(self.new_states).encode()).digest()
        values = self.values(groups, of_step)
        numbers = (tuple(map(ord, v)) if isinstance(v, str) else v for v in values)
        return hash((*numbers, int.from_bytes(digest[:8], "little")))

    def check_same(self, groups: Sequence[Group], of_step: dict[str, Any]) -> None:
        """Raise for the first setting or state that differs. Collective."""
        of_step = {"gradient divide factor={}": self._handle.engine.divide_factor, **of_step}
        of_groups = (f"{n}={{}} of group {g}" for g in range(len(groups)) for n in self._names)
        labels = [*of_step, *of_groups]
        numbers = self.values(groups, of_step)
        check_same_on_all_ranks(
            self._handle.groups,
            [label.format(number) for label, number in zip(labels, numbers, strict=True)],
            "the settings of the optimizers",
            remedy="Give every rank the same, and repeat step(): nothing was updated.",
        )
        check_same_on_all_ranks(
            self._handle.groups,
            self.new_states,
            "states of the wrapped optimizer that have no value for each element",
            remedy="Such a state cannot be saved, because every rank would load one rank's. Use "
            "stage 0, where every rank has all elements.",
        )


def _number_of(setting: Any) -> Any:
    """A number, or a tuple of them, with the same hash on every rank; 0 where it is no number."""
    if isinstance(setting, Number):  # bool is one, and so are numpy's
        return setting if setting == setting else 0  # every NaN has another hash
    if isinstance(setting, tuple | list):
        return tuple(map(_number_of, setting))
    if isinstance(setting, Tensor) and setting.device.type == "cpu" and setting.numel() == 1:
        return _number_of(setting.item())  # one on a device would have to be waited for
    return 0


@torch.no_grad()
def text_of(value: Any) -> str:
    """Equal texts for equal values, on every rank."""
    if isinstance(value, Tensor):
        kind = f"{value.dtype} {tuple(value.shape)}"
        if type(value) not in (Tensor, torch.nn.Parameter):  # whose values may have any form
            return f"{type(value).__name__} {kind}"
        return f"{value.item()} {kind}" if value.numel() == 1 else f"{kind} {_digest(value)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {text_of(value[key])}' for key in value)}}}"
    if value is None or isinstance(value, Number | str):
        return repr(value)
    return type(value).__name__  # others need not be comparable


def _digest(value: Tensor) -> str:
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    return f"with digest {hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()[:8]}"
