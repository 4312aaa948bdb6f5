// sgd: one step of SGD on a flat range; formula: SgdArgs in kernels.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/sgd.cpp
//
// Memory bound: reads grad; reads and writes master, the parameter and the momentum buffer.
#include "kernels/constants.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {
namespace {

// T: the parameter's element, or void where the master is the parameter.
template <class T, bool has_momentum>
struct Sgd {
  SgdConstants c;
  float* master;
  T* param;
  const float* grad;
  float* momentum_buffer;
  bool ahead;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    if (!ahead) return update(begin, end);
    for (int64_t i = begin, n = 0; i < end; i += n) {
      n = block_numel(end - i, ahead);
      fetch_ahead(grad + i, n, end - i);
      fetch_ahead(master + i, n, end - i);
      if constexpr (has_momentum) fetch_ahead(momentum_buffer + i, n, end - i);
      if constexpr (!std::is_void_v<T>) fetch_ahead(param + i, n, end - i);
      update(i, i + n);
    }
  }

  ZERO_EXT_BODY void update(int64_t begin, int64_t end) const {
    const SgdConstants k = c;
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      float p = master[i];
      if constexpr (!std::is_void_v<T>) p = written_or_master(param[i], p);
      float g = std::fma(k.weight_decay, p, k.grad_scale * grad[i]);
      if constexpr (has_momentum) {
        const float later = std::fma(k.momentum, momentum_buffer[i], k.one_minus_dampening * g);
        const float momentum = select(k.first, g, later);
        momentum_buffer[i] = momentum;
        const float ahead = std::fma(k.momentum, momentum, g);
        g = select(k.nesterov, ahead, momentum);
      }
      p = std::fma(k.minus_lr, g, p);
      master[i] = p;
      if constexpr (!std::is_void_v<T>) param[i] = from_float<T>(p);
    }
  }
};

template <class T>
Status run_sgd(const SgdArgs& args, const Launch& launch) {
  const SgdConstants constants = sgd_constants(args);
  T* param = static_cast<T*>(args.param);
  const bool ahead = fetches_ahead(FetchAhead::all);
  if (args.momentum != 0) {
    return run(launch, args.numel,
               Sgd<T, true>{constants, args.master, param, args.grad, args.momentum_buffer, ahead});
  }
  return run(launch, args.numel,
             Sgd<T, false>{constants, args.master, param, args.grad, nullptr, ahead});
}

}  // namespace

Status sgd_cpu(const SgdArgs& args, const Launch& launch) {
  if (args.numel < 0) return Status::bad_argument;
  if (args.momentum != 0 && args.momentum_buffer == nullptr && args.numel > 0)
    return Status::bad_argument;
  if (skipped(args.on_device)) return Status::ok;
  if (args.param == nullptr) return run_sgd<void>(args, launch);
  return with_element(args.param_dtype, [&]<class T>(T) { return run_sgd<T>(args, launch); });
}

}  // namespace zero_ext::kernels
