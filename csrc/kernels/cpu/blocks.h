// Blocks of elements, what is prefetched of them, and stores past the caches.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "kernels/cpu/dispatch.h"
#include "kernels/elements.h"

namespace zero_ext::kernels {

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

// Calls visit(i, n) for the blocks of [begin, end), whose elements of `arrays` it prefetches.
template <class Visit, class... T>
ZERO_EXT_BODY void for_each_fetched_block(int64_t begin, int64_t end, const Visit& visit,
                                          const T*... arrays) {
  for (int64_t i = begin, n = 0; i < end; i += n) {
    n = block_numel(end - i, /*fetched=*/true);
    (fetch_ahead(arrays + i, n, end - i), ...);
    visit(i, n);
  }
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

}  // namespace zero_ext::kernels
