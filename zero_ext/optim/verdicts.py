"""SkippedSteps: counts and reports the steps that all ranks skip because of NaN or Inf."""

import warnings
from typing import TYPE_CHECKING

from zero_ext import _C

if TYPE_CHECKING:
    from zero_ext.optim.sharded_optimizer import ShardedOptimizer


class SkippedSteps:
    """The verdicts of an optimizer's steps, as the host learns of them.

    On a device the update is queued before the host knows whether the device will skip it.

    Owner: the optimizer, which passes itself to ``report``.
    """

    def __init__(self) -> None:
        self.count = 0
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
            optimizer._handle.engine.settle(verdict)
            if verdict.nonfinite:
                self._report_one(optimizer, verdict)

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
        warnings.warn(f"{message}; step skipped on all ranks ({self.count} so far).", stacklevel=7)
