// adam: one step of Adam or AdamW on a flat range; formula: AdamArgs in kernels.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/adamw.cpp
//
// Memory bound where a square root and two divisions are fast: reads grad; reads and writes master,
// both moments and the parameter: 32 bytes per element with a half-precision parameter.
#include "kernels/constants.h"
#include "kernels/cpu/adam_element.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/table.h"
#include "kernels/moments.h"

namespace zero_ext::kernels {
namespace {

// NaN wins, as in torch.maximum.
ZERO_EXT_BODY float maximum(float a, float b) { return select(a > b || a != a, a, b); }

template <class M>
ZERO_EXT_BODY M stored(float moment, uint32_t step) {
  if constexpr (std::is_same_v<M, float>) {
    return moment;
  } else {
    return {randomly_rounded(moment, step)};
  }
}

// T: the parameter's element, or void where the master is the parameter. M: a moment's element.
template <class T, class M, bool amsgrad, bool decoupled>
struct Adam {
  AdamConstants c;
  float* master;
  T* param;
  const float* grad;
  M* exp_avg;
  M* exp_avg_sq;
  float* max_exp_avg_sq;
  bool ahead;

  ZERO_EXT_BODY Adam of(const UpdateSegment& segment) const {
    Adam adam = *this;
    adam.master += segment.begin;
    if constexpr (!std::is_void_v<T>) adam.param += segment.begin;
    adam.grad += segment.begin;
    adam.exp_avg += segment.states;
    adam.exp_avg_sq += segment.states;
    if constexpr (amsgrad) adam.max_exp_avg_sq += segment.states;
    return adam;
  }

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    if (!ahead) return update(begin, end);
    for (int64_t i = begin, n = 0; i < end; i += n) {
      n = block_numel(end - i, ahead);
      fetch_ahead(grad + i, n, end - i);
      fetch_ahead(master + i, n, end - i);
      fetch_ahead(exp_avg + i, n, end - i);
      fetch_ahead(exp_avg_sq + i, n, end - i);
      if constexpr (amsgrad) fetch_ahead(max_exp_avg_sq + i, n, end - i);
      if constexpr (!std::is_void_v<T>) fetch_ahead(param + i, n, end - i);
      update(i, i + n);
    }
  }

  ZERO_EXT_BODY void update(int64_t begin, int64_t end) const {
    const AdamConstants k = c;
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      float p = master[i];
      if constexpr (!std::is_void_v<T>) p = written_or_master(param[i], p);
      float m = to_float(exp_avg[i]);
      float v = to_float(exp_avg_sq[i]);
      update_moments(k, decayed<decoupled>(k, grad[i], p), m, v);
      exp_avg[i] = stored<M>(m, k.step);
      exp_avg_sq[i] = stored<M>(v, k.step);
      if constexpr (amsgrad) {
        v = maximum(max_exp_avg_sq[i], v);
        max_exp_avg_sq[i] = v;
      }
      p = updated(k, p, m, v);
      master[i] = p;
      if constexpr (!std::is_void_v<T>) param[i] = from_float<T>(p);
    }
  }
};

template <class T, class M, bool amsgrad, bool decoupled>
struct AdamList {
  Adam<T, M, amsgrad, decoupled> adam;
  const UpdateSegment* segments;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    for_each_segment(segments, begin, end,
                     [&](const UpdateSegment& segment, int64_t from, int64_t to)
                         ZERO_EXT_BODY_LAMBDA { adam.of(segment)(from, to); });
  }
};

template <class T, class M, bool amsgrad, bool decoupled>
Status run_adam(const AdamArgs& args, const Launch& launch) {
  const Adam<T, M, amsgrad, decoupled> adam{
      adam_constants(args),          args.master,
      static_cast<T*>(args.param),   args.grad,
      static_cast<M*>(args.exp_avg), static_cast<M*>(args.exp_avg_sq),
      args.max_exp_avg_sq,           fetches_ahead(FetchAhead::all)};
  return run(launch, total_numel(args.segments, args.count),
             AdamList<T, M, amsgrad, decoupled>{adam, args.segments});
}

template <class T>
Status run_adam(const AdamArgs& args, const Launch& launch) {
  if (args.moments == Moments::bf16) {
    return args.decoupled ? run_adam<T, BFloat16, false, true>(args, launch)
                          : run_adam<T, BFloat16, false, false>(args, launch);
  }
  if (args.max_exp_avg_sq != nullptr) {
    return args.decoupled ? run_adam<T, float, true, true>(args, launch)
                          : run_adam<T, float, true, false>(args, launch);
  }
  return args.decoupled ? run_adam<T, float, false, true>(args, launch)
                        : run_adam<T, float, false, false>(args, launch);
}

}  // namespace

Status adam_cpu(const AdamArgs& args, const Launch& launch) {
  if (args.segments == nullptr) {
    const UpdateSegment whole{.begin = 0, .states = 0, .numel = args.numel};
    AdamArgs list = args;
    list.segments = &whole;
    list.count = 1;
    return adam_cpu(list, launch);
  }
  if (total_numel(args.segments, args.count) < 0 || args.step < 1) return Status::bad_argument;
  if (args.moments != Moments::f32 && args.max_exp_avg_sq != nullptr) return Status::bad_argument;
  if (skipped(args.on_device)) return Status::ok;
  if (args.moments == Moments::int8) return adam_blocks_cpu(args, launch);
  if (args.param == nullptr) return run_adam<void>(args, launch);
  return with_element(args.param_dtype, [&]<class T>(T) { return run_adam<T>(args, launch); });
}

}  // namespace zero_ext::kernels
