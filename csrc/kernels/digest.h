// A digest of bytes in host memory. It is no part of struct Kernels: devices do not need it.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace zero_ext::kernels {

// 64 bits. The same on every machine; a change of a single bit always changes them.
uint64_t digest(const void* data, int64_t bytes);

// Of `bytes` that begin `offset` bytes after the beginning of a whole. The digests of its parts add
// up to that of the whole, modulo 2^64. With little-endian signed words w of 8 bytes, the last one
// filled up with zeros, and weight(k), number k of SplitMix64 (Steele et al. 2014), made odd:
//
//   Σ (w[j] + (w[j] >> 32)) * weight(j % kDigestRow) * weight(2^32 + j / kDigestRow)
//
// Without the shift, two changed signs in upper halves would cancel. A change of one word changes
// the sum, unless its upper half goes from -2^31 to 2^31 - 1 or back. receiving.py has it in torch.
constexpr int64_t kDigestRow = 1024;
uint64_t part_digest(const void* data, int64_t bytes, int64_t offset, const Launch& launch);

}  // namespace zero_ext::kernels
