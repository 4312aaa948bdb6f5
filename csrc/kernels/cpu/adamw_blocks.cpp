// adam of int8 moments, block by block; formula: AdamArgs in kernels.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/adamw_blocks.cpp
//
// Reads grad; reads and writes master, the parameter and 1 byte of each moment: 20 bytes per
// element with a half-precision parameter. A block's moments stay in the L1 cache until its scale
// is known. Bytes and floats are converted in loops of their own: in a loop with both, a vector of
// bytes would need four of floats at once, which are more than there are registers.
#include "kernels/constants.h"
#include "kernels/cpu/adam_element.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/table.h"
#include "kernels/moments.h"

namespace zero_ext::kernels {
namespace {

// The moments of one kind: codes, and the scale of each block.
template <class Code>
struct Quantized {
  Code* code;
  float* scale;

  ZERO_EXT_BODY void widen(int64_t block, int64_t numel, int32_t* wide) const {
    const Code* from = code + block * kBlockElements;
    for (int64_t j = 0; j < numel; ++j) wide[j] = from[j];
  }

  ZERO_EXT_BODY void write(int64_t block, int64_t numel, const float* moment, float factor) const {
    const float reciprocal = reciprocal_of(factor);
    scale[block] = factor;
    alignas(kLineBytes) int32_t wide[kBlockElements];
    for (int64_t j = 0; j < numel; ++j) {
      wide[j] = code_of<Code>(reciprocal * moment[j]);
    }
    Code* to = code + block * kBlockElements;
    for (int64_t j = 0; j < numel; ++j) to[j] = static_cast<Code>(wide[j]);
  }
};

template <class T, bool decoupled>
struct AdamBlocks {
  AdamConstants c;
  int64_t numel;
  float* master;
  T* param;
  const float* grad;
  Quantized<int8_t> exp_avg;
  Quantized<uint8_t> exp_avg_sq;
  bool ahead;

  // Of blocks.
  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t i = block * kBlockElements;
      if (numel - i >= kBlockElements) {
        update(block, kBlockElements);
      } else {
        update(block, numel - i);
      }
    }
  }

  ZERO_EXT_BODY void update(int64_t block, int64_t n) const {
    const AdamConstants k = c;
    const int64_t i = block * kBlockElements;
    if (ahead) {
      fetch_ahead(grad + i, n, numel - i);
      fetch_ahead(master + i, n, numel - i);
      if constexpr (!std::is_void_v<T>) fetch_ahead(param + i, n, numel - i);
    }
    alignas(kLineBytes) int32_t first_code[kBlockElements];
    alignas(kLineBytes) int32_t second_code[kBlockElements];
    alignas(kLineBytes) float first[kBlockElements];
    alignas(kLineBytes) float second[kBlockElements];
    exp_avg.widen(block, n, first_code);
    exp_avg_sq.widen(block, n, second_code);
    const float first_scale = exp_avg.scale[block];
    const float second_scale = exp_avg_sq.scale[block];
    int32_t high = 0;
    int32_t low = 0;
    int32_t high_sq = 0;
    float* const masters = master + i;
    const float* const grads = grad + i;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
      float p = masters[j];
      if constexpr (!std::is_void_v<T>) p = written_or_master(param[i + j], p);
      float m = first_scale * signed_multiple(first_code[j]);
      float v = second_scale * unsigned_multiple(second_code[j]);
      update_moments<decoupled>(k, grads[j], p, m, v);
      first[j] = m;
      second[j] = v;
      high = greatest(high, integer_of(m));
      low = greatest(low, integer_of(m) ^ INT32_MIN);
      high_sq = greatest(high_sq, integer_of(v));
      p = updated(k, p, m, v);
      masters[j] = p;
      if constexpr (!std::is_void_v<T>) param[i + j] = from_float<T>(p);
    }
    exp_avg.write(block, n, first, scale_of(high, low, true));
    exp_avg_sq.write(block, n, second, scale_of(high_sq, 0, false));
  }
};

template <class T, bool decoupled>
Status run_adam(const AdamArgs& args, const Launch& launch) {
  const int64_t blocks = (args.numel + kBlockElements - 1) / kBlockElements;
  return run(
      launch, blocks,
      AdamBlocks<T, decoupled>{adam_constants(args),
                               args.numel,
                               args.master,
                               static_cast<T*>(args.param),
                               args.grad,
                               {static_cast<int8_t*>(args.exp_avg), args.exp_avg_scale},
                               {static_cast<uint8_t*>(args.exp_avg_sq), args.exp_avg_sq_scale},
                               fetches_ahead(FetchAhead::all)},
      kGrainNumel / kBlockElements);
}

template <class T>
Status run_adam(const AdamArgs& args, const Launch& launch) {
  return args.decoupled ? run_adam<T, true>(args, launch) : run_adam<T, false>(args, launch);
}

}  // namespace

Status adam_blocks_cpu(const AdamArgs& args, const Launch& launch) {
  if (args.param == nullptr) return run_adam<void>(args, launch);
  return with_element(args.param_dtype, [&]<class T>(T) { return run_adam<T>(args, launch); });
}

}  // namespace zero_ext::kernels
