// cast: target[i] = target_dtype(source[i])
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/cast.cu
//
// Memory bound: reads source, writes target. Equal dtypes are copied bit by bit, NaN included.
#include <type_traits>

#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

template <class Source, class Target>
struct Cast {
  static constexpr int kWidth = vector_numel<Source, Target>();
  static constexpr int kUnroll = 32 / (kWidth * static_cast<int>(sizeof(Source)));

  const Source* source;
  Target* target;

  template <int N>
  using Loaded = Pack<Source, N>;

  __device__ int64_t head(int64_t numel) const { return head_numel<kWidth>(numel, source, target); }

  template <int N>
  __device__ Loaded<N> load(int64_t i) const {
    return device::load<N>(source + i);
  }

  template <int N>
  __device__ int32_t finish(int64_t i, const Pack<Source, N>& loaded) const {
    if constexpr (std::is_same_v<Source, Target>) {
      store(target + i, loaded);
    } else {
      Pack<Target, N> result;
#pragma unroll
      for (int k = 0; k < N; ++k) result.value[k] = from_float<Target>(to_float(loaded.value[k]));
      store(target + i, result);
    }
    return 0;
  }
};

}  // namespace

Status cast_cuda(const void* source, DType source_dtype, void* target, DType target_dtype,
                 int64_t numel, const Launch& launch) {
  if (numel < 0) return Status::bad_argument;
  return with_element(source_dtype, [&]<class Source>(Source) {
    return with_element(target_dtype, [&]<class Target>(Target) {
      return run(
          launch, numel,
          Cast<Source, Target>{static_cast<const Source*>(source), static_cast<Target*>(target)});
    });
  });
}

}  // namespace zero_ext::kernels
