// find_nonfinite, per segment: *nonfinite = 1 if any value is NaN or infinite
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/find_nonfinite.cpp
//
// Memory bound: reads the values.
#include "kernels/cpu/elements.h"
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {
namespace {

struct FindNonfinite {
  const ReadSegment* segments;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    for_each_segment(segments, begin, end,
                     [](const ReadSegment& segment, int64_t from, int64_t to) ZERO_EXT_BODY_LAMBDA {
                       int32_t largest = 0;
                       for (int64_t i = from; i < to; ++i) {
                         largest = largest_of(largest, magnitude_bits(segment.value[i]));
                       }
                       if (largest >= kInfinityBits) report_nonfinite(segment.nonfinite);
                     });
  }
};

}  // namespace

Status find_nonfinite_cpu(const ReadSegment* segments, int64_t count, const Launch& launch) {
  const int64_t numel = total_numel(segments, count);
  if (numel < 0) return Status::bad_argument;
  return run(launch, numel, FindNonfinite{segments});
}

}  // namespace zero_ext::kernels
