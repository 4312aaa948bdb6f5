"""What the ranks decide about a step: whether their settings agree, and whether it is skipped."""

from numbers import Number
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zero_ext import _C
from zero_ext._warnings import warn
from zero_ext.optim.shared_states import SharedStates
from zero_ext.ranks.agreement import check_same_on_all_ranks

if TYPE_CHECKING:
    from zero_ext.optim.sharded_optimizer import ShardedOptimizer

# So many steps skipped in a row raise: the training does nothing any more.
MAX_SKIPPED_IN_A_ROW = 1000
# After so many the cause is not one batch.
DIVERGED_IN_A_ROW = 4
# These choose between torch's implementations and change no value of an update.
_SWITCHES = frozenset(("foreach", "fused", "capturable", "differentiable"))


class SkippedSteps:
    """The verdicts of an optimizer's steps, as the host learns of them.

    On a device the update is queued before the host knows whether the device will skip it.

    Owner: the optimizer, which passes itself to ``report``.
    """

    def __init__(self) -> None:
        self.count = 0
        self._in_a_row = 0
        self._unreported: list[_C.StepVerdict] = []  # in the order of the steps

    def add(self, verdict: _C.StepVerdict) -> None:
        self._unreported.append(verdict)

    def report(self, optimizer: "ShardedOptimizer", *, wait: bool) -> None:
        """Warn or raise for the skipped steps among those that the host knows by now.

        Args:
            wait: For the device, until all are known.
        """
        while self._unreported and (wait or self._unreported[0].is_settled):
            verdict = self._unreported.pop(0)
            if not optimizer._handle.knows_on_host:
                optimizer._handle.engine.settle(verdict)  # reads it from the device
            if verdict.nonfinite:
                self._report_one(optimizer, verdict)
            else:
                self._in_a_row = 0

    def _report_one(self, optimizer: "ShardedOptimizer", verdict: _C.StepVerdict) -> None:
        scaler = optimizer.loss_scaler
        if scaler is not None and scaler._expects_overflow():
            self.count += 1
            return
        if verdict.rank < 0:
            place = "on some rank"
        else:
            place = f"first in '{verdict.parameter}' on rank {verdict.rank}"
            if verdict.micro_batch >= 0:
                place += f", micro-batch {verdict.micro_batch}"
        message = f"{optimizer._handle.groups.where}gradients hold NaN or Inf, {place}"
        if optimizer.nonfinite == "raise":
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
        bad = _nonfinite_parameter(optimizer)
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
        if bad is not None or self._in_a_row == 1 or optimizer._handle.groups.rank == 0:
            warn(f"{message}; {said}.")


def _nonfinite_parameter(optimizer: "ShardedOptimizer") -> str | None:
    """The name of the first parameter that is not finite in this rank's part: its master, or what
    was written to it since the last step."""
    engine = optimizer._handle.engine
    for i in optimizer._sharded_state.indices:
        if engine.unit_of(i) >= 0 and not engine.current_master(i).isfinite().all():
            return engine.parameter_name(i)
    return None


class StepSettings:
    """The settings that an update multiplies with. Each step compares their hash between ranks."""

    def __init__(self, defaults: dict[str, Any]):
        self._names = [name for name in defaults if name not in _SWITCHES]
        self.states = SharedStates()  # which are compared with them

    def hash(self, optimizer: "ShardedOptimizer", *, divides: bool) -> int:
        """Equal on ranks where all settings are equal. The engine adds its divide factor.

        Args:
            divides: Whether the step was given ``divide_by``.
        """
        if optimizer._handle.groups.world == 1:
            return 0
        values = (divides, *map(_number_of, self._values(optimizer)))
        return hash(values) ^ self.states.hash()

    def agreed(self, optimizer: "ShardedOptimizer") -> None:
        """Called after a step whose settings did not differ."""
        compared = optimizer.nonfinite != "step" or optimizer.max_grad_norm is not None
        if compared or optimizer._handle.options.stage == 3:  # else no message was sent
            self.states.agreed()

    def check_same(self, optimizer: "ShardedOptimizer", *, divides: bool) -> None:
        """Raise for the first setting or state that differs. Collective."""
        labels = ["step() has divide_by={}", "gradient divide factor={}", "max_grad_norm={}"]
        for g in range(len(optimizer.param_groups)):
            labels.extend(f"{name}={{}} of group {g}" for name in self._names)
        labels.extend(f"step({name}={{}})" for name in sorted(optimizer._keywords))
        values = [divides, optimizer._handle.engine.divide_factor, *self._values(optimizer)]
        numbers = map(_number_of, values)
        check_same_on_all_ranks(
            optimizer._handle.groups,
            [label.format(number) for label, number in zip(labels, numbers, strict=True)],
            "the settings of the optimizers",
            remedy="Give every rank the same, and repeat step(): nothing was updated.",
        )
        self.states.check_same(optimizer._handle.groups)

    def _values(self, optimizer: "ShardedOptimizer") -> list[Any]:
        groups = optimizer.param_groups
        given = [optimizer._keywords[name] for name in sorted(optimizer._keywords)]
        settings = [g.get(name) for g in groups for name in self._names]
        return [optimizer.max_grad_norm, *settings, *given]


def _number_of(setting: Any) -> Any:
    """A number, or a tuple of them, with the same hash on every rank; 0 where it is no number."""
    if isinstance(setting, Number):  # bool is one, and so are numpy's
        return setting if setting == setting else 0  # every NaN has another hash
    if isinstance(setting, tuple | list):
        return tuple(map(_number_of, setting))
    if isinstance(setting, Tensor) and setting.device.type == "cpu" and setting.numel() == 1:
        return _number_of(setting.item())  # one on a device would have to be waited for
    return 0
