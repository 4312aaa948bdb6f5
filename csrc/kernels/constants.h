// The factors of an update that do not depend on the element, rounded to float once. Host and
// device compile the same code with only IEEE operations in double, so that both get the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/kernels.h"

namespace zero_ext::kernels {

struct AdamConstants {
  float grad_scale;  // sign included
  float decay;       // of the parameter where decoupled, of the gradient otherwise
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;
  float sqrt_bias_correction2;
  float eps;
  uint32_t step;
};

struct SgdConstants {
  float grad_scale;  // sign included
  float weight_decay;
  float momentum;
  float one_minus_dampening;
  float minus_lr;
  bool nesterov;
  bool first;
};

inline bool is_empty(const OnDevice& on_device) {
  return on_device.skip == nullptr && on_device.steps_done == nullptr &&
         on_device.grad_factor == nullptr;
}

ZERO_EXT_EVERYWHERE bool skipped(const OnDevice& on_device) {
  return on_device.skip != nullptr && *on_device.skip != 0;
}

// The gradient's factor; negative where the update maximises.
ZERO_EXT_EVERYWHERE float signed_scale(float scale, bool maximize, const OnDevice& on_device) {
  if (on_device.grad_factor != nullptr) scale = scale * *on_device.grad_factor;
  return maximize ? -scale : scale;
}

// base^exponent by squaring, exponent >= 1.
ZERO_EXT_EVERYWHERE double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

ZERO_EXT_EVERYWHERE AdamConstants adam_constants(const AdamArgs& args, int64_t step,
                                                 double beta1_power, double beta2_power) {
  const double bias_correction1 = 1 - beta1_power;
  const double bias_correction2 = 1 - beta2_power;
  return {
      .grad_scale = signed_scale(args.grad_scale, args.maximize, args.on_device),
      .decay = static_cast<float>(args.decoupled ? args.lr * args.weight_decay : args.weight_decay),
      .one_minus_beta1 = static_cast<float>(1 - args.beta1),
      .beta2 = static_cast<float>(args.beta2),
      .one_minus_beta2 = static_cast<float>(1 - args.beta2),
      .step_size = static_cast<float>(args.lr / bias_correction1),
      .sqrt_bias_correction2 = static_cast<float>(sqrt(bias_correction2)),
      .eps = static_cast<float>(args.eps),
      .step = static_cast<uint32_t>(step),
  };
}

// The constants of the next update, counted by on_device.steps_done.
ZERO_EXT_EVERYWHERE AdamConstants counted_adam_constants(const AdamArgs& args) {
  const int64_t step = static_cast<int64_t>(*args.on_device.steps_done) + 1;
  return adam_constants(args, step, power(args.beta1, step), power(args.beta2, step));
}

// To be called on the host: for the CPU, or for CUDA with an empty OnDevice.
inline AdamConstants constants_of(const AdamArgs& args) {
  if (args.on_device.steps_done != nullptr) return counted_adam_constants(args);
  const double step = static_cast<double>(args.step);
  return adam_constants(args, args.step, std::pow(args.beta1, step), std::pow(args.beta2, step));
}

ZERO_EXT_EVERYWHERE SgdConstants constants_of(const SgdArgs& args) {
  const float* steps_done = args.on_device.steps_done;
  return {
      .grad_scale = signed_scale(args.grad_scale, args.maximize, args.on_device),
      .weight_decay = static_cast<float>(args.weight_decay),
      .momentum = static_cast<float>(args.momentum),
      .one_minus_dampening = static_cast<float>(1 - args.dampening),
      .minus_lr = static_cast<float>(-args.lr),
      .nesterov = args.nesterov,
      .first = steps_done != nullptr ? *steps_done == 0 : args.first,
  };
}

}  // namespace zero_ext::kernels
