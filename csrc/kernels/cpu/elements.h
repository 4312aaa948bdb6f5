// Elements of the three dtypes, and blocks of them.
//
// Every conversion is exact or rounds to nearest even, as torch's does. Subnormals are kept,
// overflow becomes infinity, NaN becomes the dtype's quiet NaN. Conversions have no branches, so
// that loops over them vectorise. They use integer or exact float operations, so that all
// instruction sets agree. They are right with flushed subnormals (torch.set_flush_denormal) too.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "kernels/cpu/dispatch.h"

namespace zero_ext::kernels {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// `condition ? a : b` as mask arithmetic. With a conditional expression the compiler moves the
// float operations that lead to a or b into branches, and the loop stays scalar.
ZERO_EXT_BODY uint32_t select(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0U - static_cast<uint32_t>(condition);
  return b ^ ((a ^ b) & mask);
}

ZERO_EXT_BODY float select(bool condition, float a, float b) {
  return std::bit_cast<float>(
      select(condition, std::bit_cast<uint32_t>(a), std::bit_cast<uint32_t>(b)));
}

ZERO_EXT_BODY float to_float(float value) { return value; }

ZERO_EXT_BODY float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Normal numbers, infinity and NaN: an exact multiplication rebiases the exponent. Subnormals: the
// mantissa is placed into the last bits of 0.5, and 0.5 is subtracted. (After M. Dukhan's FP16
// library, which c10 uses as well.)
ZERO_EXT_BODY float to_float(Float16 value) {
  const uint32_t magnitude = (static_cast<uint32_t>(value.bits) & 0x7FFFU) << 13;
  const float normal = std::bit_cast<float>(magnitude + (224U << 23)) * 0x1p-112F;
  const float subnormal = std::bit_cast<float>((magnitude >> 13) | (126U << 23)) - 0.5F;
  const uint32_t sign = (static_cast<uint32_t>(value.bits) & 0x8000U) << 16;
  const uint32_t unsigned_bits = select(magnitude < (1U << 23), std::bit_cast<uint32_t>(subnormal),
                                        std::bit_cast<uint32_t>(normal));
  return std::bit_cast<float>(sign | unsigned_bits);
}

// The bits of the rounded value, still 32 bits wide, so that the vector code can compare them
// without narrowing.
template <class T>
uint32_t rounded_bits(float value) = delete;

template <>
ZERO_EXT_BODY uint32_t rounded_bits<float>(float value) {
  return std::bit_cast<uint32_t>(value);
}

template <>
ZERO_EXT_BODY uint32_t rounded_bits<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return value != value ? 0x7FC0U : rounded;
}

// The float adder does the rounding. Adding a power of two shifts the last place of the result to
// the end of the mantissa. That power is 2^13 above that place, or more for subnormals. Scaling up
// first turns values that overflow into infinity.
template <>
ZERO_EXT_BODY uint32_t rounded_bits<Float16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const float scaled = (std::bit_cast<float>(bits & 0x7FFFFFFFU) * 0x1p+112F) * 0x1p-110F;
  const uint32_t doubled = bits + bits;
  const uint32_t exponent = doubled & 0xFF000000U;
  const uint32_t bias = select(exponent < 0x71000000U, 0x71000000U, exponent);
  const uint32_t sum =
      std::bit_cast<uint32_t>(std::bit_cast<float>((bias >> 1) + 0x07800000U) + scaled);
  const uint32_t rounded = ((sum >> 13) & 0x7C00U) + (sum & 0x0FFFU);
  return ((bits >> 16) & 0x8000U) | select(doubled > 0xFF000000U, 0x7E00U, rounded);
}

ZERO_EXT_BODY uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
ZERO_EXT_BODY uint32_t bits_of(BFloat16 value) { return value.bits; }
ZERO_EXT_BODY uint32_t bits_of(Float16 value) { return value.bits; }

template <class T>
ZERO_EXT_BODY T from_float(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return {static_cast<uint16_t>(rounded_bits<T>(value))};
  }
}

// See Note [A written parameter wins over its master] in kernels.h.
template <class T>
ZERO_EXT_BODY bool is_written(T param, float master) {
  return rounded_bits<T>(master) != bits_of(param);
}

template <class T>
ZERO_EXT_BODY float written_or_master(T param, float master) {
  return std::bit_cast<float>(is_written(param, master) ? bits_of(to_float(param))
                                                        : bits_of(master));
}

// An integer that grows with |value| and is kInfinityBits or more for infinity and NaN. The largest
// of a range costs two cheap operations per value and no branch.
constexpr int32_t kInfinityBits = 0x7F800000;

ZERO_EXT_BODY int32_t magnitude_bits(float value) {
  return std::bit_cast<int32_t>(value) & 0x7FFFFFFF;
}

ZERO_EXT_BODY int32_t largest_of(int32_t a, int32_t b) { return a > b ? a : b; }

