// accumulate_ranks: s      = fresh ? 0 : sum[i]
//                   s      = fma(scale, float(grads[rank][i]), s)     for each rank in order
//                   sum[i] = s
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/accumulate_ranks.cpp
//
// Memory bound: reads every rank's gradient once, reads (unless fresh) and writes sum once.
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {
namespace {

// to[k] = fma(scale, grad[k], first ? 0 : from[k]). Returns the largest magnitude_bits of the
// results.
template <bool first, class T>
ZERO_EXT_BODY int32_t add_rank(const T* grad, const float* from, float* to, int64_t numel,
                               float scale) {
  int32_t largest = 0;
#pragma GCC ivdep
  for (int64_t k = 0; k < numel; ++k) {
    const float value = std::fma(scale, to_float(grad[k]), first ? 0.0F : from[k]);
    to[k] = value;
    largest = greatest(largest, magnitude_bits(value));
  }
  return largest;
}

template <class T, bool fresh>
struct AccumulateRanks {
  const void* const* grads;
  int32_t ranks;  // at least 1
  float* sum;
  float scale;
  bool stream;  // fresh only
  bool ahead;
  int32_t* nonfinite;

  ZERO_EXT_BODY const T* grad(int32_t rank) const { return static_cast<const T*>(grads[rank]); }

  // The ranks' gradients pass one after the other over a block in the L1 cache, see Note [Blocks].
  // The last rank writes `to`. A gradient that is the sum itself is read before that, or element by
  // element as it is written. `left`: elements from i on, as far as it may prefetch.
  ZERO_EXT_BODY int32_t sum_block(int64_t i, float* to, int64_t numel, int64_t left) const {
    alignas(kLineBytes) float block[kBlockNumel];
    const float* from = sum + i;
    if (!fresh && !ahead) prefetch_next_page(from);
    if (!fresh && ahead) fetch_ahead(from, numel, left);
    if (ahead) fetch_ahead(grad(0) + i, numel, left);
    if (ranks == 1) return add_rank<fresh>(grad(0) + i, from, to, numel, scale);
    // The first and the last rank are outside the loop. So two ranks are two straight loops, which
    // is 7 % faster.
    add_rank<fresh>(grad(0) + i, from, block, numel, scale);
    for (int32_t rank = 1; rank < ranks - 1; ++rank) {
      if (ahead) fetch_ahead(grad(rank) + i, numel, left);
      add_rank<false>(grad(rank) + i, block, block, numel, scale);
    }
    if (ahead) fetch_ahead(grad(ranks - 1) + i, numel, left);
    return add_rank<false>(grad(ranks - 1) + i, block, to, numel, scale);
  }

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    int32_t largest = 0;
    if constexpr (fresh) {
      fill_blocks(sum + begin, end - begin, stream, ahead,
                  [&](int64_t i, float* target, int64_t n) ZERO_EXT_BODY_LAMBDA {
                    largest = greatest(largest, sum_block(begin + i, target, n, end - begin - i));
                  });
    } else {
      for (int64_t i = begin, n = 0; i < end; i += n) {
        n = block_numel(end - i, ahead);
        largest = greatest(largest, sum_block(i, sum + i, n, end - i));
      }
    }
    report_nonfinite(largest, nonfinite);
  }
};

}  // namespace

Status accumulate_ranks_cpu(const void* const* grads, int32_t ranks, DType dtype, float* sum,
                            int64_t numel, float scale, bool fresh, int32_t* nonfinite,
                            const Launch& launch) {
  if (numel < 0 || ranks < 1) return Status::bad_argument;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    if (grads[rank] == sum && dtype != DType::f32 && numel > 0) return Status::bad_argument;
  }
  const bool stream = fresh && numel * element_bytes(DType::f32) >= kStreamBytes;
  const bool ahead = fetches_ahead(FetchAhead::sums);
  return with_element(dtype, [&]<class T>(T) {
    const auto run_ranks = [&]<bool is_fresh>() {
      return run(launch, numel,
                 AccumulateRanks<T, is_fresh>{grads, ranks, sum, scale, stream, ahead, nonfinite});
    };
    return fresh ? run_ranks.template operator()<true>() : run_ranks.template operator()<false>();
  });
}

}  // namespace zero_ext::kernels
