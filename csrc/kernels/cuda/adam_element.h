// One element of adam, for the kernels that differ in how moments are stored; formula: AdamArgs in
// kernels.h.
#pragma once

#include <cstdint>

#include "kernels/constants.h"
#include "kernels/cuda/elements.h"

namespace zero_ext::kernels::device {

// In place of the parameter where the master is the parameter.
struct NoParam {};

// Decays the parameter, or adds the decay to the gradient, and updates the moments.
template <bool decoupled>
__device__ inline void update_moments(const AdamConstants& k, float grad, float& p, float& exp_avg,
                                      float& exp_avg_sq) {
  float g = __fmul_rn(k.grad_scale, grad);
  if constexpr (decoupled) {
    p = __fsub_rn(p, __fmul_rn(k.decay, p));
  } else {
    g = __fmaf_rn(k.decay, p, g);
  }
  exp_avg = __fmaf_rn(k.one_minus_beta1, __fsub_rn(g, exp_avg), exp_avg);
  exp_avg_sq = __fmaf_rn(k.one_minus_beta2, __fmul_rn(g, g), __fmul_rn(k.beta2, exp_avg_sq));
}

__device__ inline float updated(const AdamConstants& k, float p, float exp_avg, float v) {
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), k.sqrt_bias_correction2), k.eps);
  return __fsub_rn(p, __fdiv_rn(__fmul_rn(k.step_size, exp_avg), denominator));
}

// `on_host` is of `args` without OnDevice.
__device__ inline AdamConstants constants_of(const AdamArgs& args, AdamConstants on_host) {
  if (args.on_device.steps_done != nullptr) return counted_adam_constants(args);
  on_host.grad_scale = signed_scale(args.grad_scale, args.maximize, args.on_device);
  return on_host;
}

inline AdamConstants constants_on_host(const AdamArgs& args) {
  AdamArgs on_host = args;
  on_host.on_device = {};
  return adam_constants(on_host);
}

}  // namespace zero_ext::kernels::device
