// find_nonfinite, per segment: *nonfinite = 1 if any value is NaN or infinite
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/find_nonfinite.cpp
//
// Memory bound: reads the values.
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {

Status find_nonfinite_cpu(const ReadSegment* segments, int64_t count, const Launch& launch) {
  const auto find = [](const ReadSegment& segment, int64_t begin, int64_t end)
                        ZERO_EXT_BODY_LAMBDA {
                          int32_t largest = 0;
                          for (int64_t i = begin; i < end; ++i) {
                            largest = greatest(largest, magnitude_bits(segment.value[i]));
                          }
                          report_nonfinite(largest, segment.nonfinite);
                        };
  return run_list(launch, segments, count, find);
}

}  // namespace zero_ext::kernels
