// sum_of_squares: *result += Σ value[i]²
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/sum_of_squares.cpp
//
// Memory bound: reads value. A square of a float is exact in double. Order of the sum: blocks of
// 4,096 elements from index 0, then rows of 1,024 blocks. In a block and in a row, lane j of 32
// adds the terms j, j + 32, j + 64, … in order, then the lanes are folded in halves (j + 16, j + 8,
// j + 4, j + 2, j + 1). The rows are added to *result in order.
#include "kernels/cpu/elements.h"
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {
namespace {

constexpr int64_t kLanes = 32;

// Σ term(i), i < count.
template <class Fetch, class Term>
ZERO_EXT_BODY double sum_in_lanes(int64_t count, const Fetch& fetch, const Term& term) {
  double lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    fetch(i);
    for (int64_t j = 0; j < kLanes; ++j) lane[j] += term(i + j);
  }
  for (int64_t j = 0; i + j < count; ++j) lane[j] += term(i + j);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

// Blocks [begin, end) of one row.
struct SumOfSquares {
  const float* value;
  int64_t numel;
  double* block_sums;
  bool ahead;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    for (int64_t block = begin; block < end; ++block) {
      const float* first = value + block * kSquaresBlockNumel;
      const int64_t left = numel - block * kSquaresBlockNumel;
      block_sums[block] = sum_in_lanes(
          left < kSquaresBlockNumel ? left : kSquaresBlockNumel,
          [&](int64_t i) ZERO_EXT_BODY_LAMBDA {
            if (ahead) fetch_ahead(first + i, kLanes, left - i);
          },
          [first](int64_t i) ZERO_EXT_BODY_LAMBDA {
            return static_cast<double>(first[i]) * static_cast<double>(first[i]);
          });
    }
  }
};

}  // namespace

Status sum_of_squares_cpu(const float* value, int64_t numel, double* result, const Launch& launch) {
  if (numel < 0) return Status::bad_argument;
  constexpr int64_t kRowNumel = kSquaresRowBlocks * kSquaresBlockNumel;
  double block_sums[kSquaresRowBlocks];
  double sum = *result;
  for (int64_t i = 0; i < numel; i += kRowNumel) {
    const int64_t left = numel - i < kRowNumel ? numel - i : kRowNumel;
    const int64_t blocks = (left + kSquaresBlockNumel - 1) / kSquaresBlockNumel;
    run(launch, blocks, SumOfSquares{value + i, left, block_sums, fetches_ahead(FetchAhead::all)},
        kGrainNumel / kSquaresBlockNumel);
    sum += sum_in_lanes(blocks, [](int64_t) {}, [&](int64_t block) { return block_sums[block]; });
  }
  *result = sum;
  return Status::ok;
}

}  // namespace zero_ext::kernels
