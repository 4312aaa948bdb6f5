"""Logs of a loop: ``metrics`` for loggers, and ``TrainingLog`` for ``python -m zero_ext.diff``."""

import json
import os
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_ext.engine.checks import check_module
from zero_ext.engine.handle import Handle
from zero_ext.engine.memory import bytes_by_kind
from zero_ext.engine.registry import handle_of
from zero_ext.optim.core import Core
from zero_ext.ranks.groups import rank_and_world
from zero_ext.state.model_state import handles_of

_WAITED = "waited_us_"


class _Copy(NamedTuple):
    """A copy of a number that a device computes. ``value`` holds it when ``arrived`` has come."""

    value: Tensor
    arrived: torch.Event


# Of each engine, the microseconds waited so far as the last call of ``metrics`` has seen them. Of
# each optimizer on a device, the last norm that is known, and one on its way to the host.
_waited: weakref.WeakKeyDictionary[Handle, Counter[str]] = weakref.WeakKeyDictionary()
_norms: weakref.WeakKeyDictionary[Core, float] = weakref.WeakKeyDictionary()
_copies: weakref.WeakKeyDictionary[Core, _Copy] = weakref.WeakKeyDictionary()


def metrics(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Numbers of this rank for a logger. Waits for no device and for no other rank::

        loss.backward()
        optimizer.step()
        wandb.log({"loss": loss.item(), **zero_ext.metrics(model, optimizer)})

    On a device ``grad_norm`` and ``skipped_steps`` may be one step late, or more where the device
    is further behind: they are what the host knows.

    Args:
        module: Sharded, or a plain one whose parameters ``optimizer`` shards.
        optimizer: Of this package, and steps parameters of ``module``.
    Returns:
        ``grad_norm``: before clipping, in the last step; only with ``max_grad_norm``, and once it
        is known. ``skipped_steps``: those skipped for NaN or Inf so far. ``loss_scale``: only with
        a ``loss_scaler``. ``bytes/parameters``: with masters, ``bytes/gradients``,
        ``bytes/states``, ``bytes/gathered``: whole parameters that stage 3 holds now,
        ``bytes/buckets`` and ``bytes/offloaded``. States are counted as ``bytes_optimizer_state``
        of ``stats`` is. ``waited_ms/rank_<N>``: milliseconds since the last call in which the host
        waited for messages from or to rank N; ``waited_ms/all_ranks``: for collectives. What the
        host did meanwhile for other ranks is in these times.
    Raises:
        ValueError, TypeError: ``module`` is not sharded, or ``optimizer`` is none of this package.
    """
    check_module(module, "metrics()")
    for sharded in (module, optimizer):
        handle_of(sharded)
    core: Core = optimizer.zero_core
    found = {"skipped_steps": float(core.skipped.count)}
    if (norm := _known_norm(core)) is not None:
        found["grad_norm"] = norm
    if core.loss_scaler is not None:
        found["loss_scale"] = core.loss_scaler.get_scale()
    sums: Counter[str] = Counter()
    for handle in handles_of(module):
        sums.update(_of_engine(handle))
    return found | {name: float(value) for name, value in sums.items()}


def _known_norm(core: Core) -> float | None:
    """The last one that the host knows. Starts to copy the newest one to the host."""
    norm = core.grad_norm
    if norm is None or norm.is_cpu:
        return None if norm is None else norm.item()
    if core in _copies and _copies[core].arrived.query():
        _norms[core] = _copies.pop(core).value.item()
    if core not in _copies:
        _copies[core] = _Copy(norm.to("cpu", non_blocking=True), torch.Event(norm.device))
        _copies[core].arrived.record()
    return _norms.get(core)


def _of_engine(handle: Handle) -> dict[str, float]:
    held = bytes_by_kind(handle)
    stats = handle.engine.stats()
    waited = Counter({k: v for k, v in stats.items() if k.startswith(_WAITED)})
    before = _waited.get(handle, Counter())
    _waited[handle] = waited
    return {
        "bytes/parameters": held["parameters"] + held["masters"],
        "bytes/gradients": held["gradients"],
        "bytes/states": held["optimizer states"],
        "bytes/gathered": held["gathered"],
        "bytes/buckets": held["buckets"],
        "bytes/offloaded": stats["bytes_offloaded"],
        **{
            f"waited_ms/{name.removeprefix(_WAITED)}": (us - before[name]) / 1000
            for name, us in waited.items()
        },
    }


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
        own, self._ranks = rank_and_world()
        self._path = Path(path) if (own if rank is None else rank) == 0 else None
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
