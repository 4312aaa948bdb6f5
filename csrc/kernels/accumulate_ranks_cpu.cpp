// accumulate_ranks: s = fresh ? 0 : sum[i];  for each rank in order: s = fma(scale,
// float(grads[rank][i]), s);
//                   sum[i] = s
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -c accumulate_ranks_cpu.cpp
//
// Memory bound: reads every rank's gradient once, reads (unless fresh) and writes sum once.
#include "elements_cpu.h"
#include "kernels_cpu.h"

namespace zero_ext::kernels {
namespace {

template <class T, bool fresh>
struct AccumulateRanks {
  const void* const* grads;
  int32_t ranks;
  float* sum;
  float scale;
  bool stream;
  int32_t* nonfinite;

  ZERO_EXT_BODY const T* grad(int32_t rank) const { return static_cast<const T*>(grads[rank]); }

  // The block is summed in the L1 cache and written last, because one of the gradients may be `sum`
  // itself.
  ZERO_EXT_BODY void sum_block(int64_t i, float* s, int64_t numel) const {
    if constexpr (fresh) {
      for (int64_t k = 0; k < numel; ++k) s[k] = 0;
    } else {
      for (int64_t k = 0; k < numel; ++k) s[k] = sum[i + k];
    }
    int32_t rank = 0;
    for (; rank + 2 <= ranks; rank += 2) {
      const T* first = grad(rank) + i;
      const T* second = grad(rank + 1) + i;
#pragma GCC ivdep
      for (int64_t k = 0; k < numel; ++k) {
        s[k] = std::fma(scale, to_float(second[k]), std::fma(scale, to_float(first[k]), s[k]));
      }
    }
    if (rank < ranks) {
      const T* last = grad(rank) + i;
#pragma GCC ivdep
      for (int64_t k = 0; k < numel; ++k) s[k] = std::fma(scale, to_float(last[k]), s[k]);
    }
  }

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    alignas(kLineBytes) float s[kBlockNumel];
    int32_t largest = 0;
    fill_blocks(sum + begin, end - begin, stream,
                [&](int64_t i, float* target, int64_t n) ZERO_EXT_BODY_LAMBDA {
                  sum_block(begin + i, s, n);
#pragma GCC ivdep
                  for (int64_t k = 0; k < n; ++k) {
                    target[k] = s[k];
                    largest = largest_of(largest, magnitude_bits(s[k]));
                  }
                });
    if (largest >= kInfinityBits) report_nonfinite(nonfinite);
  }
};

}  // namespace

Status accumulate_ranks_cpu(const void* const* grads, int32_t ranks, DType dtype, float* sum,
                            int64_t numel, float scale, bool fresh, int32_t* nonfinite,
                            const Launch& launch) {
  if (numel < 0 || ranks < 0) return Status::bad_argument;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    if (grads[rank] == sum && dtype != DType::f32 && numel > 0) return Status::bad_argument;
  }
  const bool stream = fresh && numel * element_bytes(DType::f32) >= kStreamBytes;
  return with_element(dtype, [&]<class T>(T) {
    if (fresh) {
      return run(launch, numel,
                 AccumulateRanks<T, true>{grads, ranks, sum, scale, stream, nonfinite});
    }
    return run(launch, numel,
               AccumulateRanks<T, false>{grads, ranks, sum, scale, false, nonfinite});
  });
}

}  // namespace zero_ext::kernels
