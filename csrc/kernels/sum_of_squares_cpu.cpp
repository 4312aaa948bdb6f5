// sum_of_squares: *result += Σ value[i]²
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -c sum_of_squares_cpu.cpp
//
// Memory bound: reads value. A square of a float is exact in double. Order of the sum: blocks of
// 4,096 elements from index 0; within a block lane j of 32 adds the elements j, j + 32, j + 64, …
// in order, then the lanes are folded in halves (j + 16, j + 8, j + 4, j + 2, j + 1); the blocks
// are added to *result in order.
#include "elements_cpu.h"
#include "kernels_cpu.h"

namespace zero_ext::kernels {
namespace {

constexpr int64_t kLanes = 32;
// Blocks whose sums wait on the stack to be added in order.
constexpr int64_t kBlocksPerRound = 1024;

ZERO_EXT_BODY double square(float value) {
  return static_cast<double>(value) * static_cast<double>(value);
}

struct SumOfSquares {
  const float* value;
  int64_t numel;
  double* block_sums;

  ZERO_EXT_BODY double block_sum(const float* block, int64_t count) const {
    double lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int64_t j = 0; j < kLanes; ++j) lane[j] += square(block[i + j]);
    }
    for (int64_t j = 0; i + j < count; ++j) lane[j] += square(block[i + j]);
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t j = 0; j < half; ++j) lane[j] += lane[j + half];
    }
    return lane[0];
  }

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t i = block * kSquaresBlockNumel;
      const int64_t left = numel - i;
      block_sums[block] =
          block_sum(value + i, left < kSquaresBlockNumel ? left : kSquaresBlockNumel);
    }
  }
};

}  // namespace

Status sum_of_squares_cpu(const float* value, int64_t numel, double* result, const Launch& launch) {
  if (numel < 0) return Status::bad_argument;
  constexpr int64_t kRoundNumel = kBlocksPerRound * kSquaresBlockNumel;
  double block_sums[kBlocksPerRound];
  double sum = *result;
  for (int64_t i = 0; i < numel; i += kRoundNumel) {
    const int64_t left = numel - i < kRoundNumel ? numel - i : kRoundNumel;
    const int64_t blocks = (left + kSquaresBlockNumel - 1) / kSquaresBlockNumel;
    run(launch, blocks, SumOfSquares{value + i, left, block_sums},
        kGrainNumel / kSquaresBlockNumel);
    for (int64_t block = 0; block < blocks; ++block) sum += block_sums[block];
  }
  *result = sum;
  return Status::ok;
}

}  // namespace zero_ext::kernels
