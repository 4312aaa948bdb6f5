// add_squares: *sum += Σ value[i]², by groups; see Note [A norm without an order] in square_sum.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/add_squares.cpp
//
// Reads value once; a square of a float is exact in double.
#include <bit>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {
namespace {

constexpr int64_t kLanes = kSquareGroupNumel / 2;
// The number of groups that are brought into the L1 cache at once.
constexpr int64_t kGroupsPerRound = 128;

ZERO_EXT_BODY double square(float value) {
  return static_cast<double>(value) * static_cast<double>(value);
}

// groups[k] = the sum of the squares of group k. Made in passes over all groups; each pass is a
// loop that vectorises. `left`: groups from `value` on, as far as it may prefetch.
ZERO_EXT_BODY void sum_groups(const float* value, int64_t count, double* groups, int64_t left) {
  alignas(kLineBytes) double lanes[kGroupsPerRound * kLanes];
  for (int64_t k = 0; k < count; ++k) {
    const float* group = value + k * kSquareGroupNumel;
    if (left > 0) fetch_ahead(group, kSquareGroupNumel, (left - k) * kSquareGroupNumel);
    double* lane = lanes + k * kLanes;
    for (int64_t j = 0; j < kLanes; ++j) lane[j] = square(group[j]) + square(group[j + kLanes]);
  }
  for (int64_t k = 0; k < count; ++k) {
    const double* lane = lanes + k * kLanes;
    const double even = (lane[0] + lane[4]) + (lane[2] + lane[6]);
    const double odd = (lane[1] + lane[5]) + (lane[3] + lane[7]);
    groups[k] = even + odd;
  }
}

constexpr int64_t kInfinity = int64_t{0x7FF} << 52;
// Adding it to a double below 2^51 rounds that double to an integer, held in the low bits.
constexpr double kRounder = 0x1.8p52;

// 2^(32·digits), as a double.
ZERO_EXT_BODY double power_of_digit(int64_t digits) {
  return std::bit_cast<double>((1023 + 32 * digits) << 52);
}

ZERO_EXT_BODY int64_t largest_bits(const double* groups, int64_t count) {
  int64_t largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    const int64_t bits = std::bit_cast<int64_t>(groups[k]) & INT64_MAX;  // a NaN may have a sign
    largest = largest > bits ? largest : bits;
  }
  return largest;
}

ZERO_EXT_BODY void count_nonfinite(double* groups, int64_t count, int64_t* sum) {
  for (int64_t k = 0; k < count; ++k) {
    const int64_t bits = std::bit_cast<int64_t>(groups[k]) & INT64_MAX;
    if (bits < kInfinity) continue;
    ++sum[bits == kInfinity ? kInfiniteGroups : kNanGroups];
    groups[k] = 0;
  }
}

// Adds the sums of `count` groups to the digits. The highest digit that any sum has is split off
// all sums, then the next digit of the remainders, until nothing remains. Every step is exact.
ZERO_EXT_BODY void add_groups(double* groups, int64_t count, int64_t* sum) {
  int64_t largest = largest_bits(groups, count);
  if (largest >= kInfinity) {
    count_nonfinite(groups, count, sum);
    largest = largest_bits(groups, count);
  }
  if (largest == 0) return;
  // The digit that holds the first bit of the largest sum.
  int64_t place = ((largest >> 52) - 1023 + 352) >> 5;
  double unit = power_of_digit(11 - place);
  for (; place >= 0; --place) {
    int64_t digit = 0;
    int64_t left = 0;
    for (int64_t k = 0; k < count; ++k) {
      const double value = groups[k] * unit;
      const double rounded = value + kRounder;
      digit += std::bit_cast<int64_t>(rounded) - std::bit_cast<int64_t>(kRounder);
      groups[k] = value - (rounded - kRounder);
      left |= std::bit_cast<int64_t>(groups[k]) << 1;  // without the sign
    }
    sum[place] += digit;
    if (left == 0) return;
    unit = power_of_digit(1);
  }
}

struct AddSquares {
  const float* value;
  int64_t numel;
  int64_t* sum;
  bool ahead;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    int64_t digits[kSquareSumLength] = {};
    alignas(kLineBytes) double groups[kGroupsPerRound];
    const int64_t whole = numel / kSquareGroupNumel;
    const int64_t last = end < whole ? end : whole;
    for (int64_t g = begin, count = 0; g < last; g += count) {
      count = last - g < kGroupsPerRound ? last - g : kGroupsPerRound;
      sum_groups(value + g * kSquareGroupNumel, count, groups, ahead ? last - g : 0);
      add_groups(groups, count, digits);
    }
    if (end > whole) {  // the last group, which has fewer elements
      float rest[kSquareGroupNumel] = {};
      for (int64_t i = whole * kSquareGroupNumel, j = 0; i < numel; ++i, ++j) rest[j] = value[i];
      sum_groups(rest, 1, groups, 0);
      add_groups(groups, 1, digits);
    }
    // Other threads add their digits too, in any order, because digits are integers.
    for (int32_t k = 0; k < kSquareSumLength; ++k) {
      std::atomic_ref<int64_t>(sum[k]).fetch_add(carried_digit(digits, k),
                                                 std::memory_order_relaxed);
    }
  }
};

}  // namespace

Status add_squares_cpu(const float* value, int64_t numel, SquareSum* sum, const Launch& launch) {
  if (numel < 0 || numel > kMostSquares) return Status::bad_argument;
  const int64_t groups = (numel + kSquareGroupNumel - 1) / kSquareGroupNumel;
  return run(launch, groups, AddSquares{value, numel, sum->data(), fetches_ahead(FetchAhead::all)},
             kGrainNumel / kSquareGroupNumel);
}

}  // namespace zero_ext::kernels
