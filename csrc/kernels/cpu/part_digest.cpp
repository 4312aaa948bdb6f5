// part_digest: see kernels/digest.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/part_digest.cpp
//
// Memory bound. Each of two Zen 4 cores reads 22 GB/s, and 17 if no line of the next page is fetched.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "kernels/cpu/blocks.h"
#include "kernels/digest.h"

namespace zero_ext::kernels {
namespace {

constexpr int64_t kWordBytes = 8;

ZERO_EXT_BODY uint64_t folded(uint64_t word) {
  return word + static_cast<uint64_t>(static_cast<int64_t>(word) >> 32);
}

uint64_t weight(uint64_t k) {
  uint64_t z = (k + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return (z ^ (z >> 31)) | 1;
}

const uint64_t* weights_of_row() {
  static const auto weights = [] {
    std::array<uint64_t, kDigestRow> row;
    for (uint64_t k = 0; k < row.size(); ++k) row[k] = weight(k);
    return row;
  }();
  return weights.data();
}

struct PartDigest {
  const unsigned char* data;  // byte `offset` of the whole
  int64_t bytes;
  int64_t offset;
  const uint64_t* weights;
  std::atomic<uint64_t>* sum;

  // Words of the whole. The first and the last one may have bytes of other parts, which are zero here.
  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    const int64_t first = offset / kWordBytes;
    uint64_t total = 0;
    for (int64_t j = first + begin, last = j; j < first + end; j = last) {
      const int64_t row = j / kDigestRow;
      last = std::min((row + 1) * kDigestRow, first + end);
      total += row_sum(j, last) * weight((uint64_t{1} << 32) + static_cast<uint64_t>(row));
    }
    sum->fetch_add(total, std::memory_order_relaxed);
  }

  // Of the words [j, last) of one row.
  ZERO_EXT_BODY uint64_t row_sum(int64_t j, int64_t last) const {
    const int64_t whole_begin = (offset + kWordBytes - 1) / kWordBytes;
    const int64_t whole_end = (offset + bytes) / kWordBytes;
    uint64_t sum_of_row = 0;
    for (; j < last && j < whole_begin; ++j)
      sum_of_row += part_of_word(j) * weights[j % kDigestRow];
    const int64_t end = std::min(last, whole_end);
    const unsigned char* const word = data + j * kWordBytes - offset;
    const uint64_t* const own = weights + j % kDigestRow;
    for (int64_t block = 0, next = 0; block < end - j; block = next) {
      next = std::min(block + kBlockNumel, end - j);
      prefetch_next_page(reinterpret_cast<const uint64_t*>(word) + block);
      for (int64_t k = block; k < next; ++k) {
        uint64_t value;
        std::memcpy(&value, word + k * kWordBytes, sizeof(value));
        sum_of_row += folded(value) * own[k];
      }
    }
    for (j = std::max(j, end); j < last; ++j)
      sum_of_row += part_of_word(j) * weights[j % kDigestRow];
    return sum_of_row;
  }

  ZERO_EXT_BODY uint64_t part_of_word(int64_t j) const {
    const int64_t begin = std::max(j * kWordBytes, offset);
    const int64_t end = std::min((j + 1) * kWordBytes, offset + bytes);
    uint64_t value = 0;
    for (int64_t b = begin; b < end; ++b) {
      value |= uint64_t{data[b - offset]} << 8 * (b - j * kWordBytes);
    }
    return folded(value);
  }
};

}  // namespace

uint64_t part_digest(const void* data, int64_t bytes, int64_t offset, const Launch& launch) {
  if (bytes == 0) return 0;
  std::atomic<uint64_t> sum = 0;
  const int64_t words = (offset + bytes + kWordBytes - 1) / kWordBytes - offset / kWordBytes;
  run(launch, words,
      PartDigest{static_cast<const unsigned char*>(data), bytes, offset, weights_of_row(), &sum});
  return sum;
}

}  // namespace zero_ext::kernels
