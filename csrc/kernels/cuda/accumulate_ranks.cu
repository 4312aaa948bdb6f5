// accumulate_ranks: s      = fresh ? 0 : sum[i]
//                   s      = fma(scale, float(grads[rank][i]), s)     for each rank in order
//                   sum[i] = s
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/accumulate_ranks.cu
//
// Memory bound: reads every rank's gradient once, reads (unless fresh) and writes sum once.
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

// Pointers that are passed in the parameters of a launch. More ranks take several launches, with
// the same bits, because the sum in between is stored without rounding.
constexpr int kFewRanks = 16;
constexpr int kManyRanks = 1024;

template <class T, bool fresh, int capacity>
struct AccumulateRanks {
  static constexpr int kWidth = vector_numel<T, float>();
  static constexpr int kUnroll = 1;
  // The gradients of this many ranks are loaded before the first of them is added.
  static constexpr int kRankUnroll = 4;

  const T* grads[capacity];
  int32_t ranks;
  float* sum;
  float scale;

  template <int N>
  using Loaded = Pack<float, N>;

  __device__ int64_t head(int64_t numel) const {
    int64_t head = head_numel<kWidth>(numel, sum);
    for (int32_t rank = 0; rank < ranks; ++rank) {
      if (head_numel<kWidth>(numel, grads[rank], sum) != head) return numel;
    }
    return head;
  }

  template <int N>
  __device__ Loaded<N> load(int64_t i) const {
    if constexpr (fresh) {
      return {};
    } else {
      return device::load<N>(sum + i);
    }
  }

  template <int N>
  __device__ static void add(Pack<float, N>& total, const Pack<T, N>& grad, float scale) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      total.value[k] = fmaf(scale, to_float(grad.value[k]), total.value[k]);
    }
  }

  // A gradient that is the sum itself is read before the sum is written, by the same thread.
  template <int N>
  __device__ int32_t finish(int64_t i, Pack<float, N> total) const {
    for (int32_t rank = 0; rank < ranks; rank += kRankUnroll) {
      Pack<T, N> grad[kRankUnroll];
#pragma unroll
      for (int k = 0; k < kRankUnroll; ++k) {
        if (rank + k < ranks) grad[k] = device::load<N>(grads[rank + k] + i);
      }
#pragma unroll
      for (int k = 0; k < kRankUnroll; ++k) {
        if (rank + k < ranks) add(total, grad[k], scale);
      }
    }
    store(sum + i, total);
    int32_t largest = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) largest = greatest(largest, magnitude_bits(total.value[k]));
    return largest;
  }
};

struct Call {
  const void* const* grads;
  int32_t ranks;
  float* sum;
  int64_t numel;
  float scale;
  int32_t* nonfinite;
};

template <class T, bool fresh, int capacity>
Status launch_ranks(const Call& call, const Launch& launch) {
  AccumulateRanks<T, fresh, capacity> body{};
  for (int32_t rank = 0; rank < call.ranks; ++rank) {
    body.grads[rank] = static_cast<const T*>(call.grads[rank]);
  }
  body.ranks = call.ranks;
  body.sum = call.sum;
  body.scale = call.scale;
  return run(launch, call.numel, body, call.nonfinite);
}

template <class T, bool fresh>
Status run_ranks(const Call& call, const Launch& launch) {
  return call.ranks <= kFewRanks ? launch_ranks<T, fresh, kFewRanks>(call, launch)
                                 : launch_ranks<T, fresh, kManyRanks>(call, launch);
}

}  // namespace

Status accumulate_ranks_cuda(const void* const* grads, int32_t ranks, DType dtype, float* sum,
                             int64_t numel, float scale, bool fresh, int32_t* nonfinite,
                             const Launch& launch) {
  if (numel < 0 || ranks < 1) return Status::bad_argument;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    // A later launch would read the sum of the earlier ranks as this gradient.
    const bool is_legal = dtype == DType::f32 && rank < kManyRanks;
    if (grads[rank] == sum && !is_legal && numel > 0) return Status::bad_argument;
  }
  return with_element(dtype, [&]<class T>(T) {
    Status status = Status::ok;
    for (int32_t rank = 0; rank < ranks && status == Status::ok; rank += kManyRanks) {
      const int32_t part = ranks - rank < kManyRanks ? ranks - rank : kManyRanks;
      const Call call{grads + rank, part, sum, numel, scale, nonfinite};
      status =
          fresh && rank == 0 ? run_ranks<T, true>(call, launch) : run_ranks<T, false>(call, launch);
    }
    return status;
  });
}

}  // namespace zero_ext::kernels
