// SquareSum: a sum of squares as a fixed-point number, so that its order cannot matter.
//
// Note [A norm without an order]
// The norm of the gradients must have the same bits for any number of ranks and threads, wherever
// ranges begin. But sums of doubles depend on their order. So groups of 16 neighbouring squares are
// added in double in a fixed order, and these small sums are added as integers, in any order.
// Sixteen, because every range and every parameter begins at a multiple of 16 elements (64 bytes of
// fp32, see Layout). So no group lies in two ranges.
// Rejected: larger blocks whose sums are added in order. Blocks that lie in two ranges would need
// their groups sent.
// Rejected: summing all squares as integers, which is ten times the work for no more order.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "kernels/host_device.h"

namespace zero_ext::kernels {

// The number of elements whose squares are added in double. Lane j of 8 holds elements j and j + 8.
// Then the lanes are folded in halves (j + 4, j + 2, j + 1). Elements that are missing at the end
// of a parameter count as zero.
constexpr int64_t kSquareGroupNumel = 16;

// Digit k of base 2^32 is worth 2^(32k - 352). Digits cover two extremes:
//
//   2^-298   the square of the smallest subnormal
//   2^292    the squares of 2^32 groups of the largest float
//
// Digits may exceed their base until they are read. A thread or block of add_squares adds its own
// digits to the sum with their carries moved up by one digit, see carried_digit(). Each addition is then
// below 2^33, so that 2^30 of them fit together, of any number of ranks. A full block has 2^14
// elements or more: 2^44 elements in all. One call takes 2^35 elements at most.
constexpr int64_t kMostSquares = int64_t{1} << 35;
constexpr int32_t kSquareDigits = 22;
constexpr int32_t kInfiniteGroups = kSquareDigits;  // the number of groups with an infinity
constexpr int32_t kNanGroups = kSquareDigits + 1;   // the number of groups with a NaN
constexpr int32_t kSquareSumLength = kSquareDigits + 2;

using SquareSum = std::array<int64_t, kSquareSumLength>;

// What `digits` adds to digit k of another sum: the carries move up by one. `Digit`: signed, or
// unsigned on a device.
template <typename Digit>
ZERO_EXT_EVERYWHERE Digit carried_digit(const Digit* digits, int32_t k) {
  if (k >= kSquareDigits) return digits[k];
  const Digit own = k + 1 < kSquareDigits ? digits[k] & 0xFFFFFFFF : digits[k];
  return k == 0 ? own : own + (digits[k - 1] >> 32);
}

// The sum as a double, to within two units of its last place. NaN or infinite wherever a
// floating-point sum would be.
ZERO_EXT_EVERYWHERE double value_of(const SquareSum& digits) {
  const int64_t* sum = reinterpret_cast<const int64_t*>(&digits);  // std::array is for the host
  if (sum[kNanGroups] != 0) return std::nan("");
  if (sum[kInfiniteGroups] != 0) return HUGE_VAL;
  // Equal sums from different orders have equal digits only once the carries are done.
  double value = 0;
  int64_t carry = 0;
  for (int32_t k = 0; k < kSquareDigits; ++k) {
    const int64_t digit = sum[k] + carry;
    value += std::ldexp(static_cast<double>(digit & 0xffffffff), 32 * k - 352);
    carry = digit >> 32;
  }
  return value;
}

// See Kernels::clip_factor.
ZERO_EXT_EVERYWHERE float clipping_factor(const SquareSum& sum, double max_norm, float* norm) {
  const double value = std::sqrt(value_of(sum));
  *norm = static_cast<float>(value);
  if (!std::isfinite(value)) return 1.0F;
  const double factor = max_norm / (value + 1e-6);
  return factor < 1 ? static_cast<float>(factor) : 1.0F;
}

}  // namespace zero_ext::kernels
