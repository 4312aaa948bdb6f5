// Moments of Adam in fewer bits, for host and device: the dynamic map of 8-bit states, and rounding
// to bf16 at random. All of it is integers and fused multiply-adds, so that all devices get the
// same bits.
//
// Note [Dynamic map]
// A block of kBlockElements moments has one scale, and each moment is a multiple of it between -1
// and 1 (Dettmers et al. 2022). Of the 256 multiples, 0 and the end stand for themselves. The
// others are the middles of equal cells in seven ranges that end at 1, 1/16, 1/256, …:
//
//   64 cells from 1/16 to 1, 32 from 1/256 to 1/16, …      of a signed moment, for each sign
//   128 cells from 1/16 to 1, 64 from 1/256 to 1/16, …     of a moment without a sign
//
// Cells are counted from 1 on, so range e begins with cell 2^e: a cell's number, read as a float,
// has the range in its exponent, and the place within the range in its fraction. A multiple has the
// range in its exponent as well, because the ranges end at powers of 16. So both ways are a few
// operations on a float's bits. bitsandbytes has powers of 10, with a table for one way and a
// search for the other: by arithmetic an update with them takes a third longer.
//
// Both ways are half of an update's operations, so each is worth saving. The middle of a cell is an
// odd number of half cells, from 3 on. Floats from 2 on have the same first bit of the exponent. So
// one mask takes the range away from the place, and the last bit of the end's place, which makes it
// the end.
//
// The scale is that moment of the block that is largest in magnitude, so that it keeps all bits. Of
// the signed multiples only -1 is an end, so there the scale has the other sign. What is read from
// a block and written again gives the same codes and the same scale.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/elements.h"

namespace zero_ext::kernels {

ZERO_EXT_EVERYWHERE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

// The bits of the multiple at a place, which is counted in half cells. Exact. Negative where the
// place is below 2.
template <bool is_signed>
ZERO_EXT_EVERYWHERE int32_t multiple_at(float place) {
  constexpr int32_t kMask = is_signed ? 0x407F0000 : 0x407F8000;
  const float within = float_of(integer_of(place) & kMask);  // [2, 4) in each range
  // From [1/16, 1) on in the last range. The exponents' sum wraps around.
  constexpr float kUnit = is_signed ? 0x1p-25F : 0x1p-29F;
  const auto value =
      static_cast<uint32_t>(integer_of(fmaf(0.9375F * kUnit, within, -1.75F * kUnit)));
  const uint32_t range = static_cast<uint32_t>(integer_of(place)) >> 23 << 25;
  return static_cast<int32_t>(value + range);
}

// A code stands for a multiple of the scale. Code 0 is zero.
ZERO_EXT_EVERYWHERE float signed_multiple(int32_t code) {
  const auto number = static_cast<float>(code);
  const int32_t sign = integer_of(number) & INT32_MIN;
  const float place = fmaf(2.0F, number, float_of(sign | 0x3F800000));
  return float_of(greatest(multiple_at<true>(place), 0) | sign);
}

ZERO_EXT_EVERYWHERE float unsigned_multiple(int32_t code) {
  const auto number = static_cast<float>(code);
  const int32_t is_zero = number == 0 ? -1 : 0;
  return float_of(multiple_at<false>(fmaf(2.0F, number, 3.0F)) & ~is_zero);
}

// The bits of half of `doubled` in cells: its cell, and how far into it. At least 0.
ZERO_EXT_EVERYWHERE int32_t cells_of(int32_t doubled) {
  const float within = float_of((doubled & 0x01FFFFFF) | (31 << 25));  // [1/8, 2) in each range
  constexpr float kUnit = 0x1p-25F;
  const int32_t cells = integer_of(fmaf(8 * kUnit / 15, within, 14 * kUnit / 15));
  return cells + static_cast<int32_t>(static_cast<uint32_t>(doubled) >> 2 & 0x1F800000);
}

// The code of half of `doubled`, which is finite.
template <class Code>
ZERO_EXT_EVERYWHERE int32_t code_of(float doubled) {
  if constexpr (std::is_signed_v<Code>) {
    const int32_t bits = least(integer_of(doubled), 0x3FFEB852);  // 1.99, in the last cell
    return static_cast<int32_t>(float_of(cells_of(bits) | (bits & INT32_MIN)));
  } else {
    return static_cast<int32_t>(fmaf(2.0F, float_of(cells_of(integer_of(doubled))), -1.0F));
  }
}

// The scale of a block. `low`: the greatest of its elements' bits as unsigned integers, which puts
// negative elements last. `high`: the greatest of them as signed integers and of 0; only of a
// signed moment. A block that is smaller than 2^-96 becomes zero, so that no multiple is subnormal.
// One with NaN or infinity becomes NaN.
ZERO_EXT_EVERYWHERE float scale_of(int32_t high, uint32_t low, bool is_signed) {
  const auto magnitude = static_cast<int32_t>(low & INT32_MAX);
  const int32_t largest = greatest(high, magnitude);
  if (largest >= 0x7F800000) return float_of(0x7FC00000);
  if (largest < (31 << 23)) return 0;
  return is_signed && high >= magnitude ? -float_of(largest) : float_of(largest);
}

// Whether the elements of a block with this scale are coded. All codes of a block of NaN are 0.
ZERO_EXT_EVERYWHERE bool is_coded(float scale) { return scale == scale; }

// What a block's elements are multiplied by before they are coded. A bit more than the reciprocal,
// so that the largest element reaches the end.
ZERO_EXT_EVERYWHERE float reciprocal_of(float scale) {
  return scale == 0 || !is_coded(scale) ? 0 : (2 + 0x1p-19F) / scale;
}

// bf16 of `value`, rounded up with the probability of what is cut off, by random bits that are a
// hash of the value and the step's number. So the mean over steps is the value.
ZERO_EXT_EVERYWHERE uint16_t randomly_rounded(float value, uint32_t step) {
  const auto bits = static_cast<uint32_t>(integer_of(value));
  uint32_t hash = (bits ^ step * 0x9E3779B1U) * 0x85EBCA77U;
  hash = (hash ^ hash >> 15) * 0xC2B2AE3DU;
  hash ^= hash >> 13;
  const uint32_t rounded = (bits + (hash & 0xFFFFU)) >> 16;
  const bool is_finite = (bits & 0x7F800000U) != 0x7F800000U;
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  return static_cast<uint16_t>(is_finite ? rounded : is_nan ? 0x7FC0U : bits >> 16);
}

}  // namespace zero_ext::kernels
