// accumulate_list, per segment: sum[i] = fma(scale, float(grad[i]), fresh ? 0 : sum[i])
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/accumulate.cpp
//
// Memory bound: reads grad, reads (unless fresh) and writes sum.
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {
namespace {

// Returns the largest magnitude_bits of the results.
template <bool fresh, class T>
ZERO_EXT_BODY int32_t accumulate_block(const T* grad, float* sum, int64_t numel, float scale) {
  int32_t largest = 0;
#pragma GCC ivdep
  for (int64_t k = 0; k < numel; ++k) {
    const float value = std::fma(scale, to_float(grad[k]), fresh ? 0.0F : sum[k]);
    sum[k] = value;
    largest = greatest(largest, magnitude_bits(value));
  }
  return largest;
}

template <class T>
struct Accumulate {
  float scale;
  bool fresh;
  int32_t* nonfinite;
  bool stream;
  bool ahead;
  bool small_blocks;

  ZERO_EXT_BODY void operator()(const AccumulateSegment& segment, int64_t begin,
                                int64_t end) const {
    const T* grad = static_cast<const T*>(segment.grad) + begin;
    report_nonfinite(add(grad, segment.sum + begin, end - begin), flag_of(segment, nonfinite));
  }

  ZERO_EXT_BODY int32_t add(const T* grad, float* sum, int64_t numel) const {
    int32_t largest = 0;
    if (fresh) {
      fill_blocks(sum, numel, stream, ahead,
                  [&](int64_t i, float* target, int64_t n) ZERO_EXT_BODY_LAMBDA {
                    if (ahead) fetch_ahead(grad + i, n, numel - i);
                    largest = greatest(largest, accumulate_block<true>(grad + i, target, n, scale));
                  });
      return largest;
    }
    for (int64_t i = 0, n = 0; i < numel; i += n) {
      n = block_numel(numel - i, small_blocks);
      if (ahead) {
        fetch_ahead(grad + i, n, numel - i);
        fetch_ahead(sum + i, n, numel - i);
      } else {
        prefetch_next_page(sum + i);
      }
      largest = greatest(largest, accumulate_block<false>(grad + i, sum + i, n, scale));
    }
    return largest;
  }
};

}  // namespace

Status accumulate_list_cpu(const AccumulateSegment* segments, int64_t count, DType dtype,
                           float scale, bool fresh, int32_t* nonfinite, const Launch& launch) {
  const int64_t bytes = total_numel(segments, count) * element_bytes(DType::f32);
  return with_element(dtype, [&]<class T>(T) {
    return run_list(launch, segments, count,
                    Accumulate<T>{scale, fresh, nonfinite, fresh && bytes >= kStreamBytes,
                                  fetches_ahead(FetchAhead::sums), fetches_ahead(FetchAhead::all)});
  });
}

}  // namespace zero_ext::kernels
