"""DeepSpeed's learning rate schedules, by their names and arguments.

A schedule is made on an optimizer and stepped after each of its steps. Its first step sets the rate
of iteration 0: an optimizer makes its first two steps with the lowest rate.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Schedule:
    """Sets the learning rates of an optimizer's groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1):
        if not isinstance(last_batch_iteration, int):
            raise ValueError(
                f"zero_ext: last_batch_iteration is {last_batch_iteration!r}, not a count."
            )
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._set()

    def get_lr(self) -> list[float]:
        """Of each group, at the present iteration."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """What was set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

    def _set(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The rates themselves are in the optimizer's state."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]


class WarmupLR(Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``, then constant.

    Args:
        warmup_min_lr, warmup_max_lr: A rate, or one of each group. Default of the highest: the
            groups' own.
        warmup_type: ``"log"`` or ``"linear"``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self._lowest = _of_each_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self._highest = _of_each_group(optimizer, "warmup_max_lr", warmup_max_lr)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        now = self.last_batch_iteration
        part = 0.0 if now < 0 else self._part(now)
        return [
            low + (high - low) * part for low, high in zip(self._lowest, self._highest, strict=True)
        ]

    def _part(self, now: int) -> float:
        return self._warmup.part(now) if now < self._warmup.steps else self._part_after(now)

    def _part_after(self, now: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As ``WarmupLR``, then linearly down to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _part_after(self, now: int) -> float:
        left = self.total_num_steps - now
        return max(0.0, left / max(1.0, self.total_num_steps - self._warmup.steps))


class WarmupCosineLR(Schedule):
    """Parts of the groups' own rates: from ``warmup_min_ratio`` to 1 in ``warmup_num_steps``, then
    along half a cosine down to ``cos_min_ratio`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = total_num_steps
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self._warmup_min_ratio, self._cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        ratio = self._ratio(self.last_batch_iteration)
        return [rate * ratio for rate in self._rates]

    def _ratio(self, now: int) -> float:
        if now < 0:
            return 0.0
        if now < self._warmup.steps:
            return self._warmup_min_ratio + (1 - self._warmup_min_ratio) * self._warmup.part(now)
        done = (now - self._warmup.steps + 1) / max(1, self.total_num_steps - self._warmup.steps)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self._cos_min_ratio + (1 - self._cos_min_ratio) * cosine)


class _Warmup:
    def __init__(self, steps: int, kind: str):
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"zero_ext: warmup_num_steps is {steps!r}, not a count of at least 1.")
        if kind not in ("log", "linear"):
            raise ValueError(f"zero_ext: warmup_type is {kind!r}: choose 'log' or 'linear'.")
        self.steps = max(2, steps)
        self._kind = kind

    def part(self, now: int) -> float:
        if self._kind == "linear":
            return now / self.steps
        return math.log(now + 1) / math.log(self.steps)


def _of_each_group(optimizer, name: str, rates: float | Sequence[float]) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(rates, (list, tuple)):
        return [rates] * groups
    if len(rates) != groups:
        raise ValueError(
            f"zero_ext: {name} has {len(rates)} rates, the optimizer {groups} groups of parameters."
        )
    return list(rates)


SCHEDULES = {each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}
