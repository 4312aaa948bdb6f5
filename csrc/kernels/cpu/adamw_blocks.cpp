// adam of int8 moments, block by block; formula: AdamArgs in kernels.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/adamw_blocks.cpp
//
// Reads grad; reads and writes master, the parameter and 1 byte of each moment: 20 bytes per
// element with a half-precision parameter. Bound by arithmetic, see Note [Two loops of a block].
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
};

// Note [Two loops of a block]
// The first loop ends with a block's moments and its scales, the second one codes the moments and
// updates the parameter. So one loop's chain of operations is half as long, and the processor sees
// more elements at once. Coding fills the time of the divisions.
//
// Codes leave the second loop as integers of 32 bits. In a loop with bytes, a vector of them would
// need four of floats at once, which are more than there are registers.
struct Block {
  alignas(kLineBytes) float first[kBlockElements];
  alignas(kLineBytes) float second[kBlockElements];
  alignas(kLineBytes) int32_t first_code[kBlockElements];
  alignas(kLineBytes) int32_t second_code[kBlockElements];
};

alignas(kLineBytes) constexpr float kZeros[kBlockElements] = {};

template <class Code>
ZERO_EXT_BODY void narrow(const int32_t* wide, int64_t numel, Code* code) {
  for (int64_t j = 0; j < numel; ++j) code[j] = static_cast<Code>(wide[j]);
}

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
      const int64_t left = numel - block * kBlockElements;
      if (left >= kBlockElements) {
        update(block, kBlockElements);
      } else {
        update(block, left);
      }
    }
  }

  ZERO_EXT_BODY void update(int64_t block, int64_t n) const {
    const int64_t i = block * kBlockElements;
    if (ahead) {
      fetch_ahead(grad + i, n, numel - i);
      fetch_ahead(master + i, n, numel - i);
      if constexpr (!std::is_void_v<T>) fetch_ahead(param + i, n, numel - i);
    }
    Block own;
    update_both_moments(block, n, own);
    update_parameter(block, n, own);
    narrow(own.first_code, n, exp_avg.code + i);
    narrow(own.second_code, n, exp_avg_sq.code + i);
  }

  ZERO_EXT_BODY void update_both_moments(int64_t block, int64_t n, Block& own) const {
    const AdamConstants k = c;
    const int64_t i = block * kBlockElements;
    const float first_scale = exp_avg.scale[block];
    const float second_scale = exp_avg_sq.scale[block];
    int32_t high = 0;
    uint32_t low = 0;
    uint32_t low_sq = 0;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
      float p = decoupled ? 0 : current(i + j);
      float m = first_scale * signed_multiple(exp_avg.code[i + j]);
      float v = second_scale * unsigned_multiple(exp_avg_sq.code[i + j]);
      update_moments(k, decayed<decoupled>(k, grad[i + j], p), m, v);
      own.first[j] = m;
      own.second[j] = v;
      high = greatest(high, integer_of(m));
      low = greatest(low, static_cast<uint32_t>(integer_of(m)));
      low_sq = greatest(low_sq, static_cast<uint32_t>(integer_of(v)));
    }
    exp_avg.scale[block] = scale_of(high, low, true);
    exp_avg_sq.scale[block] = scale_of(0, low_sq, false);
  }

  ZERO_EXT_BODY void update_parameter(int64_t block, int64_t n, Block& own) const {
    const AdamConstants k = c;
    const int64_t i = block * kBlockElements;
    const float first_scale = exp_avg.scale[block];
    const float second_scale = exp_avg_sq.scale[block];
    const float first_reciprocal = reciprocal_of(first_scale);
    const float second_reciprocal = reciprocal_of(second_scale);
    const float* const first = is_coded(first_scale) ? own.first : kZeros;
    const float* const second = is_coded(second_scale) ? own.second : kZeros;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
      float p = current(i + j);
      decayed<decoupled>(k, 0, p);
      p = updated(k, p, own.first[j], own.second[j]);
      master[i + j] = p;
      if constexpr (!std::is_void_v<T>) param[i + j] = from_float<T>(p);
      own.first_code[j] = code_of<int8_t>(first_reciprocal * first[j]);
      own.second_code[j] = code_of<uint8_t>(second_reciprocal * second[j]);
    }
  }

  ZERO_EXT_BODY float current(int64_t i) const {
    if constexpr (std::is_void_v<T>) {
      return master[i];
    } else {
      return written_or_master(param[i], master[i]);
    }
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
