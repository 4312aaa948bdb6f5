"""AdamW with moments in fewer bits, in one process of plain torch: tables, searches and doubles."""

import torch
from torch import Tensor

BLOCK = 256
SMALLEST_IN_BLOCKS = 4096  # elements of a parameter
FORMS = ["bf16", "int8"]


def f32(value: float) -> float:
    """A Python float that is one of fp32."""
    return float(torch.tensor(value, dtype=torch.float32))


def fma(a, b, c) -> Tensor:
    """One rounding: a product of two fp32 values is exact in double."""
    a, b, c = (x.double() if isinstance(x, Tensor) else f32(x) for x in (a, b, c))
    return (a * b + c).float()


def multiples(signed: bool) -> Tensor:
    """The dynamic map as bitsandbytes makes it, with powers of 16: fp64, ascending from 0 to 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        cells = 2 ** (decade if signed else decade + 1)
        borders = torch.linspace(1 / 16, 1, cells + 1, dtype=torch.float64, device="cpu")
        values += (16.0 ** (decade - 6) * (borders[:-1] + borders[1:]) / 2).tolist()
    return torch.tensor(sorted(values), dtype=torch.float64, device="cpu")


def code_of(doubled: Tensor, signed: bool) -> Tensor:
    """The cell of half of ``doubled``, which is not negative."""
    exponent = torch.frexp(doubled)[1]
    group = torch.div(exponent + 2, 4, rounding_mode="floor")
    within = torch.ldexp(doubled, -4 * group)
    place = torch.ldexp(fma(within, 8 / 15, 14 / 15), 6 + group)
    cell = place if signed else 2 * place - 1
    return torch.where(doubled == 0, 0, cell.long().clamp(min=0))


class Blocks:
    """A moment as codes and scales, from the value 0 on."""

    def __init__(self, numel: int, signed: bool):
        self.numel, self.signed = numel, signed
        count = -(-numel // BLOCK)
        self.codes = torch.zeros(count, BLOCK, dtype=torch.long)
        self.scales = torch.zeros(count)

    def read(self) -> Tensor:
        magnitude = multiples(self.signed)[self.codes.abs()].float()
        values = self.scales[:, None] * torch.where(self.codes < 0, -magnitude, magnitude)
        return values.flatten()[: self.numel]

    def write(self, moment: Tensor) -> None:
        blocks = torch.zeros(self.codes.numel())
        blocks[: self.numel] = moment
        blocks = blocks.view_as(self.codes)
        largest = blocks.abs().amax(1)
        largest[largest < 2.0**-96] = 0
        has_positive = (blocks == largest[:, None]).any(1)
        self.scales = torch.where(has_positive, -largest, largest) if self.signed else largest
        reciprocal = torch.where(self.scales == 0, 0, torch.tensor(2 + 2.0**-19).div(self.scales))
        doubled = reciprocal[:, None] * blocks
        cell = code_of(doubled.abs(), self.signed)
        self.codes = torch.where(doubled < 0, -cell, cell.clamp(max=127)) if self.signed else cell


class Rounded:
    """A moment in bf16."""

    def __init__(self, numel: int):
        self.values = torch.zeros(numel, dtype=torch.bfloat16)

    def read(self) -> Tensor:
        return self.values.float()

    def write(self, moment: Tensor, step: int) -> None:
        bits = moment.view(torch.int32).long() & 0xFFFFFFFF
        mask = 0xFFFFFFFF
        mixed = ((bits ^ (step * 0x9E3779B1 & mask)) * 0x85EBCA77) & mask
        mixed = ((mixed ^ (mixed >> 15)) * 0xC2B2AE3D) & mask
        mixed ^= mixed >> 13
        rounded = (bits + (mixed & 0xFFFF)) >> 16
        rounded = torch.where(rounded >= 2**15, rounded - 2**16, rounded).to(torch.int16)
        self.values = rounded.view(torch.bfloat16)


class Exact:
    def __init__(self, numel: int):
        self.values = torch.zeros(numel)

    def read(self) -> Tensor:
        return self.values

    def write(self, moment: Tensor) -> None:
        self.values = moment


class StoredAdamW:
    """Steps one fp32 parameter, flat, on the CPU: a GPU's quotients may be off by one place."""

    def __init__(self, value: Tensor, form: str, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, decay=1e-2):
        self.value, self.form = value.detach().to("cpu", copy=True).flatten(), form
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.steps = 0
        with torch.device("cpu"):
            self.first, self.second = self._zeros(True), self._zeros(False)

    def _zeros(self, signed: bool):
        numel = self.value.numel()
        if self.form == "bf16":
            return Rounded(numel)
        if self.form == "int8" and numel >= SMALLEST_IN_BLOCKS:
            return Blocks(numel, signed)
        return Exact(numel)

    def step(self, grad: Tensor) -> None:
        with torch.device("cpu"):
            self._step(grad.cpu())

    def _step(self, grad: Tensor) -> None:
        self.steps += 1
        g, p, (b1, b2) = grad.flatten(), self.value, self.betas
        p = p - f32(self.lr * self.decay) * p
        before = self.first.read()
        m = fma(g - before, 1 - b1, before)
        v = fma(g * g, 1 - b2, f32(b2) * self.second.read())
        correction = f32((1 - b2**self.steps) ** 0.5)
        # torch.sqrt() of fp32 may be off by one place.
        denominator = v.double().sqrt().float() / correction + f32(self.eps)
        self.value = p - f32(self.lr / (1 - b1**self.steps)) * m / denominator
        more = (self.steps,) if self.form == "bf16" else ()
        self.first.write(m, *more)
        self.second.write(v, *more)