// Note [Blocks]
// A sum of several gradients is made block by block. A block of the sum stays in the L1 cache while
// the gradients pass over it one after the other. The memory then reads one stream at a time and
// keeps its pages open longer. Figures are parts of the read-modify-write bandwidth of one core,
// unless they say GB/s.
//
// AMD Zen 4, two bf16 gradients:
//
//   no blocks        0.69
//   blocks of 256    0.83
//   blocks of 512    0.95
//   blocks of 1,024  0.76 to 0.92
//
// Prefetching every line in software is slower there than prefetching none. The processor's own
// prefetching ends at a page. With the first line of the sum's next page prefetched, one gradient
// reaches 1.03 instead of 0.88. That kernel has no block of its own, which would cost as much.
// Nothing more is gained from the page after that, from more lines, or from the gradient's pages.
//
// AMD Zen 5 is the other way round, because its own prefetching starts anew whenever a stream
// changes. There blocks of 512 reach 0.48 to 0.78, and no blocks 0.80 to 0.95. So every line of all
// streams is prefetched kAheadNumel elements before its use. Two gradients then reach:
//
//   blocks of 128    0.93
//   blocks of 256    0.88
//   blocks of 512    0.85
//   no blocks        0.75
//
// One gradient reaches 1.00 instead of 0.80, in blocks of 512. Kernels that only read, and Adam,
// gain nothing.
//
// Intel Emerald Rapids: every kernel gains, and those that only read gain most. One core waits for
// the latency of its memory, not for its bandwidth. In blocks of 128, GB/s:
//
//                     not prefetched   prefetched
//   Adam                    23             26
//   one gradient            23             26   (24 in blocks of 512)
//   two gradients           19             23
//   fp32 to bf16            12             17
//   sum of squares          10             14
//
// With half or twice the distance Adam has 22 to 26 GB/s, and the others stay the same.
constexpr int64_t kBlockNumel = 512;
constexpr int64_t kFetchedBlockNumel = 128;
constexpr int64_t kAheadNumel = 1024;
constexpr int64_t kLineBytes = 64;

// The number of elements of the next block.
ZERO_EXT_BODY int64_t block_numel(int64_t left, bool fetched = false) {
  const int64_t most = fetched ? kFetchedBlockNumel : kBlockNumel;
  return left < most ? left : most;
}

constexpr uintptr_t kPageBytes = 4096;

// To be called for each block of a large range. At the beginning of a page it prefetches the first
// line of the next page.
template <class T>
ZERO_EXT_BODY void prefetch_next_page(const T* block) {
  const auto address = reinterpret_cast<uintptr_t>(block);
  if (address % kPageBytes >= kBlockNumel * sizeof(T)) return;
  __builtin_prefetch(reinterpret_cast<const char*>(address / kPageBytes * kPageBytes + kPageBytes));
}

// Prefetches `numel` elements, kAheadNumel after `block`, as far as they are among the `left`
// elements that begin at `block`.
template <class T>
ZERO_EXT_BODY void fetch_ahead(const T* block, int64_t numel, int64_t left) {
  const int64_t end = kAheadNumel + numel < left ? kAheadNumel + numel : left;
  constexpr int64_t kLineNumel = kLineBytes / static_cast<int64_t>(sizeof(T));
  for (int64_t k = kAheadNumel; k < end; k += kLineNumel) __builtin_prefetch(block + k);
}

// Note [Streaming stores]
// A large buffer that is written without being read bypasses the caches. An ordinary store would
// first read the line that it overwrites, which is a third of the traffic. A buffer below
// kStreamBytes may stay in the cache, where ordinary stores are twice as fast.
constexpr int64_t kStreamBytes = int64_t{2} << 20;

// The number of elements before the first one on a cache line's boundary.
template <class T>
ZERO_EXT_BODY int64_t numel_to_line(const T* target) {
  return static_cast<int64_t>((0 - reinterpret_cast<uintptr_t>(target)) % kLineBytes / sizeof(T));
}

// Writes a whole block (`numel` elements, a multiple of 16 bytes) past the caches. Source and
// target are 16-byte aligned.
template <class T>
ZERO_EXT_BODY void stream_block(const T* block, T* target, int64_t numel) {
#if defined(__x86_64__)
  const auto* from = reinterpret_cast<const __m128i*>(block);
  auto* to = reinterpret_cast<__m128i*>(target);
  for (int64_t k = 0; k < numel * static_cast<int64_t>(sizeof(T)) / 16; ++k) {
    _mm_stream_si128(to + k, _mm_load_si128(from + k));
  }
#else
  std::memcpy(target, block, numel * sizeof(T));
#endif
}

// Orders streaming stores before the store that tells another thread that they are done.
ZERO_EXT_BODY void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Fills target[0, numel) with fill(i, block_target, block_numel), which computes elements
// [i, i + block_numel) into block_target. `stream`: the stores bypass the caches. `ahead`: fill
// prefetches.
template <class T, class Fill>
ZERO_EXT_BODY void fill_blocks(T* target, int64_t numel, bool stream, bool ahead,
                               const Fill& fill) {
  int64_t i = 0;
  if (stream) {
    const int64_t head = block_numel(numel_to_line(target) < numel ? numel_to_line(target) : numel);
    if (head > 0) fill(0, target, head);
    alignas(kLineBytes) T block[kBlockNumel];
    const int64_t whole = block_numel(kBlockNumel, ahead);
    for (i = head; numel - i >= whole; i += whole) {
      fill(i, block, whole);
      stream_block(block, target + i, whole);
    }
    finish_streaming();
  }
  for (int64_t n = 0; i < numel; i += n) {
    n = block_numel(numel - i, ahead);
    fill(i, target + i, n);
  }
}

// Calls visit(T{}) with the element type of `dtype`.
template <class Visit>
Status with_element(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::f32:
      return visit(float{});
    case DType::bf16:
      return visit(BFloat16{});
    case DType::f16:
      return visit(Float16{});
  }
  return Status::bad_argument;
}

}  // namespace zero_ext::kernels
