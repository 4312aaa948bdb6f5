// add_hashes, per segment: sums = sums + hashes of its words
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/fingerprint.cpp
//
// Bound by three multiplications of 64 bits per word.
#include "kernels/fingerprint.h"

#include <atomic>
#include <bit>
#include <cstring>

#include "kernels/cpu/dispatch.h"

namespace zero_ext::kernels {
namespace {

constexpr uint64_t kStride = 0x9E3779B97F4A7C15;

void add_to(uint64_t* sum, uint64_t value) {
  std::atomic_ref<uint64_t>(*sum).fetch_add(value, std::memory_order_relaxed);
}

}  // namespace

Status add_hashes(const HashedSegment* segments, int64_t count, const Launch& launch) {
  const auto add = [](const HashedSegment& segment, int64_t begin, int64_t end)
                       ZERO_EXT_BODY_LAMBDA {
                         const auto* words = static_cast<const unsigned char*>(segment.words);
                         const uint64_t origin = segment.key + segment.first * kStride;
                         uint64_t sums[2] = {};
                         for (int64_t i = begin; i < end; ++i) {
                           uint32_t word = 0;
                           std::memcpy(&word, words + 4 * i, 4);
                           const uint64_t p = origin + static_cast<uint64_t>(i) * kStride;
                           const uint64_t q = (p & 0xFFFFFFFF) * (p >> 32);
                           sums[0] += word * ((p ^ q) | 1);
                           sums[1] += word * ((std::rotl(q, 32) - p) | 1);
                         }
                         add_to(segment.sums, sums[0]);
                         add_to(segment.sums + 1, sums[1]);
                       };
  return run_list(launch, segments, count, add);
}

}  // namespace zero_ext::kernels
