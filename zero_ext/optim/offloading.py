"""OffloadedStates: the states of torch's optimizers in host memory."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zero_ext import _C


class OffloadedStates:
    """Which storages are in host memory now. Empty unless ``set(True, …)`` was the last call."""

    def __init__(self) -> None:
        # By storage: one may hold several states.
        self._storages: dict[int, _C.OffloadedStorage] = {}

    def check(self) -> None:
        if self._storages:
            raise RuntimeError(_C.STATES_OFFLOADED)

    def set(self, offloaded: bool, values: Iterable[Any]) -> None:
        """Move those of ``values`` that are tensors on a device to the host, or all back."""
        if not offloaded:
            for storage in self._storages.values():
                storage.bring_back()
            self._storages.clear()
            return
        for value in values:
            if not isinstance(value, Tensor) or value.device.type == "cpu":
                continue
            key = value.untyped_storage()._cdata
            if key not in self._storages:
                self._storages[key] = _C.OffloadedStorage(value, _C.STATES_OFFLOADED)
