// flatten, per segment:  overwrite: target[i] = target_dtype(source[i])
//                        add:       target[i] = target_dtype(float(target[i]) + float(source[i]))
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/flatten.cpp
//
// Memory bound: reads source, reads (to add) and writes target.
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {
namespace {

template <class Source, class Target>
struct Flatten {
  Write write;
  int32_t* nonfinite;
  bool ahead;

  ZERO_EXT_BODY void operator()(const CopySegment& segment, int64_t begin, int64_t end) const {
    const Source* source = static_cast<const Source*>(segment.source) + begin;
    Target* target = static_cast<Target*>(segment.target) + begin;
    const int32_t largest = write == Write::add
                                ? flatten<Write::add>(source, target, end - begin)
                                : flatten<Write::overwrite>(source, target, end - begin);
    report_nonfinite(largest, flag_of(segment, nonfinite));
  }

  // The values written are checked: they are non-finite wherever the source is. Equal dtypes keep
  // their bits.
  template <Write kWrite>
  ZERO_EXT_BODY int32_t flatten(const Source* source, Target* target, int64_t numel) const {
    if (!ahead) return flatten_block<kWrite>(source, target, numel);
    int32_t largest = 0;
    const auto visit = [&](int64_t i, int64_t n) ZERO_EXT_BODY_LAMBDA {
      largest = greatest(largest, flatten_block<kWrite>(source + i, target + i, n));
    };
    for_each_fetched_block(0, numel, visit, source, target);
    return largest;
  }

  template <Write kWrite>
  ZERO_EXT_BODY int32_t flatten_block(const Source* source, Target* target, int64_t numel) const {
    int32_t largest = 0;
#pragma GCC ivdep
    for (int64_t k = 0; k < numel; ++k) {
      Target value;
      if constexpr (kWrite == Write::add) {
        value = from_float<Target>(to_float(target[k]) + to_float(source[k]));
      } else if constexpr (std::is_same_v<Source, Target>) {
        value = source[k];
      } else {
        value = from_float<Target>(to_float(source[k]));
      }
      target[k] = value;
      largest = greatest(largest, magnitude_bits(to_float(value)));
    }
    return largest;
  }
};

}  // namespace

Status flatten_cpu(const CopySegment* segments, int64_t count, DType source_dtype,
                   DType target_dtype, Write write, int32_t* nonfinite, const Launch& launch) {
  return with_element(source_dtype, [&]<class Source>(Source) {
    return with_element(target_dtype, [&]<class Target>(Target) {
      return run_list(launch, segments, count,
                      Flatten<Source, Target>{write, nonfinite, fetches_ahead(FetchAhead::all)});
    });
  });
}

}  // namespace zero_ext::kernels
