"""``deepspeed.checkpointing``: activations are computed again in the backward."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` by ``torch.utils.checkpoint``, without reentrant autograd."""
    if kwargs:
        function = functools.partial(function, **kwargs)  # torch's checkpoint has keywords, too
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


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
