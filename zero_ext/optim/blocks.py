"""States in blocks (``state_dtype="int8"``): the values that codes and scales stand for."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_NUMEL = 256
# A block whose elements are smaller is zero.
_SMALLEST_SCALE = 2.0**-96


def _multiple(place: float) -> float:
    """See Note [Dynamic map] in csrc/kernels/moments.h."""
    octave = math.floor(math.log2(place))
    return 16.0 ** (octave - 6) * (1 + 15 * (place / 2**octave - 1)) / 16


@functools.cache
def _table(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The multiples by code, from the least code on, and the borders between magnitudes."""
    cells = range(1, 129 if signed else 256)
    parts, first = (1, 0) if signed else (2, 1)  # an unsigned code has half a cell
    borders = [_multiple((cell + first) / parts) for cell in cells]
    magnitudes = [_multiple((cell + first + 0.5) / parts) for cell in cells[:-1]]
    multiples = [0.0, *magnitudes, 1.0]
    if signed:
        multiples = [-value for value in multiples[:0:-1]] + multiples[:-1]
    with torch.inference_mode(False):
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
