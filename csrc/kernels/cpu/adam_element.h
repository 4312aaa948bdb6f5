// One element of adam, for the kernels that differ in how moments are stored; formula: AdamArgs in
// kernels.h.
#pragma once

#include <cmath>

#include "kernels/constants.h"
#include "kernels/cpu/dispatch.h"

namespace zero_ext::kernels {

// Decays the parameter, or adds the decay to the gradient. Returns the gradient for the moments.
template <bool decoupled>
ZERO_EXT_BODY float decayed(const AdamConstants& k, float grad, float& p) {
  const float g = k.grad_scale * grad;
  if constexpr (!decoupled) return std::fma(k.decay, p, g);
  p -= k.decay * p;
  return g;
}

ZERO_EXT_BODY void update_moments(const AdamConstants& k, float g, float& exp_avg,
                                  float& exp_avg_sq) {
  exp_avg = std::fma(k.one_minus_beta1, g - exp_avg, exp_avg);
  exp_avg_sq = std::fma(k.one_minus_beta2, g * g, k.beta2 * exp_avg_sq);
}

ZERO_EXT_BODY float updated(const AdamConstants& k, float p, float exp_avg, float v) {
  return p - k.step_size * exp_avg / (std::sqrt(v) / k.sqrt_bias_correction2 + k.eps);
}

}  // namespace zero_ext::kernels
