"""``deepspeed.accelerator.get_accelerator()``, as far as training scripts call it."""

import functools
from typing import Any

import torch

from zero_ext.deepspeed import names

__getattr__ = functools.partial(names.child, __name__)


class Accelerator:
    """The device that torch chooses: its accelerator, else the CPU.

    Every other method is that of ``torch.accelerator``, or of the device's module, such as
    ``torch.cuda``.
    """

    @property
    def _name(self) -> str:
        found = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if found is None else found.type

    def device_name(self, device_index: int | None = None) -> str:
        alone = device_index is None or self._name == "cpu"
        return self._name if alone else f"{self._name}:{device_index}"

    def current_device(self) -> int:
        return 0 if self._name == "cpu" else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        if self._name != "cpu":
            torch.accelerator.set_device_index(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether work is done when a call returns."""
        return self._name == "cpu"

    def communication_backend_name(self) -> str:
        return torch.distributed.get_default_backend_for_device(self._name)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def is_bf16_supported(self) -> bool:
        return self._name != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory("memory_allocated", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory("max_memory_allocated", device_index)

    def _memory(self, name: str, *arguments: Any) -> int:
        """0 on the CPU, whose memory torch does not count."""
        return 0 if self._name == "cpu" else getattr(torch.accelerator, name)(*arguments)

    def empty_cache(self) -> None:
        if self._name != "cpu":
            torch.accelerator.empty_cache()

    def __getattr__(self, name: str) -> Any:
        for module in (getattr(torch, self._name), torch.accelerator):
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(
            f"zero_ext: get_accelerator() has no '{name}' for {self._name}. Use torch.accelerator."
        )


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    return _accelerator
