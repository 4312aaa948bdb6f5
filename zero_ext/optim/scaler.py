"""``LossScaler``: keeps fp16 gradients within what fp16 can hold."""

import copy
import math
import weakref
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext.engine.checks import check_number
from zero_ext.engine.handle import Handle
from zero_ext.ranks.agreement import check_same_on_all_ranks

# Gradients of 1 would overflow fp16 at 2**16 already; the reciprocal must not be a subnormal.
LARGEST_SCALE = 2.0**100


@dataclass
class _State:
    mode: str
    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    good_steps: int
    overflows_left: int

    def __post_init__(self):
        for name in ("scale", "growth_factor", "backoff_factor", "min_scale"):
            check_number(f"LossScaler: {name}", getattr(self, name))
            setattr(self, name, float(getattr(self, name)))
        problems = {
            "mode must be 'dynamic' or 'static'": self.mode in ("dynamic", "static"),
            "scale must be positive, 2**100 at most": 0 < self.scale <= LARGEST_SCALE,
            "growth_factor must be at least 1": 1 <= self.growth_factor < math.inf,
            "backoff_factor must be above 0 and at most 1": 0 < self.backoff_factor <= 1,
            "growth_interval must be at least 1": _is_count(self.growth_interval, 1),
            "hysteresis must be at least 1": _is_count(self.hysteresis, 1),
            "min_scale must be positive and at most the scale": (
                self.mode == "static" or 0 < self.min_scale <= self.scale
            ),
            "good_steps must be a count": _is_count(self.good_steps, 0),
            "overflows_left must be a count": _is_count(self.overflows_left, 0),
        }
        for problem, fine in problems.items():
            if not fine:
                value = getattr(self, problem.split()[0])
                raise ValueError(f"zero_ext: LossScaler: {problem}, not {value!r}.")

    def back_off(self) -> None:
        self.good_steps = 0
        self.overflows_left = max(self.overflows_left - 1, 0)
        if self.overflows_left == 0:
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)

    def count_good_step(self) -> None:
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = 0
            self.overflows_left = self.hysteresis
            self.scale = min(self.scale * self.growth_factor, LARGEST_SCALE)


