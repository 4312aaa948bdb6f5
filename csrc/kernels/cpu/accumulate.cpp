// accumulate, accumulate_list: sum[i] = fma(scale, float(grad[i]), fresh ? 0 : sum[i])
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/accumulate.cpp
//
// Memory bound: reads grad, reads (unless fresh) and writes sum.
#include "kernels/cpu/elements.h"
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
    largest = largest_of(largest, magnitude_bits(value));
  }
  return largest;
}

template <class T>
struct Accumulate {
  float scale;
  bool fresh;
  bool stream;
  bool ahead;
  bool small_blocks;

  ZERO_EXT_BODY int32_t operator()(const T* grad, float* sum, int64_t numel) const {
    int32_t largest = 0;
    if (fresh) {
      fill_blocks(
          sum, numel, stream, ahead, [&](int64_t i, float* target, int64_t n) ZERO_EXT_BODY_LAMBDA {
            if (ahead) fetch_ahead(grad + i, n, numel - i);
            largest = largest_of(largest, accumulate_block<true>(grad + i, target, n, scale));
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
      largest = largest_of(largest, accumulate_block<false>(grad + i, sum + i, n, scale));
    }
    return largest;
  }
};

template <class T>
struct AccumulateFlat {
  Accumulate<T> accumulate;
  const T* grad;
  float* sum;
  int32_t* nonfinite;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    if (accumulate(grad + begin, sum + begin, end - begin) >= kInfinityBits)
      report_nonfinite(nonfinite);
  }
};

template <class T>
struct AccumulateList {
  Accumulate<T> accumulate;
  const AccumulateSegment* segments;
  int32_t* nonfinite;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    for_each_segment(
        segments, begin, end,
        [&](const AccumulateSegment& segment, int64_t from, int64_t to) ZERO_EXT_BODY_LAMBDA {
          const T* grad = static_cast<const T*>(segment.grad);
          const int32_t largest = accumulate(grad + from, segment.sum + from, to - from);
          if (largest >= kInfinityBits) report_nonfinite(flag_of(segment, nonfinite));
        });
  }
};

constexpr bool worth_streaming(int64_t sum_numel, bool fresh) {
  return fresh && sum_numel * element_bytes(DType::f32) >= kStreamBytes;
}

template <class T>
Accumulate<T> accumulate_of(int64_t numel, float scale, bool fresh) {
  return {scale, fresh, worth_streaming(numel, fresh), fetches_ahead(FetchAhead::sums),
          fetches_ahead(FetchAhead::all)};
}

}  // namespace

Status accumulate_cpu(const void* grad, DType dtype, float* sum, int64_t numel, float scale,
                      bool fresh, int32_t* nonfinite, const Launch& launch) {
  if (numel < 0) return Status::bad_argument;
  return with_element(dtype, [&]<class T>(T) {
    const auto accumulate = accumulate_of<T>(numel, scale, fresh);
    return run(launch, numel,
               AccumulateFlat<T>{accumulate, static_cast<const T*>(grad), sum, nonfinite});
  });
}

Status accumulate_list_cpu(const AccumulateSegment* segments, int64_t count, DType dtype,
                           float scale, bool fresh, int32_t* nonfinite, const Launch& launch) {
  const int64_t numel = total_numel(segments, count);
  if (numel < 0) return Status::bad_argument;
  return with_element(dtype, [&]<class T>(T) {
    const auto accumulate = accumulate_of<T>(numel, scale, fresh);
    return run(launch, numel, AccumulateList<T>{accumulate, segments, nonfinite});
  });
}

}  // namespace zero_ext::kernels
