"""Data for tests of kernels, comparisons of bits, and the instruction sets that can be used."""

import functools

import torch

import zero_ext  # noqa: F401 (defines the ops)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}


def usable_instruction_sets() -> list[str]:
    usable = []
    for name in ["baseline", "avx2", "avx512"]:
        try:
            previous = torch.ops.zero_ext._use_instruction_set(name)
        except RuntimeError:
            continue
        torch.ops.zero_ext._use_instruction_set(previous)
        usable.append(name)
    return usable


SETS = usable_instruction_sets()


# Some processors want to be told what to fetch ahead: every other instruction set is tested so.
WALKS = [(name, "all" if place % 2 == 0 else "none") for place, name in enumerate(SETS)]


def values(numel: int, dtype=torch.float32, offset: int = 0) -> torch.Tensor:
    """Random values over many magnitudes, starting `offset` elements after an aligned address."""
    count = numel + offset
    pool = _pool(torch.get_default_device())
    start = int(torch.randint(len(pool) - count, (), device="cpu"))
    return pool[start : start + count].to(dtype, copy=True)[offset:]


@functools.cache
def _pool(device: torch.device) -> torch.Tensor:
    """Values are ranges of it: making them anew took most of the time of the tests.

    It is the same whichever test asks first, and leaves the test's own generator alone.
    """
    numel, own = 2**22, torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-8, 8, (numel,), generator=own, device="cpu"))
    return (torch.randn(numel, generator=own, device="cpu") * spread).to(device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, except that any NaN equals any NaN."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and same_bits(a[~nan], b[~nan])


def special_floats() -> torch.Tensor:
    """Random bit patterns, subnormals, ties, overflow, NaN payloads, both signs."""
    patterns = [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]
    patterns += [0x7FFFFFFF, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FF001, 0x33000000, 0x33000001]
    patterns += [0x33800000, 0x387FC000, 0x387FE000, 0x387FF000, 0x38800000, 0x3F808000, 0x3F818000]
    patterns += [0x3F807FFF, 0x3F808001, 0x7F7F7FFF, 0x7F7F8000, 0x3F801000, 0x3F803000, 0x3F801001]
    edges = torch.tensor(patterns, dtype=torch.int64)
    random = torch.randint(0, 2**31, (200_000,), dtype=torch.int64)
    # The float16 range, where rounding and subnormals happen, is a small part of all patterns.
    narrow = torch.randint(0x32000000, 0x48000000, (200_000,), dtype=torch.int64)
    ties = torch.randint(0x3200, 0x4800, (50_000,), dtype=torch.int64) * 0x10000 + 0x1000
    positive = torch.cat([edges, random, narrow, ties, ties | 0x8000])
    return torch.cat([positive, positive - 2**31]).to(torch.int32).view(torch.float32)


def all_half_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