def _is_count(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class LossScaler:
    """A loss scale for scripts without ``torch.amp.GradScaler``.

    Give it to the optimizer, scale every loss, and step as ever::

        scaler = zero_ext.LossScaler("dynamic")
        optimizer = zero_ext.optim.AdamW(model.parameters(), loss_scaler=scaler)
        scaler.scale(loss).backward()  # or optimizer.scale(loss).backward()
        optimizer.step()

    Each gradient is divided by the scale as it is added to its fp32 sum, without a pass of its own.
    So ``p.grad`` shows true gradients, and clipping, schedulers and closures need not know of the
    scale. A step with NaN or Inf on any rank is skipped on all ranks. Then ``"dynamic"`` lowers the
    scale on all of them, also where another optimizer of the module skips its step.

    Args:
        mode: ``"dynamic"``, or ``"static"``: the scale stays ``init_scale``.
        init_scale: The first scale; powers of two do not round.
        growth_factor, growth_interval: After so many steps in a row without an overflow the scale
            is multiplied by the factor, 2**100 at most.
        backoff_factor, hysteresis: The ``hysteresis``-th overflow since the scale last grew, and
            every one after it, multiplies the scale by the factor.
        min_scale: The scale never backs off below it. An overflow at this scale raises a warning.
    Raises:
        ValueError, TypeError: an argument makes no sense.
    Source: Micikevicius et al. 2018; hysteresis after Megatron-LM.
    """

    def __init__(
        self,
        mode: str = "dynamic",
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
    ):
        check_number("LossScaler: init_scale", init_scale)
        self._optimizer: weakref.ref | None = None
        self._losses_scaled = 0  # since the last step
        self._backwards_seen = 0  # by the last step
        self._noted_after = -1  # so many backwards: whether a step then has overflowed
        self._overflowed = False
        self._state = _State(
            mode,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            min_scale,
            good_steps=0,
            overflows_left=hysteresis,
        )

    @property
    def dynamic(self) -> bool:
        """The scale follows the overflows."""
        return self._state.mode == "dynamic"

    def get_scale(self) -> float:
        """The present factor of losses, equal on all ranks."""
        return self._state.scale

    def scale(self, outputs):
        """Multiply a loss, or a list or tuple of losses, by the scale."""
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        if not isinstance(outputs, Tensor):
            raise TypeError(f"zero_ext: scale() takes tensors, not {type(outputs).__name__}.")
        self._losses_scaled += 1
        # A 0-dim fp32 factor, as torch's GradScaler has: an fp16 loss becomes fp32.
        # torch.tensor() would copy it to a device, and wait for all work queued there.
        return outputs * torch.full(
            (), self._state.scale, dtype=torch.float32, device=outputs.device
        )

    def _set_in_engine(self) -> None:
        optimizer = self._optimizer and self._optimizer()
        if optimizer is not None:
            optimizer.zero_core.handle.engine.set_loss_scale(self._state.scale)

    def check_scaled(self, handle: Handle) -> None:
        """Raise where backwards have run since the last step, and no loss was scaled."""
        if self._losses_scaled or handle.engine.backwards == self._backwards_seen:
            return
        raise RuntimeError(
            f"{handle.groups.where}no loss was scaled by the optimizer's loss_scaler since the "
            f"last step: its gradients are {self._state.scale:g} times too small. Call "
            "optimizer.scale(loss).backward() in place of loss.backward(), or make the optimizer "
            "without loss_scaler where torch's GradScaler scales."
        )

    def note_step(self, verdict: _C.StepVerdict, *, own: bool) -> None:
        """After a step of an optimizer of the module: an overflow counts once after a backward."""
        if own:
            self._losses_scaled = 0
            self._backwards_seen = verdict.backwards
        if not self.dynamic:
            return
        scale = self._state.scale
        if verdict.backwards != self._noted_after:
            self._noted_after, self._overflowed = verdict.backwards, False
            self._before = copy.copy(self._state)
        if verdict.nonfinite and not self._overflowed:
            self._overflowed, self._state = True, copy.copy(self._before)
            self._state.back_off()
        elif own and not self._overflowed:
            self._state.count_good_step()
        if self._state.scale != scale:
            self._set_in_engine()

    @property
    def expects_overflow(self) -> bool:
        """Whether an overflow is only how the scale is found, and no reason to warn."""
        return self.dynamic and self._state.scale > self._state.min_scale

    def state_dict(self) -> dict[str, Any]:
        """All settings and counts, as plain numbers; the same on all ranks."""
        return asdict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load settings and counts. Every rank must load the same, between two steps.

        Raises:
            ValueError, TypeError: an entry is missing or makes no sense; nothing is changed then.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(
                "zero_ext: a LossScaler loads what its state_dict() returned, not a "
                f"{type(state_dict).__name__}."
            )
        names = [field.name for field in fields(_State)]
        missing = [name for name in names if name not in state_dict]
        if missing:
            raise ValueError(f"zero_ext: the state of a LossScaler lacks {', '.join(missing)}.")
        self._state = _State(**{name: state_dict[name] for name in names})
        self._set_in_engine()

    def __repr__(self) -> str:
        mode, *others = self.state_dict().items()
        return f"LossScaler({mode[1]!r}, {', '.join(f'{n}={v!r}' for n, v in others)})"


def scaler_of(handle: Handle) -> LossScaler | None:
    """That of the one optimizer of a module that has one."""
    optimizer = handle.scaled_by and handle.scaled_by()
    return None if optimizer is None else optimizer.loss_scaler


def attach(scaler: LossScaler | None, handle: Handle, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's engine its one scale. Collective.

    It is the scale of the one optimizer that came with a scaler, else 1.

    Raises:
        ValueError: the scaler has another optimizer, or the engine another scaler.
    """
    scaled_by = handle.scaled_by and handle.scaled_by()
    if scaler is None:
        if scaled_by is None:
            handle.engine.set_loss_scale(1.0)
        return
    other = scaler._optimizer and scaler._optimizer()
    if other not in (None, optimizer):
        raise ValueError(
            f"zero_ext: this LossScaler belongs to another optimizer ({type(other).__name__}) "
            "already. Give each optimizer its own."
        )
    if scaled_by is not None:
        raise ValueError(
            "zero_ext: another optimizer of this module has a loss_scaler already, which scales "
            "the gradients of all its parameters. Leave loss_scaler out."
        )
    check_same_on_all_ranks(
        handle.groups,
        [repr(scaler)],
        "the loss scalers",
        remedy="Give every rank's optimizer the same loss_scaler.",
    )
    scaler._optimizer = handle.scaled_by = weakref.ref(optimizer)
    scaler._backwards_seen = handle.engine.backwards
    scaler._noted_after = -1
    scaler._set_in_engine()


def detach(scaler: LossScaler | None, handle: Handle, optimizer: torch.optim.Optimizer) -> None:
    """The engine's scale is 1 again, and the scaler free for another optimizer."""
    if handle.scaled_by is None or handle.scaled_by() is not optimizer:
        return
    handle.scaled_by = None
    handle.engine.set_loss_scale(1.0)
    if scaler is not None:
        scaler._optimizer = None
