// find_nonfinite, per segment: *nonfinite = 1 if any value is NaN or infinite
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/find_nonfinite.cu
//
// Memory bound: reads the values.
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

struct FindNonfinite {
  static constexpr int kWidth = vector_numel<float>();
  static constexpr int kUnroll = 2;

  const float* value;

  template <int N>
  using Loaded = Pack<float, N>;

  __device__ int64_t head(int64_t numel) const { return head_numel<kWidth>(numel, value); }

  template <int N>
  __device__ Loaded<N> load(int64_t i) const {
    return device::load<N>(value + i);
  }

  template <int N>
  __device__ int32_t finish(int64_t /*i*/, const Loaded<N>& loaded) const {
    int32_t largest = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) largest = greatest(largest, magnitude_bits(loaded.value[k]));
    return largest;
  }
};

// A piece is one round of a block's loads, and eight blocks are all the threads of a multiprocessor.
// So a short array, too, is read by all of them at once.
template <class List>
__global__ void __launch_bounds__(kThreads, 8) find(const __grid_constant__ List list) {
  for_each_piece(list, [&](const ReadSegment& segment, int64_t begin, int64_t numel) {
    const FindNonfinite body{segment.value + begin};
    report_nonfinite(walk(body, numel, threadIdx.x, blockDim.x), segment.nonfinite);
  });
}

}  // namespace

Status find_nonfinite_cuda(const ReadSegment* segments, int64_t count, const Launch& launch) {
  return run_pieces<kShortPieceNumel>(segments, count, [&]<class List>(const List& list) {
    return queue(launch, list.pieces, find<List>, list);
  });
}

}  // namespace zero_ext::kernels
