// The elementwise updates, for host and device: what each does to one element, and which variant a
// call needs. Formulas: AdamArgs and SgdArgs in kernels.h. The loops are in cpu/update.h and
// cuda/update.h; int8 moments, which have blocks, in adamw_blocks.
//
// An element function has these members:
//
//   Constants, k             its factors, see constants.h
//   kStates                  the states of an element
//   kUnroll                  vectors of elements that a device's thread loads at once
//   advance(grad, p, state)  decays the parameter, updates its states, and returns a gradient
//   applied(g, p, state)     is the parameter, updated by these
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/constants.h"
#include "kernels/elements.h"
#include "kernels/moments.h"

namespace zero_ext::kernels {

// In place of the parameter's element where the master is the parameter.
struct NoParam {};

template <class T>
constexpr bool kHasParam = !std::is_same_v<T, NoParam>;

// Decays the parameter, or adds the decay to the gradient. Returns the gradient for the moments.
template <bool decoupled>
ZERO_EXT_EVERYWHERE float decayed(const AdamConstants& k, float grad, float& p) {
  const float g = k.grad_scale * grad;
  if constexpr (!decoupled) return fmaf(k.decay, p, g);
  p -= k.decay * p;
  return g;
}

ZERO_EXT_EVERYWHERE void update_moments(const AdamConstants& k, float g, float& exp_avg,
                                        float& exp_avg_sq) {
  exp_avg = fmaf(k.one_minus_beta1, g - exp_avg, exp_avg);
  exp_avg_sq = fmaf(k.one_minus_beta2, g * g, k.beta2 * exp_avg_sq);
}

ZERO_EXT_EVERYWHERE float updated(const AdamConstants& k, float p, float exp_avg, float v) {
  return p - k.step_size * exp_avg / (std::sqrt(v) / k.sqrt_bias_correction2 + k.eps);
}

// NaN wins, as in torch.maximum.
ZERO_EXT_EVERYWHERE float maximum(float a, float b) { return select(a > b || a != a, a, b); }

template <bool amsgrad, bool decoupled>
struct AdamElement {
  using Constants = AdamConstants;
  static constexpr int kStates = amsgrad ? 3 : 2;
  static constexpr int kUnroll = 1;

  AdamConstants k;

  ZERO_EXT_EVERYWHERE float advance(float grad, float& p, float* state) const {
    const float g = decayed<decoupled>(k, grad, p);
    update_moments(k, g, state[0], state[1]);
    if constexpr (amsgrad) state[2] = maximum(state[2], state[1]);
    return g;
  }

  ZERO_EXT_EVERYWHERE float applied(float /*g*/, float p, const float* state) const {
    return updated(k, p, state[0], state[kStates - 1]);
  }
};

template <bool has_momentum>
struct SgdElement {
  using Constants = SgdConstants;
  static constexpr int kStates = has_momentum ? 1 : 0;
  static constexpr int kUnroll = 2;

  SgdConstants k;

  ZERO_EXT_EVERYWHERE float advance(float grad, const float& p, float* state) const {
    const float g = fmaf(k.weight_decay, p, k.grad_scale * grad);
    if constexpr (!has_momentum) return g;
    const float later = fmaf(k.momentum, state[0], k.one_minus_dampening * g);
    state[0] = select(k.first, g, later);
    return select(k.nesterov, fmaf(k.momentum, state[0], g), state[0]);
  }

  ZERO_EXT_EVERYWHERE float applied(float g, float p, const float* /*state*/) const {
    return fmaf(k.minus_lr, g, p);
  }
};

// State `s` of a call's elements.
ZERO_EXT_EVERYWHERE void* state_of(const AdamArgs& args, int s) {
  return s == 0 ? args.exp_avg : s == 1 ? args.exp_avg_sq : args.max_exp_avg_sq;
}
ZERO_EXT_EVERYWHERE void* state_of(const SgdArgs& args, int /*s*/) { return args.momentum_buffer; }

// A state of `step` as it is stored.
template <class M>
ZERO_EXT_EVERYWHERE M stored(float state, uint32_t step) {
  return {randomly_rounded(state, step)};
}
template <>
ZERO_EXT_EVERYWHERE float stored<float>(float state, uint32_t /*step*/) {
  return state;
}
ZERO_EXT_EVERYWHERE uint32_t step_of(const AdamConstants& k) { return k.step; }
ZERO_EXT_EVERYWHERE uint32_t step_of(const SgdConstants& /*k*/) { return 0; }

// Calls visit<T>() with the type of the parameter's elements.
template <class Args, class Visit>
Status with_param(const Args& args, const Visit& visit) {
  if (args.param == nullptr) return visit.template operator()<NoParam>();
  return with_element(args.param_dtype, [&]<class T>(T) { return visit.template operator()<T>(); });
}

// Calls visit<T, M, Element>(), where M is the type of the states' elements; not for int8.
template <class Visit>
Status with_update(const AdamArgs& args, const Visit& visit) {
  return with_param(args, [&]<class T>() {
    const auto with_decay = [&]<bool decoupled>() {
      if (args.moments == Moments::bf16)
        return visit.template operator()<T, BFloat16, AdamElement<false, decoupled>>();
      return args.max_exp_avg_sq != nullptr
                 ? visit.template operator()<T, float, AdamElement<true, decoupled>>()
                 : visit.template operator()<T, float, AdamElement<false, decoupled>>();
    };
    return args.decoupled ? with_decay.template operator()<true>()
                          : with_decay.template operator()<false>();
  });
}

template <class Visit>
Status with_update(const SgdArgs& args, const Visit& visit) {
  return with_param(args, [&]<class T>() {
    return args.momentum != 0 ? visit.template operator()<T, float, SgdElement<true>>()
                              : visit.template operator()<T, float, SgdElement<false>>();
  });
}

// Calls visit(segments, count) with the ranges of a call.
template <class Args, class Visit>
Status with_segments(const Args& args, const Visit& visit) {
  const UpdateSegment whole{.begin = 0, .states = 0, .numel = args.numel};
  return args.segments == nullptr ? visit(&whole, int64_t{1}) : visit(args.segments, args.count);
}

// Whether an update can mark what it changes.
template <class Args>
bool can_mark(const Args& args) {
  return args.param != nullptr && args.param_dtype != DType::f32;
}

// Whether a kernel can run these.
inline bool is_valid(const AdamArgs& args) {
  bool in_blocks = true;
  for (int64_t i = 0; i < args.count; ++i) {
    in_blocks = in_blocks && args.segments[i].states % kBlockElements == 0;
  }
  return args.numel >= 0 && args.step >= 1 && (args.changed == nullptr || can_mark(args)) &&
         (args.moments != Moments::int8 || in_blocks) &&
         (args.moments == Moments::f32 || args.max_exp_avg_sq == nullptr);
}
inline bool is_valid(const SgdArgs& args) {
  return args.numel >= 0 && (args.changed == nullptr || can_mark(args)) &&
         (args.momentum == 0 || args.momentum_buffer != nullptr ||
          (args.numel == 0 && args.count == 0));
}

}  // namespace zero_ext::kernels
