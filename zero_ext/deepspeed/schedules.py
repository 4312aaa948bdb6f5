"""DeepSpeed's learning rate schedules, by their names and arguments.

A schedule is made on an optimizer and stepped after each of its steps. Its first step sets the rate
of iteration 0: an optimizer makes its first two steps with the lowest rate.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.deepspeed.optimizers import Named, check_arguments, read_named
from zero_ext.deepspeed.values import Values


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Give a group its rate; a tensor stays the same object."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


class Schedule(LRScheduler):
    """Sets the learning rates of an optimizer's groups: each a part of the way between its bounds.

    torch's own constructor is not run: it would make the first step.

    Args:
        bounds: The lowest and the highest rate of each group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        bounds: list[tuple[float, float]],
        last_batch_iteration: int = -1,
    ):
        if not isinstance(last_batch_iteration, int):
            raise ValueError(
                f"zero_ext: last_batch_iteration is {last_batch_iteration!r}, not a count."
            )
        self.optimizer, self._bounds = optimizer, bounds
        self.last_batch_iteration = last_batch_iteration
        self.base_lrs = _rates_of(optimizer)
        if last_batch_iteration == -1:
            self._set()
        else:
            self._last_lr = list(self.base_lrs)

    @property
    def last_epoch(self) -> int:
        """torch's name of the present iteration."""
        return self.last_batch_iteration

    def _part(self, now: int) -> float:
        """How far the rates of iteration ``now`` are from the lowest to the highest ones."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The learning rate of each group, at the present iteration."""
        return _between(self._bounds, self._part(self.last_batch_iteration))

    def step(self, last_batch_iteration: int | None = None) -> None:
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

    def _set(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            set_rate(group, lr)

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The rates themselves are in the optimizer's state."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._last_lr = _rates_of(self.optimizer)


class WarmupLR(Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``, then constant.

    Args:
        warmup_min_lr, warmup_max_lr: A rate, or one of each group. Default of the highest: the
            groups' own.
        warmup_type: ``"log"`` or ``"linear"``.
    """

    _first_part = 0.0  # in iteration 0

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        _count("warmup_num_steps", warmup_num_steps, least=0)  # Trainer fills in 0 for "auto"
        if warmup_type not in ("log", "linear"):
            raise ValueError(f"zero_ext: warmup_type is {warmup_type!r}: choose 'log' or 'linear'.")
        self._steps, self._type = max(2, warmup_num_steps), warmup_type
        highest = _rates_of(optimizer) if warmup_max_lr is None else warmup_max_lr
        bounds = _of_groups(optimizer, warmup_min_lr=warmup_min_lr, warmup_max_lr=highest)
        super().__init__(optimizer, bounds, last_batch_iteration)

    def _part(self, now: int) -> float:
        if now < 0:
            return 0.0
        if now >= self._steps:
            return self._part_after(now)
        linear = self._type == "linear"
        done = now / self._steps if linear else math.log(now + 1) / math.log(self._steps)
        return self._first_part + (1 - self._first_part) * done

    def _part_after(self, now: int) -> float:
        """Of an iteration after the warmup."""
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
        lowest, highest = warmup_min_lr, warmup_max_lr
        super().__init__(
            optimizer, lowest, highest, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def _part_after(self, now: int) -> float:
        left = self.total_num_steps - now
        return max(0.0, left / max(1.0, self.total_num_steps - self._steps))


class WarmupCosineLR(WarmupLR):
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
        self._first_part, self._last_part = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, 0.0, None, warmup_num_steps, warmup_type, last_batch_iteration)

    def _part_after(self, now: int) -> float:
        done = (now - self._steps + 1) / max(1, self.total_num_steps - self._steps)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self._last_part + (1 - self._last_part) * cosine)


class LRRangeTest(Schedule):
    """Rates that grow by ``lr_range_test_step_rate`` of the lowest one every
    ``lr_range_test_step_size`` steps: in stairs, or evenly.

    Args:
        lr_range_test_min_lr: The lowest rate, or one of each group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        self._size = _count("lr_range_test_step_size", lr_range_test_step_size)
        self._growth, self._in_stairs = lr_range_test_step_rate, lr_range_test_staircase
        bounds = _of_groups(optimizer, nothing=0.0, lr_range_test_min_lr=lr_range_test_min_lr)
        super().__init__(optimizer, bounds, last_batch_iteration)

    def _part(self, now: int) -> float:
        stairs = (now + 1) / self._size
        return 1 + self._growth * (math.floor(stairs) if self._in_stairs else stairs)


class OneCycle(Schedule):
    """Rates that rise to ``cycle_max_lr`` and fall back to ``cycle_min_lr`` once, then decay. The
    first beta of Adam's kind goes the other way with ``cycle_momentum``.

    Args:
        cycle_min_lr, cycle_max_lr, cycle_min_mom, cycle_max_mom: One value, or one of each group.
        cycle_first_step_size, cycle_second_step_size: Steps of the rise and of the fall. Default of
            the second: the first.
        cycle_first_stair_count, cycle_second_stair_count: Stairs of each half; 0 changes evenly.
        decay_step_size: Steps after the cycle that make one unit of decay; 0: none.
        decay_lr_rate, decay_mom_rate: Rates are divided by 1 + this times the units, betas
            multiplied.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        up = _count("cycle_first_step_size", cycle_first_step_size)
        down = up
        if cycle_second_step_size is not None:
            down = _count("cycle_second_step_size", cycle_second_step_size, least=0)
        first = cycle_first_stair_count
        second = first if cycle_second_stair_count is None else cycle_second_stair_count
        self._up, self._down, self._stairs = up, down, (first, second)
        self._decay_steps = decay_step_size
        self._lr_decay, self._mom_decay = decay_lr_rate, decay_mom_rate
        bounds = _of_groups(optimizer, cycle_min_lr=cycle_min_lr, cycle_max_lr=cycle_max_lr)
        self._moms = None  # of each group, the highest first
        if cycle_momentum and "betas" in optimizer.defaults:
            self._moms = _of_groups(
                optimizer, cycle_max_mom=cycle_max_mom, cycle_min_mom=cycle_min_mom
            )
        super().__init__(optimizer, bounds, last_batch_iteration)

    def get_lr(self) -> list[float]:
        units = self._units_of_decay()
        if units is None:
            return super().get_lr()
        return [low / (1 + self._lr_decay * units) for low, _ in self._bounds]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group; None if they do not change."""
        if self._moms is None:
            return None
        units = self._units_of_decay()
        if units is None:
            firsts = _between(self._moms, self._part(self.last_batch_iteration))
        else:
            firsts = [high * (1 + self._mom_decay * units) for high, _ in self._moms]
        return [(first, 0.99) for first in firsts]

    def _units_of_decay(self) -> float | None:
        """After the cycle; None during it."""
        after = self.last_batch_iteration - (self._up + self._down)
        if after < 0:
            return None
        return (after + 1) / self._decay_steps if self._decay_steps else 0.0

    def _part(self, now: int) -> float:
        """0 at the cycle's ends, 1 at its top."""
        now = (now + 1) % (self._up + self._down)
        rises = now <= self._up
        length, left = (self._up, now) if rises else (self._down, self._up + self._down - now)
        stairs = self._stairs[0 if rises else 1]
        return math.floor(left * stairs / length) / stairs if stairs > 0 else left / length

    def _set(self) -> None:
        started = self.last_batch_iteration >= 0
        super()._set()
        # DeepSpeed begins with the lowest momentum, and goes on from the highest.
        betas = (
            self.get_mom() if started or self._moms is None else [(m, 0.99) for _, m in self._moms]
        )
        for group, pair in zip(self.optimizer.param_groups, betas or (), strict=False):
            group["betas"] = pair


def _rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _between(bounds: list[tuple[float, float]], part: float) -> list[float]:
    return [first + (last - first) * part for first, last in bounds]


def _of_groups(optimizer: torch.optim.Optimizer, **values: Any) -> list[tuple]:
    """For each group its own of ``values``, each of which is one for all or one of each."""
    groups = len(optimizer.param_groups)
    for name, given in values.items():
        if not isinstance(given, (list, tuple)):
            values[name] = [given] * groups
        elif len(given) != groups:
            raise ValueError(
                f"zero_ext: {name} has {len(given)} rates, the optimizer {groups} groups of "
                "parameters."
            )
    return list(zip(*values.values(), strict=True))


def _count(name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"zero_ext: {name} is {value!r}, not a count of at least {least}.")
    return value


SCHEDULES = {
    each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def read_schedule(values: Values) -> Named | None:
    name, arguments = read_named(values, "scheduler")
    if name is None:
        return None
    kind = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not (isinstance(kind, type) and issubclass(kind, LRScheduler)):
        choices = ", ".join(SCHEDULES)
        text = f": choose {choices} or one of torch.optim.lr_scheduler, or pass lr_scheduler=."
        values.reject("scheduler.type", name, text)
        return None
    check_arguments(kind, arguments, values, "scheduler")
    return Named(kind, arguments)
