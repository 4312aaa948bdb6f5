// adopt_writes: master[i] = param[i] == param_dtype(master[i]) ? master[i] : float(param[i])
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/adopt_writes.cu
//
// Memory bound: reads param and master. Writes only vectors of master that hold a written element;
// almost always there is none.
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

template <class T>
struct AdoptWrites {
  static constexpr int kWidth = vector_numel<T, float>();
  static constexpr int kUnroll = 4;

  const T* param;
  float* master;

  template <int N>
  struct Loaded {
    Pack<T, N> param;
    Pack<float, N> master;
  };

  __device__ int64_t head(int64_t numel) const { return head_numel<kWidth>(numel, param, master); }

  template <int N>
  __device__ Loaded<N> load(int64_t i) const {
    return {device::load<N>(param + i), device::load<N>(master + i)};
  }

  template <int N>
  __device__ int32_t finish(int64_t i, Loaded<N> loaded) const {
    bool any_written = false;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float& master_value = loaded.master.value[k];
      if (is_written(loaded.param.value[k], master_value)) {
        master_value = to_float(loaded.param.value[k]);
        any_written = true;
      }
    }
    if (any_written) store(master + i, loaded.master);
    return 0;
  }
};

}  // namespace

Status adopt_writes_cuda(const void* param, DType param_dtype, float* master, int64_t numel,
                         const Launch& launch) {
  if (numel < 0) return Status::bad_argument;
  return with_element(param_dtype, [&]<class T>(T) {
    return run(launch, numel, AdoptWrites<T>{static_cast<const T*>(param), master});
  });
}

}  // namespace zero_ext::kernels
