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
// The scale is that moment of the block that is largest in magnitude, so that it keeps all bits. Of
// the signed multiples only -1 is an end, so there the scale has the other sign. What is read from
// a block and written again gives the same codes and the same scale.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/kernels.h"

#if defined(__CUDACC__)
#define ZERO_EXT_EVERYWHERE __host__ __device__ __forceinline__
#else
#define ZERO_EXT_EVERYWHERE inline __attribute__((always_inline))
#endif

namespace zero_ext::kernels {

ZERO_EXT_EVERYWHERE int32_t integer_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(value);
#else
  return std::bit_cast<int32_t>(value);
#endif
}

ZERO_EXT_EVERYWHERE float float_of(int32_t bits) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

// Comparing as integers orders positive floats, and puts NaN last.
ZERO_EXT_EVERYWHERE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
ZERO_EXT_EVERYWHERE int32_t greatest(int32_t a, int32_t b) { return a > b ? a : b; }

// The multiple in the middle of a cell, or at the end. Exact. `number`: of the cell, an integer.
// `first_range`: in the cell's exponent.
template <int first_range>
ZERO_EXT_EVERYWHERE float multiple_of_cell(float number) {
  const int32_t place = integer_of(number + 0.5F);
  const float within = float_of((place & 0x007FFFFF) | 0x3F800000);  // [1, 2) in each range
  // From [1/16, 1) on in the last range. The exponents' sum wraps around.
  constexpr float kUnit = first_range == 0 ? 0x1p-20F : 0x1p-24F;
  const auto value =
      static_cast<uint32_t>(integer_of(fmaf(0.9375F * kUnit, within, -0.875F * kUnit)));
  const uint32_t range = static_cast<uint32_t>(place) >> 23 << 25;
  return float_of(least(static_cast<int32_t>(value + range), 0x3F800000));
}

// A code stands for a multiple of the scale. Cell 0 is zero.
ZERO_EXT_EVERYWHERE float signed_multiple(int32_t code) {
  const auto number = static_cast<float>(code);
  const float magnitude = float_of(integer_of(number) & INT32_MAX);
  const int32_t is_zero = (magnitude == 0 ? -1 : 0);
  const int32_t sign = integer_of(number) & INT32_MIN;
  return float_of((integer_of(multiple_of_cell<0>(magnitude)) & ~is_zero) | sign);
}

ZERO_EXT_EVERYWHERE float unsigned_multiple(int32_t code) {
  const float multiple = multiple_of_cell<1>(static_cast<float>(code + 1));
  return float_of(integer_of(multiple) & -code >> 31);
}

// The cell of half of `doubled`, and how far into it: at least 0.
ZERO_EXT_EVERYWHERE float place_of(float doubled) {
  const int32_t bits = least(integer_of(doubled) & INT32_MAX, 0x40200000);
  const float within = float_of((bits & 0x01FFFFFF) | (31 << 25));  // [1/8, 2) in each range
  constexpr float kUnit = 0x1p-25F;
  const int32_t place = integer_of(fmaf(8 * kUnit / 15, within, 14 * kUnit / 15));
  return float_of(place + ((bits >> 2) & 0x7F800000));
}

// The code of half of `doubled`.
template <class Code>
ZERO_EXT_EVERYWHERE int32_t code_of(float doubled) {
  const float place = place_of(doubled);
  if constexpr (std::is_signed_v<Code>) {
    const int32_t sign = integer_of(doubled) & INT32_MIN;
    return least(static_cast<int32_t>(float_of(integer_of(place) | sign)), 127);
  } else {
    return static_cast<int32_t>(fmaf(2.0F, place, -1.0F));
  }
}

// The scale of a block whose largest positive element and largest negative one, its sign changed,
// have these bits, or 0 where there is none. A block that is smaller than 2^-96 becomes zero, so
// that no multiple is subnormal. One with NaN or infinity becomes NaN.
ZERO_EXT_EVERYWHERE float scale_of(int32_t positive, int32_t negative, bool is_signed) {
  const int32_t largest = greatest(positive, negative);
  if (largest >= 0x7F800000) return float_of(0x7FC00000);
  if (largest < (31 << 23)) return 0;
  return is_signed && positive >= negative ? -float_of(largest) : float_of(largest);
}

// What a block's elements are multiplied by before they are coded. A bit more than the reciprocal,
// so that the largest element reaches the end.
ZERO_EXT_EVERYWHERE float reciprocal_of(float scale) {
  return scale == 0 ? 0 : (2 + 0x1p-19F) / scale;
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
