// Sums of hashes of 32-bit words. They are no part of struct Kernels: on devices, torch's int64
// operations make the same sums (zero_ext/fingerprints.py).
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace zero_ext::kernels {

// Some words of a value, from its word `first` on. Modulo 2^64, with word w at place i:
//
//   p       = key + i * 0x9E3779B97F4A7C15
//   q       = (p mod 2^32) * (p / 2^32)
//   sums[0] = sums[0] + w * ((p xor q) | 1)
//   sums[1] = sums[1] + w * ((q rotated by 32 bits - p) | 1)
struct HashedSegment {
  const void* words;
  int64_t numel;
  uint64_t key;
  uint64_t first;
  uint64_t* sums;  // [2]
};

// In no order: the sums of the parts of a value add up to those of the value. A change of a single
// word always changes both sums, because what multiplies it is odd.
Status add_hashes(const HashedSegment* segments, int64_t count, const Launch& launch);

}  // namespace zero_ext::kernels
