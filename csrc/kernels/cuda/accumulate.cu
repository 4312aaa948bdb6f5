// accumulate, accumulate_list: sum[i] = fma(scale, float(grad[i]), fresh ? 0 : sum[i])
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/accumulate.cu
//
// Memory bound: reads grad, reads (unless fresh) and writes sum.
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

template <class T, bool fresh>
struct Accumulate {
  static constexpr int kWidth = vector_numel<T, float>();
  static constexpr int kUnroll = 4;

  const T* grad;
  float* sum;
  float scale;

  template <int N>
  struct Loaded {
    Pack<T, N> grad;
    Pack<float, N> sum;  // undefined where fresh
  };

  __device__ int64_t head(int64_t numel) const { return head_numel<kWidth>(numel, grad, sum); }

  template <int N>
  __device__ Loaded<N> load(int64_t i) const {
    Loaded<N> loaded;
    loaded.grad = device::load<N>(grad + i);
    if constexpr (!fresh) loaded.sum = device::load<N>(sum + i);
    return loaded;
  }

  template <int N>
  __device__ int32_t finish(int64_t i, const Loaded<N>& loaded) const {
    int32_t largest = 0;
    Pack<float, N> result;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float before = fresh ? 0.0F : loaded.sum.value[k];
      const float value = __fmaf_rn(scale, to_float(loaded.grad.value[k]), before);
      result.value[k] = value;
      largest = largest_of(largest, magnitude_bits(value));
    }
    store(sum + i, result);
    return largest;
  }
};

template <class T, bool fresh>
struct AccumulateSegmentOf {
  float scale;

  __device__ Accumulate<T, fresh> operator()(const AccumulateSegment& segment,
                                             int64_t begin) const {
    return {static_cast<const T*>(segment.grad) + begin, segment.sum + begin, scale};
  }
};

}  // namespace

Status accumulate_cuda(const void* grad, DType dtype, float* sum, int64_t numel, float scale,
                       bool fresh, int32_t* nonfinite, const Launch& launch) {
  if (numel < 0) return Status::bad_argument;
  return with_element(dtype, [&]<class T>(T) {
    const T* values = static_cast<const T*>(grad);
    return fresh ? run(launch, numel, Accumulate<T, true>{values, sum, scale}, nonfinite)
                 : run(launch, numel, Accumulate<T, false>{values, sum, scale}, nonfinite);
  });
}

Status accumulate_list_cuda(const AccumulateSegment* segments, int64_t count, DType dtype,
                            float scale, bool fresh, int32_t* nonfinite, const Launch& launch) {
  return with_element(dtype, [&]<class T>(T) {
    return fresh
               ? run_list(launch, segments, count, AccumulateSegmentOf<T, true>{scale}, nonfinite)
               : run_list(launch, segments, count, AccumulateSegmentOf<T, false>{scale}, nonfinite);
  });
}

}  // namespace zero_ext::kernels
