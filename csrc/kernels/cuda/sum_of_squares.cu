// sum_of_squares: *result += Σ value[i]²
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/sum_of_squares.cu
//
// Memory bound: reads value. The order is that of sum_of_squares_cpu.cpp, a warp for its lanes, so
// the bits are too.
//
// A square of a float is exact in double, so that a multiplication and an addition round as a fused
// one would.
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
// Loads that a lane has under way at once.
constexpr int kBatch = 16;

// The terms of a block are squares, those of a row are sums of blocks.
__device__ inline double term_of(float value) {
  return __dmul_rn(static_cast<double>(value), static_cast<double>(value));
}
__device__ inline double term_of(double block_sum) { return block_sum; }

// Σ term_of(values[i]), i < count, by one warp; in lane 0.
template <class T>
__device__ inline double sum_in_lanes(const T* values, int count, int lane) {
  double sum = 0;
  int i = lane;
  for (; i + (kBatch - 1) * kLanes < count; i += kBatch * kLanes) {
    T batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) batch[k] = values[i + k * kLanes];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) sum = __dadd_rn(sum, term_of(batch[k]));
  }
  for (; i < count; i += kLanes) sum = __dadd_rn(sum, term_of(values[i]));
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    sum = __dadd_rn(sum, __shfl_down_sync(0xFFFFFFFFU, sum, half));
  }
  return sum;
}

// sums[g * stride] = Σ over the values of group g, a warp for each group. The sums may lie where
// the group's first value does.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_groups(const T* values, int64_t numel, int64_t group_numel, double* sums, int64_t stride) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t groups = (numel + group_numel - 1) / group_numel;
  for (int64_t g = thread_of_grid() / kLanes; g < groups; g += threads_of_grid() / kLanes) {
    const int64_t left = numel - g * group_numel;
    const int count = static_cast<int>(left < group_numel ? left : group_numel);
    const double sum = sum_in_lanes(values + g * group_numel, count, lane);
    if (lane == 0) sums[g * stride] = sum;
  }
}

// One addition per 2^22 elements, in order.
__global__ void add_rows(const double* block_sums, int64_t blocks, double* result) {
  if (thread_of_grid() != 0) return;
  double sum = *result;
#pragma unroll 8
  for (int64_t i = 0; i < blocks; i += kSquaresRowBlocks) sum = __dadd_rn(sum, block_sums[i]);
  *result = sum;
}

int64_t blocks_of_warps(int64_t warps) { return (warps + kWarps - 1) / kWarps; }

}  // namespace

Status sum_of_squares_cuda(const float* value, int64_t numel, double* result,
                           const Launch& launch) {
  if (numel < 0) return Status::bad_argument;
  if (numel == 0) return Status::ok;
  if (launch.scratch == nullptr || launch.scratch_bytes < sum_of_squares_scratch_bytes(numel)) {
    return Status::bad_argument;
  }
  auto* block_sums = static_cast<double*>(launch.scratch);
  const int64_t blocks = (numel - 1) / kSquaresBlockNumel + 1;
  const int64_t rows = (blocks - 1) / kSquaresRowBlocks + 1;
  const Status summed = queue(launch, blocks_of_warps(blocks), sum_groups<float>, value, numel,
                              kSquaresBlockNumel, block_sums, int64_t{1});
  if (summed != Status::ok) return summed;
  const double* read_sums = block_sums;
  const Status folded = queue(launch, blocks_of_warps(rows), sum_groups<double>, read_sums, blocks,
                              kSquaresRowBlocks, block_sums, kSquaresRowBlocks);
  if (folded != Status::ok) return folded;
  return queue(launch, /*blocks_wanted=*/1, add_rows, read_sums, blocks, result);
}

}  // namespace zero_ext::kernels
