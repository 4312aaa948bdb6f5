// add_squares: *sum += Σ value[i]², by groups; see Note [A norm without an order] in square_sum.h.
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/add_squares.cu
//
// Memory bound: reads value once. A thread adds whole groups, whose sums have the bits of
// cpu/add_squares.cpp, and keeps four digits around their usual size. Integers have no order, so
// neither the grid nor the atomic additions can change the sum. Its digits equal those of the CPU
// only once the carries are done, see value_of.
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

using Digit = unsigned long long;  // what atomicAdd takes; wraps around as int64_t does

constexpr int kGroupNumel = static_cast<int>(kSquareGroupNumel);
constexpr int kLanes = 32;
constexpr int kWindow = 4;
// With fewer groups a block spends more time on its last additions than on its reads.
constexpr int64_t kGroupsPerThread = 4;

// Folds as cpu/add_squares.cpp does. A square of a float is exact in double, so that the fused
// multiply-add rounds as the addition does.
__device__ inline double fold(const float (&value)[kGroupNumel]) {
  double lane[kGroupNumel / 2];
#pragma unroll
  for (int j = 0; j < kGroupNumel / 2; ++j) {
    const double low = value[j];
    const double high = value[j + kGroupNumel / 2];
    lane[j] = __fma_rn(low, low, __dmul_rn(high, high));
  }
  const double even = __dadd_rn(__dadd_rn(lane[0], lane[4]), __dadd_rn(lane[2], lane[6]));
  const double odd = __dadd_rn(__dadd_rn(lane[1], lane[5]), __dadd_rn(lane[3], lane[7]));
  return __dadd_rn(even, odd);
}

template <int width>
__device__ inline double sum_of_group(const float* group) {
  float value[kGroupNumel];
#pragma unroll
  for (int k = 0; k < kGroupNumel; k += width) {
    const Pack<float, width> pack = load<width>(group + k);
#pragma unroll
    for (int j = 0; j < width; ++j) value[k + j] = pack.value[j];
  }
  return fold(value);
}

__device__ inline double sum_of_rest(const float* group, int64_t left) {
  float value[kGroupNumel];
#pragma unroll
  for (int k = 0; k < kGroupNumel; ++k) value[k] = k < left ? group[k] : 0;
  return fold(value);
}

// Digits `place` to place + kWindow - 1 of a thread's sum, in registers. A group of another size
// moves the window; its digits are first added to those of the block.
struct Window {
  static constexpr int32_t kNowhere = -1000;

  Digit digit[kWindow] = {};
  int32_t place = kNowhere;

  __device__ void flush(Digit* block) {
#pragma unroll
    for (int k = 0; k < kWindow; ++k) {
      if (digit[k] != 0) atomicAdd(block + place + k, digit[k]);
      digit[k] = 0;
    }
  }

  // `sum` is zero or at least 2^-298, the square of the smallest float.
  __device__ void add(double sum, Digit* block) {
    if (sum == 0) return;
    const auto bits = static_cast<Digit>(__double_as_longlong(sum));
    const auto exponent = static_cast<int32_t>(bits >> 52 & 0x7FF);
    const Digit fraction = bits & ((Digit{1} << 52) - 1);
    if (exponent == 0x7FF) {
      atomicAdd(block + (fraction == 0 ? kInfiniteGroups : kNanGroups), Digit{1});
      return;
    }
    // The sum is `mantissa` times 2^(first - 352).
    const Digit mantissa = fraction | Digit{1} << 52;
    const int32_t first = exponent - 1075 + 352;
    int32_t shift = first - 32 * place;
    if (shift < 0 || shift > 63) {
      flush(block);
      place = first < 16 ? 0 : (first - 16) / 32;  // leaves room for smaller and larger sums
      shift = first - 32 * place;
    }
    const Digit low = mantissa << shift;
    const Digit high = mantissa >> 1 >> (63 - shift);
    digit[0] += low & 0xFFFFFFFF;
    digit[1] += low >> 32;
    digit[2] += high & 0xFFFFFFFF;
    digit[3] += high >> 32;
  }

  __device__ Digit at(int32_t index) const {
    Digit found = 0;
#pragma unroll
    for (int k = 0; k < kWindow; ++k) found = place + k == index ? digit[k] : found;
    return found;
  }
};

// Every thread of a block calls it. Warps fold their digits before adding them to the block's.
__device__ inline void add_windows(const Window& window, Digit* block) {
  __shared__ int32_t lowest;
  __shared__ int32_t highest;
  if (threadIdx.x == 0) {
    lowest = kSquareDigits;
    highest = -1;
  }
  __syncthreads();
  if (window.place != Window::kNowhere) {
    atomicMin(&lowest, window.place);
    atomicMax(&highest, window.place + kWindow - 1);
  }
  __syncthreads();
  const int32_t last = highest;
  for (int32_t index = lowest; index <= last; ++index) {
    Digit sum = window.at(index);
#pragma unroll
    for (int half = kLanes / 2; half > 0; half /= 2) {
      sum += __shfl_down_sync(0xFFFFFFFFU, sum, half);
    }
    if (threadIdx.x % kLanes == 0 && sum != 0) atomicAdd(block + index, sum);
  }
}

template <int width>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    add_groups(const float* value, int64_t numel, int64_t groups, Digit* sum) {
  __shared__ Digit block[kSquareSumLength];
  if (threadIdx.x < kSquareSumLength) block[threadIdx.x] = 0;
  __syncthreads();
  Window window;
  for (int64_t g = thread_of_grid(); g < groups; g += threads_of_grid()) {
    const float* group = value + g * kGroupNumel;
    const int64_t left = numel - g * kGroupNumel;
    window.add(left < kGroupNumel ? sum_of_rest(group, left) : sum_of_group<width>(group), block);
  }
  add_windows(window, block);
  __syncthreads();
  if (threadIdx.x < kSquareSumLength) {
    const Digit digit = carried_digit(block, static_cast<int32_t>(threadIdx.x));
    if (digit != 0) atomicAdd(sum + threadIdx.x, digit);
  }
}

}  // namespace

Status add_squares_cuda(const float* value, int64_t numel, SquareSum* sum, const Launch& launch) {
  if (numel < 0 || numel > kMostSquares) return Status::bad_argument;
  if (numel == 0) return Status::ok;
  const int64_t groups = (numel - 1) / kSquareGroupNumel + 1;
  constexpr int64_t kGroupsPerBlock = kThreads * kGroupsPerThread;
  const int64_t blocks = (groups - 1) / kGroupsPerBlock + 1;
  const bool aligned = reinterpret_cast<uintptr_t>(value) % 16 == 0;
  return queue(launch, blocks, aligned ? add_groups<4> : add_groups<1>, value, numel, groups,
               reinterpret_cast<Digit*>(sum));
}

}  // namespace zero_ext::kernels
