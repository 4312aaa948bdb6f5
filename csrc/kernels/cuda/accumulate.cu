// accumulate_list, per segment: sum[i] = fma(scale, float(grad[i]), fresh ? 0 : sum[i])
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

  float scale;
  const T* grad = nullptr;
  float* sum = nullptr;

  __device__ __host__ Accumulate at(const AccumulateSegment& segment, int64_t begin) const {
    return {scale, static_cast<const T*>(segment.grad) + begin, segment.sum + begin};
  }

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
      const float value = fmaf(scale, to_float(loaded.grad.value[k]), before);
      result.value[k] = value;
      largest = greatest(largest, magnitude_bits(value));
    }
    store(sum + i, result);
    return largest;
  }
};

// One sum has a kernel of its own, which has no pieces to look for.
template <class T, bool fresh>
Status run_accumulate(const AccumulateSegment* segments, int64_t count, float scale,
                      int32_t* nonfinite, const Launch& launch) {
  const Accumulate<T, fresh> body{scale};
  if (count != 1) return run_list(launch, segments, count, body, nonfinite);
  if (segments->numel < 0) return Status::bad_argument;
  return run(launch, segments->numel, body.at(*segments, 0), flag_of(*segments, nonfinite));
}

}  // namespace

Status accumulate_list_cuda(const AccumulateSegment* segments, int64_t count, DType dtype,
                            float scale, bool fresh, int32_t* nonfinite, const Launch& launch) {
  return with_element(dtype, [&]<class T>(T) {
    return fresh ? run_accumulate<T, true>(segments, count, scale, nonfinite, launch)
                 : run_accumulate<T, false>(segments, count, scale, nonfinite, launch);
  });
}

}  // namespace zero_ext::kernels
