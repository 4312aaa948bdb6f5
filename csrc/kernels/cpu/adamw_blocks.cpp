// adam of int8 moments, block by block; formula: AdamArgs in kernels.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/adamw_blocks.cpp
//
// Reads grad; reads and writes master, the parameter and 1 byte of each moment: 20 bytes per
// element with a half-precision parameter. Bound by arithmetic, see Note [Two passes over a block].
#include <utility>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/changes.h"
#include "kernels/cpu/table.h"
#include "kernels/updates.h"

namespace zero_ext::kernels {
namespace {

// The moments of one kind: codes, and the scale of each block.
template <class Code>
struct Quantized {
  Code* code;
  float* scale;
};

// Note [Two passes over a block]
// The first pass ends with a block's moments and its scales. The second one codes the moments and
// updates the parameter. The second pass over one block and the first pass over the next block are
// one loop. So the arithmetic of the first pass fills the time of the second pass's divisions.
//
// Codes enter and leave the loop as integers of 32 bits. In a loop with bytes, a vector of them
// would need four of floats at once, which are more than there are registers.
struct Block {
  alignas(kLineBytes) float first[kBlockElements];
  alignas(kLineBytes) float second[kBlockElements];
  alignas(kLineBytes) int32_t first_code[kBlockElements];
  alignas(kLineBytes) int32_t second_code[kBlockElements];
  alignas(kLineBytes) uint16_t differing[kBlockElements];  // see Marker; only where it marks
};

alignas(kLineBytes) constexpr float kZeros[kBlockElements] = {};

template <class From, class To>
ZERO_EXT_BODY void convert(const From* from, int64_t numel, To* to) {
  for (int64_t j = 0; j < numel; ++j) to[j] = static_cast<To>(from[j]);
}

// Of both moments of a block: their scales, as read.
struct Scales {
  float first;
  float second;
};

// What the scales to write follow from, see scale_of.
struct Largest {
  int32_t high = 0;
  uint32_t low = 0;
  uint32_t low_sq = 0;
};

// What both moments of a block are coded from.
struct Coding {
  float first_reciprocal;
  float second_reciprocal;
  const float* first;
  const float* second;
};

template <class T, bool decoupled, bool marks>
struct AdamBlocks {
  AdamConstants c;
  int64_t numel;
  float* master;
  T* param;
  const float* grad;
  Quantized<int8_t> exp_avg;
  Quantized<uint8_t> exp_avg_sq;
  Changes changes;
  bool ahead;

  // `begin`, `end`: of the segment's blocks.
  ZERO_EXT_BODY void operator()(const UpdateSegment& segment, int64_t begin, int64_t end) const {
    AdamBlocks own = *this;
    const int64_t first_block = segment.states / kBlockElements;
    own.numel = segment.numel;
    own.master += segment.begin;
    if constexpr (kHasParam<T>) own.param += segment.begin;
    own.grad += segment.begin;
    own.changes.first += segment.begin;
    own.exp_avg = {exp_avg.code + segment.states, exp_avg.scale + first_block};
    own.exp_avg_sq = {exp_avg_sq.code + segment.states, exp_avg_sq.scale + first_block};
    own.update(begin, end);
  }

  ZERO_EXT_BODY void update(int64_t begin, int64_t end) const {
    Block blocks[2];
    Block* own = &blocks[0];
    Block* next = &blocks[1];
    const int64_t whole = numel / kBlockElements;
    const int64_t last = end * kBlockElements < numel ? end * kBlockElements : numel;
    Marker marker(changes, begin * kBlockElements, last);
    begin_block(begin, *own);
    update_moments_alone(begin, *own);
    for (int64_t block = begin; block < end; ++block) {
      if (block + 1 < end) begin_block(block + 1, *next);
      if (block + 1 < end && block + 1 < whole) {
        update_both(block, *own, *next);
      } else {
        update_parameter_alone(block, *own);
        if (block + 1 < end) update_moments_alone(block + 1, *next);
      }
      const int64_t i = block * kBlockElements;
      if constexpr (marks) marker.mark(own->differing, i, numel_of(block));
      convert(own->first_code, numel_of(block), exp_avg.code + i);
      convert(own->second_code, numel_of(block), exp_avg_sq.code + i);
      std::swap(own, next);
    }
  }

  ZERO_EXT_BODY int64_t numel_of(int64_t block) const {
    const int64_t left = numel - block * kBlockElements;
    return left < kBlockElements ? left : kBlockElements;
  }

  ZERO_EXT_BODY void begin_block(int64_t block, Block& own) const {
    const int64_t i = block * kBlockElements;
    const int64_t n = numel_of(block);
    if (ahead) {
      fetch_ahead(grad + i, n, numel - i);
      fetch_ahead(master + i, n, numel - i);
      if constexpr (kHasParam<T>) fetch_ahead(param + i, n, numel - i);
    }
    convert(exp_avg.code + i, n, own.first_code);
    convert(exp_avg_sq.code + i, n, own.second_code);
  }

