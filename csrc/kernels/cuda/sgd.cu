// sgd: one step of SGD on a flat range; formula: SgdArgs in kernels.h.
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/sgd.cu
//
// Memory bound: reads grad; reads and writes master, the parameter and the momentum buffer.
#include <type_traits>

#include "kernels/constants.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

// In place of the parameter where the master is the parameter.
struct NoParam {};

template <class T, bool has_momentum>
struct Sgd {
  static constexpr bool kHasParam = !std::is_same_v<T, NoParam>;
  static constexpr int kWidth = 4;
  static constexpr int kUnroll = 2;

  SgdConstants c;
  float* master;
  T* param;
  const float* grad;
  float* momentum_buffer;

  template <int N>
  struct Loaded {
    Pack<float, N> master;
    Pack<T, N> param;
    Pack<float, N> grad;
    Pack<float, N> momentum;
  };

  __device__ int64_t head(int64_t numel) const {
    const int64_t head = head_numel<kWidth>(numel, master, grad);
    if constexpr (kHasParam) {
      if (head_numel<kWidth>(numel, master, param) != head) return numel;
    }
    if constexpr (has_momentum) {
      if (head_numel<kWidth>(numel, master, momentum_buffer) != head) return numel;
    }
    return head;
  }

  template <int N>
  __device__ Loaded<N> load(int64_t i) const {
    Loaded<N> loaded;
    loaded.master = device::load<N>(master + i);
    if constexpr (kHasParam) loaded.param = device::load<N>(param + i);
    loaded.grad = device::load<N>(grad + i);
    if constexpr (has_momentum) loaded.momentum = device::load<N>(momentum_buffer + i);
    return loaded;
  }

  // Element k of `loaded` becomes the values to store.
  template <int N>
  __device__ void update(int k, Loaded<N>& loaded) const {
    float p = loaded.master.value[k];
    if constexpr (kHasParam) p = written_or_master(loaded.param.value[k], p);
    float g = __fmaf_rn(c.weight_decay, p, __fmul_rn(c.grad_scale, loaded.grad.value[k]));
    if constexpr (has_momentum) {
      const float later =
          __fmaf_rn(c.momentum, loaded.momentum.value[k], __fmul_rn(c.one_minus_dampening, g));
      const float momentum = c.first ? g : later;
      loaded.momentum.value[k] = momentum;
      g = c.nesterov ? __fmaf_rn(c.momentum, momentum, g) : momentum;
    }
    p = __fmaf_rn(c.minus_lr, g, p);
    loaded.master.value[k] = p;
    if constexpr (kHasParam) loaded.param.value[k] = from_float<T>(p);
  }

  template <int N>
  __device__ int32_t finish(int64_t i, Loaded<N> loaded) const {
#pragma unroll
    for (int k = 0; k < N; ++k) update(k, loaded);
    store(master + i, loaded.master);
    if constexpr (kHasParam) store(param + i, loaded.param);
    if constexpr (has_momentum) store(momentum_buffer + i, loaded.momentum);
    return 0;
  }
};

template <class T, bool has_momentum>
struct SgdUpdate {
  using Body = Sgd<T, has_momentum>;
  using Constants = SgdConstants;

  SgdArgs args;

  __device__ SgdConstants constants() const { return sgd_constants(args); }

  __device__ __host__ Body body(const SgdConstants& known) const {
    return {known, args.master, static_cast<T*>(args.param), args.grad, args.momentum_buffer};
  }
};

template <class T, bool has_momentum>
Status run_sgd(const SgdArgs& args, const Launch& launch) {
  const SgdUpdate<T, has_momentum> update{args};
  return is_empty(args.on_device) ? run(launch, args.numel, update.body(sgd_constants(args)))
                                  : run_update(launch, args.numel, update);
}

template <class T>
Status run_sgd(const SgdArgs& args, const Launch& launch) {
  return args.momentum != 0 ? run_sgd<T, true>(args, launch) : run_sgd<T, false>(args, launch);
}

}  // namespace

Status sgd_cuda(const SgdArgs& args, const Launch& launch) {
  if (args.numel < 0) return Status::bad_argument;
  if (args.momentum != 0 && args.momentum_buffer == nullptr && args.numel > 0)
    return Status::bad_argument;
  if (args.param == nullptr) return run_sgd<NoParam>(args, launch);
  return with_element(args.param_dtype, [&]<class T>(T) { return run_sgd<T>(args, launch); });
}

}  // namespace zero_ext::kernels
