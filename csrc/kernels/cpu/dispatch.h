// Runs a kernel's body on the best instruction set of this machine, on as many threads as the
// caller's Launch provides.
//
// A body is a small struct with `ZERO_EXT_BODY void operator()(int64_t begin, int64_t end)`: plain
// loops over plain elements, written once. run() compiles it three times and picks one of the
// three.
//
// Note [One body, three instruction sets]
// The compiler vectorises the same C++ for AVX-512, AVX2 and the baseline, so the three cannot
// drift apart. Rejected: intrinsics, which would be three texts to keep equal. The functions that a
// body calls must be inlined into it, or else they run as baseline code. So such functions are
// ZERO_EXT_BODY, and such lambdas carry ZERO_EXT_BODY_LAMBDA. Four compiler flags matter:
//
//   -O3                 vectorises
//   -ffp-contract=off   fuses operations where the formula says fma and nowhere else
//   -fno-math-errno     lets a square root be one instruction
//   -fno-wrapv          undoes a flag of Python's build, which costs accumulate_ranks 15 %
//
// Only -ffp-contract=off can change a result.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/elements.h"
#include "kernels/kernels.h"

#define ZERO_EXT_BODY inline __attribute__((always_inline))
#define ZERO_EXT_BODY_LAMBDA __attribute__((always_inline))

#if defined(__x86_64__)
#define ZERO_EXT_TARGET_AVX2 __attribute__((target("avx2,fma,bmi,bmi2,lzcnt")))
#define ZERO_EXT_TARGET_AVX512                                                                    \
  __attribute__((                                                                                 \
      target("avx512f,avx512cd,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2,lzcnt,prefer-vector-" \
             "width=512")))
#endif

namespace zero_ext::kernels {

enum class InstructionSet : int32_t { baseline, avx2, avx512 };

// The instruction set in use: the best that the CPU has, or that of use_instruction_set().
InstructionSet instruction_set();

// For tests: runs all later calls, of all threads, on `set`. Where the CPU lacks `set`, returns
// false and changes nothing.
bool use_instruction_set(InstructionSet set);

// Which kernels prefetch what they read: none, those that add up or convert, or all. See Note
// [Blocks] in cpu/blocks.h.
enum class FetchAhead : int32_t { none, sums, all };

// Whether kernels of the kind `least` prefetch on this processor.
bool fetches_ahead(FetchAhead least);

// For tests: all later calls, of all threads, use `kernels`. Returns what they used before.
FetchAhead use_fetch_ahead(FetchAhead kernels);

// Fewer elements than this are not worth a second thread.
constexpr int64_t kGrainNumel = 32768;

template <class Body>
void run_baseline(void* body, int64_t begin, int64_t end) {
  (*static_cast<const Body*>(body))(begin, end);
}

#if defined(__x86_64__)
template <class Body>
ZERO_EXT_TARGET_AVX2 void run_avx2(void* body, int64_t begin, int64_t end) {
  (*static_cast<const Body*>(body))(begin, end);
}

template <class Body>
ZERO_EXT_TARGET_AVX512 void run_avx512(void* body, int64_t begin, int64_t end) {
  (*static_cast<const Body*>(body))(begin, end);
}
#endif

// The body, compiled for the instruction set in use.
template <class Body>
RangeBody compiled() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::avx512:
      return run_avx512<Body>;
    case InstructionSet::avx2:
      return run_avx2<Body>;
    case InstructionSet::baseline:
      break;
  }
#endif
  return run_baseline<Body>;
}

// Runs body(begin, end) over pieces that cover [0, numel).
template <class Body>
Status run(const Launch& launch, int64_t numel, Body body, int64_t grain_numel = kGrainNumel) {
  if (numel <= 0) return Status::ok;
  const RangeBody range = compiled<Body>();
  if (numel <= grain_numel) {
    range(&body, 0, numel);
  } else {
    launch.parallel_for(numel, grain_numel, range, &body);
  }
  return Status::ok;
}

// `largest`: of the magnitude_bits of a range. Several threads may find a non-finite value. All of
// them store the same 1.
inline void report_nonfinite(int32_t largest, int32_t* nonfinite) {
  if (largest >= kInfinityBits && nonfinite != nullptr)
    std::atomic_ref<int32_t>(*nonfinite).store(1, std::memory_order_relaxed);
}

// Calls visit(segment, begin, end) for the parts of a list's segments that cover the flat range
// [begin, end) of the list's elements, segment after segment. They are counted in blocks of
// `per_block` elements, of which the last one of a segment may be shorter.
template <int64_t per_block = 1, class Segment, class Visit>
ZERO_EXT_BODY void for_each_segment(const Segment* segments, int64_t begin, int64_t end,
                                    const Visit& visit) {
  int64_t first = 0;
  for (const Segment* segment = segments; first < end; ++segment) {
    const int64_t last = first + (segment->numel + per_block - 1) / per_block;
    const int64_t from = begin > first ? begin : first;
    const int64_t to = end < last ? end : last;
    if (from < to) visit(*segment, from - first, to - first);
    first = last;
  }
}

// The number of elements of all segments, or of their blocks, or -1 where a segment is not valid.
template <int64_t per_block = 1, class Segment>
int64_t total_numel(const Segment* segments, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (segments[i].numel < 0) return -1;
    total += (segments[i].numel + per_block - 1) / per_block;
  }
  return total;
}

// Runs body(segment, begin, end) over pieces that cover a list, see for_each_segment.
template <int64_t per_block = 1, class Segment, class Body>
Status run_list(const Launch& launch, const Segment* segments, int64_t count, const Body& body) {
  const int64_t numel = total_numel<per_block>(segments, count);
  if (numel < 0) return Status::bad_argument;
  const auto over_list = [=](int64_t begin, int64_t end) ZERO_EXT_BODY_LAMBDA {
    for_each_segment<per_block>(segments, begin, end, body);
  };
  return run(launch, numel, over_list, kGrainNumel / per_block);
}

}  // namespace zero_ext::kernels
