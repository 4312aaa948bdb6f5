"""The views of the C++ states in ``optimizer.state``.

Values are views. States in blocks (``state_dtype="int8"``) are shown as fp32 copies, which are made
when they are asked for and hold until the next step. What was written to a copy is written to its
blocks then.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero_ext import _C
from zero_ext.engine.handle import Handle

BLOCK_NUMEL = 256
# A block whose elements are smaller is zero.
_SMALLEST_SCALE = 2.0**-96


class _Copy(NamedTuple):
    """Values that blocks stand for, as they were shown beside the parameter's states ``names``."""

    parameter: Tensor
    i: int
    names: tuple[str, ...]
    values: Tensor  # fp32 [numel], this rank's part
    shown: Tensor  # the same in the parameter's shape
    versions: tuple[int, int]
    codes: Tensor
    scales: Tensor

    def versions_now(self) -> tuple[int, int]:
        """Both versions: a write through a ShardTensor counts in its own alone."""
        return self.values._version, self.shown._version


class Views:
    """Makes them, and has the copies that were made since the last step.

    Owner: the states of an optimizer, which it does not refer to: views are made later.
    """

    def __init__(self, state: _C.OptimizerState, handle: Handle):
        self._state, self._handle = state, handle
        self._copies: list[_Copy] = []

    def make(self, names: tuple[str, ...], parameter: Tensor, i: int) -> dict[str, Tensor]:
        """The count of steps of parameter i if it is among ``names``, and its first states."""
        made = {"step": self._state.step(i)} if "step" in names else {}
        for k, name in enumerate(name for name in names if name != "step"):
            local, scales = self._state.slice(k, i), self._state.scales(k, i)
            values = local if scales is None else dequantized(local, scales)
            made[name] = self._handle.as_parameter(values, i, parameter)
            if scales is not None:
                copy = _Copy(parameter, i, names, values, made[name], (0, 0), local, scales)
                self._copies.append(copy._replace(versions=copy.versions_now()))
        return made

    def write_back(self) -> None:
        """Write the copies that a user has changed to the state."""
        for k, copy in enumerate(self._copies):
            if copy.versions_now() != copy.versions:
                quantize_(copy.values, copy.codes, copy.scales)
                self._copies[k] = copy._replace(versions=copy.versions_now())

    def take_copies(self) -> Iterable[_Copy]:
        """Give them up, after they were written back. One of each parameter."""
        self.write_back()
        copies, self._copies = self._copies, []
        return {copy.i: copy for copy in copies}.values()


def _multiple(place: float) -> float:
    """See Note [Dynamic map] in csrc/kernels/moments.h."""
    octave = math.floor(math.log2(place))
    return 16.0 ** (octave - 6) * (1 + 15 * (place / 2**octave - 1)) / 16


# Multiples of the scale that are not negative, and the borders between them.
_SIGNED = [0.0, *(_multiple(cell + 0.5) for cell in range(1, 128)), 1.0]
_SIGNED_BORDERS = [_multiple(float(cell)) for cell in range(1, 129)]
_UNSIGNED = [0.0, *(_multiple((cell + 1.5) / 2) for cell in range(1, 255)), 1.0]
_UNSIGNED_BORDERS = [_multiple((cell + 1.0) / 2) for cell in range(1, 256)]


@functools.cache
def _table(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The multiples by code, from the least code on, and the borders between magnitudes."""
    with torch.inference_mode(False):
        multiples = [-value for value in _SIGNED[:0:-1]] + _SIGNED[:-1] if signed else _UNSIGNED
        borders = _SIGNED_BORDERS if signed else _UNSIGNED_BORDERS
        return torch.tensor(multiples, device=device), torch.tensor(borders, device=device)


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 [numel].

    Args:
        codes: int8 or uint8 [numel].
        scales: fp32 [blocks].
    """
    signed = codes.dtype == torch.int8
    multiples, _ = _table(signed, codes.device)
    numbers = codes.long() + (128 if signed else 0)
    return multiples[numbers] * scales.repeat_interleave(BLOCK_NUMEL)[: codes.numel()]


def quantize_(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write the codes and scales of ``values``, fp32 [numel].

    What ``dequantized`` returned gives the same codes and scales.
    """
    if values.numel() == 0:
        return
    signed = codes.dtype == torch.int8
    _, borders = _table(signed, codes.device)
    padding = -values.numel() % BLOCK_NUMEL
    blocks = F.pad(values.detach(), (0, padding)).view(-1, BLOCK_NUMEL)
    positive, negative = blocks.amax(1), (-blocks).amax(1)
    largest = torch.maximum(positive, negative)
    largest = torch.where(largest < _SMALLEST_SCALE, 0.0, largest)
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    scale = torch.where(positive >= negative, -largest, largest) if signed else largest
    multiple = torch.where(scale == 0, 0.0, 1.0)[:, None] * (
        blocks / torch.where(scale == 0, 1.0, scale)[:, None]
    )
    cells = torch.searchsorted(borders, multiple.abs().contiguous(), right=True)
    numbers = torch.where(multiple < 0, -cells, cells.clamp(max=127)) if signed else cells
    codes.copy_(numbers.view(-1)[: codes.numel()])
    scales.copy_(scale)
