// A digest of bytes in host memory. It is no part of struct Kernels: devices do not need it.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace zero_ext::kernels {

// 64 bits. The same on every machine; a change of a single bit always changes them.
uint64_t digest(const void* data, int64_t bytes);

// Of `bytes` that begin `offset` bytes after the beginning of a whole. The digests of its parts add
// up to that of the whole, modulo 2^64. With little-endian words w of 8 bytes, the last one filled up
// with zeros:
//
//   Σ w[j] * weight(j % kDigestRow) * weight(2^32 + j / kDigestRow)
//
// where weight(k) is the k-th number of SplitMix64 (Steele et al. 2014), made odd. So a change of a
// single word always changes the sum. zero_ext/state/receiving.py computes it with torch alone.
constexpr int64_t kDigestRow = 1024;
uint64_t part_digest(const void* data, int64_t bytes, int64_t offset, const Launch& launch);

}  // namespace zero_ext::kernels