  ZERO_EXT_BODY void update_both(int64_t block, Block& own, Block& next) const {
    const AdamConstants k = c;
    const int64_t i = block * kBlockElements;
    const Coding coding = coding_of(block, own);
    const Scales scales = scales_of(block + 1);
    Largest largest;
#pragma GCC ivdep
    for (int64_t j = 0; j < kBlockElements; ++j) {
      update_parameter(k, coding, i, j, own);
      update_moments_of(k, scales, i + kBlockElements, j, next, largest);
    }
    write_scales(block + 1, largest);
  }

  ZERO_EXT_BODY void update_moments_alone(int64_t block, Block& own) const {
    const AdamConstants k = c;
    const Scales scales = scales_of(block);
    const int64_t n = numel_of(block);
    Largest largest;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
      update_moments_of(k, scales, block * kBlockElements, j, own, largest);
    }
    write_scales(block, largest);
  }

  ZERO_EXT_BODY void update_parameter_alone(int64_t block, Block& own) const {
    const AdamConstants k = c;
    const Coding coding = coding_of(block, own);
    const int64_t n = numel_of(block);
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
      update_parameter(k, coding, block * kBlockElements, j, own);
    }
  }

  // Element j of the block that begins at i.
  ZERO_EXT_BODY void update_moments_of(const AdamConstants& k, const Scales& scales, int64_t i,
                                       int64_t j, Block& own, Largest& largest) const {
    float p = decoupled ? 0 : current(i + j);
    float m = scales.first * signed_multiple(own.first_code[j]);
    float v = scales.second * unsigned_multiple(own.second_code[j]);
    update_moments(k, decayed<decoupled>(k, grad[i + j], p), m, v);
    own.first[j] = m;
    own.second[j] = v;
    largest.high = greatest(largest.high, integer_of(m));
    largest.low = greatest(largest.low, static_cast<uint32_t>(integer_of(m)));
    largest.low_sq = greatest(largest.low_sq, static_cast<uint32_t>(integer_of(v)));
  }

  ZERO_EXT_BODY void update_parameter(const AdamConstants& k, const Coding& coding, int64_t i,
                                      int64_t j, Block& own) const {
    float p = current(i + j);
    uint32_t old[2] = {};
    if constexpr (marks) {
      old[0] = rounded_bits<T>(master[i + j]);
      old[1] = bits_of(param[i + j]);
    }
    decayed<decoupled>(k, 0, p);
    p = updated(k, p, own.first[j], own.second[j]);
    master[i + j] = p;
    if constexpr (kHasParam<T>) param[i + j] = from_float<T>(p);
    if constexpr (marks) own.differing[j] = differs_from(old, rounded_bits<T>(p));
    own.first_code[j] = code_of<int8_t>(coding.first_reciprocal * coding.first[j]);
    own.second_code[j] = code_of<uint8_t>(coding.second_reciprocal * coding.second[j]);
  }

  ZERO_EXT_BODY Scales scales_of(int64_t block) const {
    return {exp_avg.scale[block], exp_avg_sq.scale[block]};
  }

  ZERO_EXT_BODY void write_scales(int64_t block, const Largest& largest) const {
    exp_avg.scale[block] = scale_of(largest.high, largest.low, true);
    exp_avg_sq.scale[block] = scale_of(0, largest.low_sq, false);
  }

  ZERO_EXT_BODY Coding coding_of(int64_t block, const Block& own) const {
    const Scales scales = scales_of(block);
    return {reciprocal_of(scales.first), reciprocal_of(scales.second),
            is_coded(scales.first) ? own.first : kZeros,
            is_coded(scales.second) ? own.second : kZeros};
  }

  ZERO_EXT_BODY float current(int64_t i) const {
    if constexpr (!kHasParam<T>)
      return master[i];
    else
      return written_or_master(param[i], master[i]);
  }
};

template <class T, bool decoupled, bool marks>
Status run_blocks(const AdamArgs& args, const Launch& launch) {
  const AdamBlocks<T, decoupled, marks> adam{
      constants_of(args),
      0,  // of each segment
      args.master,
      static_cast<T*>(args.param),
      args.grad,
      {static_cast<int8_t*>(args.exp_avg), args.exp_avg_scale},
      {static_cast<uint8_t*>(args.exp_avg_sq), args.exp_avg_sq_scale},
      {.words = args.changed},
      fetches_ahead(FetchAhead::all)};
  return with_segments(args, [&](const UpdateSegment* segments, int64_t count) {
    return run_list<kBlockElements>(launch, segments, count, adam);
  });
}

}  // namespace

Status adam_blocks_cpu(const AdamArgs& args, const Launch& launch) {
  return with_param(args, [&]<class T>() {
    const auto with_decay = [&]<bool marks>() {
      return args.decoupled ? run_blocks<T, true, marks>(args, launch)
                            : run_blocks<T, false, marks>(args, launch);
    };
    if constexpr (kMarks<T>) {
      if (args.changed != nullptr) return with_decay.template operator()<true>();
    }
    return with_decay.template operator()<false>();
  });
}

}  // namespace zero_ext::kernels
