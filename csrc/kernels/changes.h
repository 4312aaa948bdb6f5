// Which elements of a parameter change: one bit for each, in host memory. It is no part of struct
// Kernels: devices do not mark what they change.
//
// Note [Marks of changed elements]
// A mark says that an element may have another value than it had when the marks began. One that is
// missing says that its bits are the same. An update marks each element whose new bits are not its
// old ones, or not the rounding of its old master. What users write is marked as long as it differs
// from the master's rounding: when marks begin, when a master adopts it, and when they are read.
//
// The marks of 512 elements are 32 words, as if rows of 32 elements lay below each other: element e
// has bit e / 32 of word e % 32. So a vector of words takes the marks of a row at once.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace zero_ext::kernels {

constexpr int64_t kRowMarks = 32;                // elements, and words of a group
constexpr int64_t kGroupMarks = 16 * kRowMarks;  // elements

constexpr int64_t mark_words(int64_t numel) {
  return (numel + kGroupMarks - 1) / kGroupMarks * kRowMarks;
}

// The word and the bit of element i.
constexpr int64_t mark_word(int64_t i) { return i / kGroupMarks * kRowMarks + i % kRowMarks; }
constexpr int64_t mark_bit(int64_t i) { return i % kGroupMarks / kRowMarks; }

// Marks element first + i where param[i] != param_dtype(master[i]), bit by bit. Half dtypes alone.
Status mark_written(const void* param, DType param_dtype, const float* master, int64_t numel,
                    uint16_t* changed, int64_t first, const Launch& launch);

// Marked elements, ascending. No element from `numel` on is marked, here and below.
int64_t count_marks(const uint16_t* marks, int64_t numel);
void list_marks(const uint16_t* marks, int64_t numel, int64_t* elements);

// Copies the marked ones of `numel` elements of 2 bytes to `packed`, and back. There they lie in the
// order of their groups, words and bits.
void pack_marked(const uint16_t* marks, int64_t numel, const uint16_t* elements, uint16_t* packed);
void unpack_marked(const uint16_t* marks, int64_t numel, const uint16_t* packed,
                   uint16_t* elements);

}  // namespace zero_ext::kernels
