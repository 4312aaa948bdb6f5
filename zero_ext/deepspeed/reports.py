"""Reports: what a configuration wants to be told while it trains. Rank 0 writes."""

import contextlib
import csv
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_ext.deepspeed.config import Config
from zero_ext.engine.memory import stats
from zero_ext.ranks.groups import Groups

_log = logging.getLogger("zero_ext")
_PREFIX = "Train/Samples/"  # DeepSpeed's names


class Reports:
    """Losses, rates and loss scales for TensorBoard and CSV files, times and memory for the log.

    Nothing is measured that nobody asked for: reading a loss waits for the device.
    """

    def __init__(self, settings: Config, groups: Groups, model: Any):
        self._settings, self._device, self._model = settings, groups.device, model
        self._writes = groups.rank == 0
        self._losses: list[Tensor] = []
        self._seconds: dict[str, float] = {}
        self._tensorboard = None
        if self._writes and "tensorboard" in settings.monitors:
            self._tensorboard = _summary_writer(settings.monitors["tensorboard"])
        if self._writes and settings.dump_state:
            _log.info("settings: %s", settings)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time inside the context towards ``phase``, with ``wall_clock_breakdown``."""
        if not self._settings.wall_clock_breakdown:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._now() - start

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def add_loss(self, loss: Tensor) -> None:
        """The loss of a micro-batch, before it is divided or scaled."""
        if self._writes and self._settings.monitors:
            self._losses.append(loss.detach())

    def after_step(self, samples: int, lr: float, loss_scale: float) -> None:
        """Write what has come together since the last step.

        Args:
            samples: Of all ranks since the training began.
        """
        if self._writes and self._settings.monitors:
            events = {"lr": lr}
            if self._losses:
                events["train_loss"] = torch.stack(self._losses).float().mean().item()
            if self._settings.scaler is not None:
                events["loss_scale"] = loss_scale
            self._write(events, samples)
        self._losses.clear()
        if self._settings.wall_clock_breakdown and self._writes:
            times = ", ".join(f"{k} {1000 * v:.2f}" for k, v in self._seconds.items())
            _log.info("milliseconds of a step: %s", times)
        self._seconds.clear()
        if self._settings.memory_breakdown and self._writes:
            held = {k: v for k, v in stats(self._model).items() if k.startswith("bytes_")}
            _log.info("memory of rank 0: %s", held)

    def _write(self, events: dict[str, float], samples: int) -> None:
        for name, value in events.items():
            if self._tensorboard is not None:
                self._tensorboard.add_scalar(_PREFIX + name, value, samples)
            if "csv_monitor" in self._settings.monitors:
                _append(self._settings.monitors["csv_monitor"], name, samples, value)
        if self._tensorboard is not None:
            self._tensorboard.flush()


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "zero_ext: config 'tensorboard' needs the package tensorboard: pip install tensorboard."
        ) from error
    return SummaryWriter(folder)


def _append(folder: Path, name: str, samples: int, value: float) -> None:
    file = folder / f"{_PREFIX.replace('/', '_')}{name}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    is_new = not file.exists()
    with file.open("a", newline="") as opened:
        writer = csv.writer(opened)
        if is_new:
            writer.writerow(["step", name])
        writer.writerow([samples, value])
