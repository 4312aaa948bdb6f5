"""``LossScaler``: keeps fp16 gradients within what fp16 can hold."""

import math
import weakref
from typing import Any

import torch
from torch import Tensor

# Gradients of 1 would overflow fp16 at 2**16 already; the reciprocal must not be a subnormal.
LARGEST_SCALE = 2.0**100
_STATE = (
    "mode",
    "scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "min_scale",
    "good_steps",
    "overflows_left",
)


class LossScaler:
    """A loss scale for scripts without ``torch.amp.GradScaler``.

    Give it to the optimizer, scale every loss, and step as ever::

        scaler = zero_ext.LossScaler("dynamic")
        optimizer = zero_ext.optim.AdamW(model.parameters(), loss_scaler=scaler)
        scaler.scale(loss).backward()  # or optimizer.scale(loss).backward()
        optimizer.step()

    Gradients are divided by the scale as they are added to their fp32 sum, which costs no pass of
    its own: ``p.grad`` shows true gradients, and clipping, schedulers and closures need not know of
    the scale. A step with NaN or Inf on any rank is skipped on all; ``"dynamic"`` then lowers the
    scale, on all ranks alike.

    Args:
        mode: ``"dynamic"``, or ``"static"``: the scale stays ``init_scale``.
        init_scale: The first scale; powers of two do not round.
        growth_factor, growth_interval: After so many steps in a row without an overflow the scale
            is multiplied by the factor, 2**100 at most.
        backoff_factor, hysteresis: The ``hysteresis``-th overflow since the scale last grew, and
            every one after it, multiplies the scale by the factor.
        min_scale: The scale never backs off below. Overflows there are warned about.
    Raises:
        ValueError: an argument makes no sense.
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
        self._optimizer: weakref.ref | None = None
        self._losses_scaled = 0  # since the last step
        self._set(
            {
                "mode": mode,
                "scale": float(init_scale),
                "growth_factor": float(growth_factor),
                "backoff_factor": float(backoff_factor),
                "growth_interval": growth_interval,
                "hysteresis": hysteresis,
                "min_scale": float(min_scale),
                "good_steps": 0,
                "overflows_left": hysteresis,
            }
        )

    def _set(self, state: dict[str, Any]) -> None:
        _check(state)
        for name in _STATE:
            setattr(self, f"_{name}", state[name])

    @property
    def dynamic(self) -> bool:
        """The scale follows the overflows."""
        return self._mode == "dynamic"

    def get_scale(self) -> float:
        """What losses are multiplied by now; the same on all ranks."""
        return self._scale

    def scale(self, outputs):
        """Multiply a loss, or a list or tuple of losses, by the scale."""
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        if not isinstance(outputs, Tensor):
            raise TypeError(f"zero_ext: scale() takes tensors, not {type(outputs).__name__}.")
        self._losses_scaled += 1
        # A 0-dim fp32 factor, as torch's GradScaler has: an fp16 loss becomes fp32.
        # torch.tensor() would copy it to a device, and wait for all that this was given before.
        return outputs * torch.full((), self._scale, dtype=torch.float32, device=outputs.device)

    def _attach(self, optimizer) -> None:
        other = self._optimizer and self._optimizer()
        if other is not None and other is not optimizer:
            raise ValueError(
                f"zero_ext: this LossScaler belongs to another optimizer ({type(other).__name__}) "
                "already. Give each optimizer its own."
            )
        self._optimizer = weakref.ref(optimizer)

    def _detach(self, optimizer) -> None:
        if self._optimizer is not None and self._optimizer() is optimizer:
            self._optimizer = None

    def _tell(self) -> None:
        optimizer = self._optimizer and self._optimizer()
        if optimizer is not None:
            optimizer._handle.engine.set_loss_scale(self._scale)

    def _step_made(self, overflow: bool) -> None:
        """What all ranks agreed on; called by the optimizer after each step."""
        self._losses_scaled = 0
        if not self.dynamic:
            return
        if overflow:
            self._good_steps = 0
            self._overflows_left = max(self._overflows_left - 1, 0)
            if self._overflows_left == 0:
                self._scale = max(self._scale * self._backoff_factor, self._min_scale)
        else:
            self._good_steps += 1
            if self._good_steps == self._growth_interval:
                self._good_steps = 0
                self._overflows_left = self._hysteresis
                self._scale = min(self._scale * self._growth_factor, LARGEST_SCALE)
        self._tell()

    def _expects_overflow(self) -> bool:
        """An overflow is how the scale is found, and not yet a reason to warn."""
        return self.dynamic and self._scale > self._min_scale

    def state_dict(self) -> dict[str, Any]:
        """All settings and counts, as plain numbers; the same on all ranks."""
        return {name: getattr(self, f"_{name}") for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over settings and counts. Every rank must load the same, between two steps.

        Raises:
            ValueError: an entry is missing or makes no sense; nothing is changed then.
        """
        missing = [name for name in _STATE if name not in state_dict]
        if missing:
            raise ValueError(f"zero_ext: the state of a LossScaler lacks {', '.join(missing)}.")
        self._set(state_dict)
        self._tell()

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, f'_{name}')!r}" for name in _STATE[1:])
        return f"LossScaler({self._mode!r}, {settings})"


def _check(state: dict[str, Any]) -> None:
    problems = {
        "mode must be 'dynamic' or 'static'": state["mode"] in ("dynamic", "static"),
        "scale must be positive, 2**100 at most": 0 < state["scale"] <= LARGEST_SCALE,
        "growth_factor must be at least 1": 1 <= state["growth_factor"] < math.inf,
        "backoff_factor must be above 0 and at most 1": 0 < state["backoff_factor"] <= 1,
        "growth_interval must be at least 1": _is_count(state["growth_interval"], 1),
        "hysteresis must be at least 1": _is_count(state["hysteresis"], 1),
        "min_scale must be positive and at most the scale": (
            state["mode"] == "static" or 0 < state["min_scale"] <= state["scale"]
        ),
        "good_steps must be a count": _is_count(state["good_steps"], 0),
        "overflows_left must be a count": _is_count(state["overflows_left"], 0),
    }
    for problem, fine in problems.items():
        if not fine:
            value = state[problem.split()[0]]
            raise ValueError(f"zero_ext: LossScaler: {problem}, not {value!r}.")


def _is_count(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
