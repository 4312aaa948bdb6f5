"""``deepspeed.checkpointing``: activations are computed again in the backward."""

from collections.abc import Callable
from typing import Any

import torch


def checkpoint(function: Callable, *args: Any) -> Any:
    """``function(*args)`` by ``torch.utils.checkpoint``, without the reentrant autograd."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(mpu_: None = None, **settings: Any) -> None:
    """Accepted: torch has no partitioned or contiguous checkpoints, which change no value.

    Raises:
        ValueError: ``mpu_`` is given: there is no model parallelism here.
    """
    if mpu_ is not None:
        raise ValueError("zero_ext: there is no model parallelism here: leave mpu_ out.")


def is_configured() -> bool:
    """True: nothing needs to be configured."""
    return True


def reset() -> None:
    """Nothing is kept between steps."""
