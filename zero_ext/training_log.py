"""TrainingLog: a line of JSON for each step, which ``python -m zero_ext.diff`` compares."""

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist


class TrainingLog:
    """Writes one line of JSON for each step. Rank 0 writes, the other ranks do nothing.

    A run that goes on appends. Lines of steps that are made again are dropped first, and so is a
    line that was cut off when a process died::

        log = zero_ext.TrainingLog("run.jsonl")
        log.write(step.number, loss=loss, norm=optimizer.grad_norm,
                  fingerprint=zero_ext.fingerprint(model, optimizer))

    Args:
        path: Of the file. Its folder must exist.
        rank: Default: that of ``torch.distributed``, or 0.
    """

    def __init__(self, path: str | os.PathLike, rank: int | None = None):
        together = dist.is_available() and dist.is_initialized()
        if rank is None:
            rank = dist.get_rank() if together else 0
        self._path = Path(path) if rank == 0 else None
        self._ranks = dist.get_world_size() if together else 1
        self._last: int | None = None  # step that was written

    def write(
        self,
        step: int,
        *,
        loss: Any = None,
        norm: Any = None,
        fingerprint: str | None = None,
        parameters: dict[str, str] | None = None,
        **others: Any,
    ) -> None:
        """
        Args:
            step: Larger than that of the last call.
            loss, norm: Numbers, or tensors of one element.
            parameters: What ``parameter_fingerprints`` has returned.
            others: More to write, as numbers, strings, or tensors of one element.
        Raises:
            ValueError: the step is not larger than the last one.
        """
        if self._path is None:
            return
        if self._last is None:
            self._drop_from(step)
        elif step <= self._last:
            raise ValueError(
                f"zero_ext: TrainingLog got step {step} after step {self._last}. Make a new "
                "TrainingLog when a run goes on from a checkpoint."
            )
        line = {"step": step, "loss": loss, "norm": norm, "fingerprint": fingerprint}
        line |= {"ranks": self._ranks, **others, "parameters": parameters}
        numbers = {k: v.item() if hasattr(v, "item") else v for k, v in line.items()}
        text = json.dumps({key: value for key, value in numbers.items() if value is not None})
        with self._path.open("a") as file:
            file.write(text + "\n")
        self._last = step

    def _drop_from(self, step: int) -> None:
        """Drop the lines of ``step`` and later ones, which an earlier run has written."""
        text = self._path.read_text() if self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines(keepends=True)
        kept = "".join(line for line in whole if json.loads(line)["step"] < step)
        if kept != text:
            beside = self._path.with_name(self._path.name + ".new")
            beside.write_text(kept)
            beside.replace(self._path)
