// cast: target[i] = target_dtype(source[i])
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/cast.cpp
//
// Memory bound: reads source, writes target. Equal dtypes are copied bit by bit, NaN included.
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {
namespace {

template <class Source, class Target>
struct Cast {
  const Source* source;
  Target* target;
  bool stream;
  bool ahead;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    const Source* from = source + begin;
    if constexpr (std::is_same_v<Source, Target>) {
      std::memcpy(target + begin, from, static_cast<size_t>(end - begin) * sizeof(Target));
      return;
    }
    fill_blocks(target + begin, end - begin, stream, ahead,
                [&](int64_t i, Target* to, int64_t n) ZERO_EXT_BODY_LAMBDA {
                  if (ahead) fetch_ahead(from + i, n, end - begin - i);
#pragma GCC ivdep
                  for (int64_t k = 0; k < n; ++k) to[k] = from_float<Target>(to_float(from[i + k]));
                });
  }
};

}  // namespace

Status cast_cpu(const void* source, DType source_dtype, void* target, DType target_dtype,
                int64_t numel, const Launch& launch) {
  if (numel < 0) return Status::bad_argument;
  const bool stream = numel * element_bytes(target_dtype) >= kStreamBytes;
  return with_element(source_dtype, [&]<class Source>(Source) {
    return with_element(target_dtype, [&]<class Target>(Target) {
      const Cast<Source, Target> body{static_cast<const Source*>(source),
                                      static_cast<Target*>(target), stream,
                                      fetches_ahead(FetchAhead::sums)};
      return run(launch, numel, body);
    });
  });
}

}  // namespace zero_ext::kernels
