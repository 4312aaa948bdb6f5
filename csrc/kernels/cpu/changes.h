// Marks of changed elements, block by block, see kernels/changes.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "kernels/changes.h"
#include "kernels/cpu/blocks.h"
#include "kernels/elements.h"

namespace zero_ext::kernels {

// Whether updates of parameters of type T can mark what they change.
template <class T>
constexpr bool kMarks = std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

// Where the marks of a range lie; `words` is null where nobody asks.
struct Changes {
  uint16_t* words = nullptr;
  int64_t first = 0;  // the mark of the range's first element
};

// Marks the changes of [begin, end), block after block. Other threads may mark the elements beside
// these at the same time.
class Marker {
 public:
  ZERO_EXT_BODY Marker(const Changes& changes, int64_t begin, int64_t end)
      : words_(changes.words), first_(changes.first), begin_(begin), end_(end) {}

  // The elements from i on whose marks are in the same group.
  ZERO_EXT_BODY int64_t numel(int64_t i) const {
    const int64_t whole = kGroupMarks - (first_ + i) % kGroupMarks;
    return whole < end_ - i ? whole : end_ - i;
  }

  // The next `n` elements, from i on. `differing[j]`: not 0 where the bits of element i + j have
  // changed.
  ZERO_EXT_BODY void mark(const uint16_t* differing, int64_t i, int64_t n) {
    for (int64_t j = 0, size = 0; j < n; j += size) {
      size = numel(i + j) < n - j ? numel(i + j) : n - j;
      const int64_t mark = first_ + i + j;
      mark_part(differing + j, mark, size);
      if ((mark + size) % kGroupMarks == 0 || i + j + size == end_) write_group(mark);
    }
  }

 private:
  // A part of a group. Whole groups are fast, and whole rows are faster than others.
  ZERO_EXT_BODY void mark_part(const uint16_t* differing, int64_t mark, int64_t n) {
    constexpr int64_t kRows = kGroupMarks / kRowMarks;
    if (n == kGroupMarks) {
      for (int64_t k = 0; k < kRowMarks; ++k) {
        uint16_t word = 0;
        for (int64_t row = 0; row < kRows; ++row) {
          word |= static_cast<uint16_t>(differing[row * kRowMarks + k] != 0 ? 1 << row : 0);
        }
        group_[k] |= word;
      }
    } else if (mark % kRowMarks == 0 && n % kRowMarks == 0) {
      for (int64_t row = 0; row < n / kRowMarks; ++row) {
        const auto bit = static_cast<uint16_t>(1 << (mark_bit(mark) + row));
        for (int64_t k = 0; k < kRowMarks; ++k) {
          group_[k] |= differing[row * kRowMarks + k] != 0 ? bit : 0;
        }
      }
    } else {
      for (int64_t j = 0; j < n; ++j) {
        const int changed = differing[j] != 0 ? 1 : 0;
        group_[(mark + j) % kRowMarks] |= static_cast<uint16_t>(changed << mark_bit(mark + j));
      }
    }
  }

  ZERO_EXT_BODY void write_group(int64_t mark) {
    const int64_t group = mark / kGroupMarks * kGroupMarks;
    uint16_t* const words = words_ + mark_word(group);
    if (group >= first_ + begin_ && group + kGroupMarks <= first_ + end_) {
      for (int64_t k = 0; k < kRowMarks; ++k) words[k] |= group_[k];
    } else {
      for (int64_t k = 0; k < kRowMarks; ++k) {
        std::atomic_ref<uint16_t>(words[k]).fetch_or(group_[k], std::memory_order_relaxed);
      }
    }
    for (uint16_t& word : group_) word = 0;
  }

  uint16_t* words_;
  int64_t first_;
  int64_t begin_;
  int64_t end_;
  alignas(kLineBytes) uint16_t group_[kRowMarks] = {};
};

// Not 0 where `bits` are not both of `old`: the rounding of the old master, and the old parameter.
ZERO_EXT_BODY uint16_t differs_from(const uint32_t (&old)[2], uint32_t bits) {
  return static_cast<uint16_t>((old[0] ^ bits) | (old[1] ^ bits));
}

// Calls visit(i, n, differing) for the blocks of [begin, end), whose elements of `arrays` it
// prefetches where `ahead`, and marks what it has written to `differing`: see Marker::mark.
template <class Visit, class... T>
ZERO_EXT_BODY void mark_blocks(const Changes& changes, int64_t begin, int64_t end, bool ahead,
                               const Visit& visit, const T*... arrays) {
  Marker marker(changes, begin, end);
  alignas(kLineBytes) uint16_t differing[kGroupMarks];
  for (int64_t i = begin, n = 0; i < end; i += n) {
    n = marker.numel(i);
    if (ahead) (fetch_ahead(arrays + i, n, end - i), ...);
    visit(i, n, differing);
    marker.mark(differing, i, n);
  }
}

}  // namespace zero_ext::kernels
