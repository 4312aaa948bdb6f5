"""``ds_id`` and ``ds_status``: what scripts ask parameters of stage 3 before they gather them."""

import contextlib
import enum
from collections.abc import Iterable, Iterator

from torch import Tensor, nn


class ZeroParamStatus(enum.IntEnum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def note(module: nn.Module) -> None:
    """Number the parameters. Outside of ``GatheredParameters`` none is available.

    The attributes are plain integers, so that a saved module names nothing of this package.
    """
    for number, parameter in enumerate(module.parameters()):
        parameter.ds_id = number
        parameter.ds_status = int(ZeroParamStatus.NOT_AVAILABLE)
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()


def forget(module: nn.Module) -> None:
    for parameter in module.parameters():
        for name in ("ds_id", "ds_status", "ds_shape", "ds_numel"):
            parameter.__dict__.pop(name, None)


@contextlib.contextmanager
def available(parameters: Iterable[Tensor]) -> Iterator[None]:
    """They are gathered inside the context."""
    before = [(p, p.ds_status) for p in parameters if hasattr(p, "ds_status")]
    for parameter, _ in before:
        parameter.ds_status = int(ZeroParamStatus.AVAILABLE)
    try:
        yield
    finally:
        for parameter, status in before:
            parameter.ds_status = status
