// sum_of_squares: *result += Σ value[i]²
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -c sum_of_squares_cuda.cu
//
// Memory bound up to some 10^8 elements; then the last step counts, one addition per 4,096
// elements, one after the other. The order is that of sum_of_squares_cpu.cpp, so the bits are too:
// within a block of 4,096 elements lane j of a warp adds the elements j, j + 32, j + 64, … in
// order, then the lanes are folded in halves, and the blocks are added to *result in order.
//
// A square of a float is exact in double, so that the fused multiply-add rounds as the addition.
#include "dispatch_cuda.h"
#include "kernels_cuda.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
// Loads that a lane has under way at once.
constexpr int kBatch = 16;
constexpr int kTileNumel = 2048;

__device__ inline double add_square(double sum, float value) {
  return __fma_rn(static_cast<double>(value), static_cast<double>(value), sum);
}

// One warp's sum of a block of `count` elements, in lane 0.
__device__ inline double block_sum(const float* block, int count, int lane) {
  double sum = 0;
  int i = lane;
  for (; i + (kBatch - 1) * kLanes < count; i += kBatch * kLanes) {
    float values[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) values[k] = block[i + k * kLanes];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) sum = add_square(sum, values[k]);
  }
  for (; i < count; i += kLanes) sum = add_square(sum, block[i]);
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    sum = __dadd_rn(sum, __shfl_down_sync(0xFFFFFFFFU, sum, half));
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    sum_blocks(const float* value, int64_t numel, int64_t blocks, double* block_sums) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t warp = thread_of_grid() / kLanes;
  const int64_t warps = threads_of_grid() / kLanes;
  for (int64_t block = warp; block < blocks; block += warps) {
    const int64_t begin = block * kSquaresBlockNumel;
    const int64_t left = numel - begin;
    const int count = static_cast<int>(left < kSquaresBlockNumel ? left : kSquaresBlockNumel);
    const double sum = block_sum(value + begin, count, lane);
    if (lane == 0) block_sums[block] = sum;
  }
}

// One block: all threads fetch, one adds.
__global__ void __launch_bounds__(kThreads)
    add_in_order(const double* block_sums, int64_t blocks, double* result) {
  __shared__ double tile[kTileNumel];
  double sum = threadIdx.x == 0 ? *result : 0;
  for (int64_t first = 0; first < blocks; first += kTileNumel) {
    const int64_t left = blocks - first;
    const int count = static_cast<int>(left < kTileNumel ? left : kTileNumel);
    for (int i = threadIdx.x; i < count; i += kThreads) tile[i] = block_sums[first + i];
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 8
      for (int i = 0; i < count; ++i) sum = __dadd_rn(sum, tile[i]);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *result = sum;
}

}  // namespace

Status sum_of_squares_cuda(const float* value, int64_t numel, double* result,
                           const Launch& launch) {
  const int64_t scratch_numel = launch.scratch == nullptr ? 0 : launch.scratch_bytes / 8;
  if (numel < 0 || (numel > 0 && scratch_numel < 1)) return Status::bad_argument;
  auto* block_sums = static_cast<double*>(launch.scratch);
  // At most 2^62 elements a round: the product must not overflow.
  constexpr int64_t kMostBlocks = int64_t{1} << 50;
  const int64_t round_blocks = scratch_numel < kMostBlocks ? scratch_numel : kMostBlocks;
  const int64_t round_numel = round_blocks * kSquaresBlockNumel;
  for (int64_t i = 0; i < numel; i += round_numel) {
    const int64_t left = numel - i < round_numel ? numel - i : round_numel;
    const int64_t blocks = (left + kSquaresBlockNumel - 1) / kSquaresBlockNumel;
    const Status status = queue(launch, (blocks + kWarps - 1) / kWarps, sum_blocks, value + i, left,
                                blocks, block_sums);
    if (status != Status::ok) return status;
    const Status added = queue(launch, /*blocks_wanted=*/1, add_in_order,
                               static_cast<const double*>(block_sums), blocks, result);
    if (added != Status::ok) return added;
  }
  return Status::ok;
}

}  // namespace zero_ext::kernels
