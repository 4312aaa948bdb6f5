// list_marks: see Note [Marks of changed elements] in changes.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/list_marks.cpp
#include <bit>

#include "kernels/changes.h"
#include "kernels/cpu/dispatch.h"

namespace zero_ext::kernels {
namespace {

constexpr int64_t kRows = kGroupMarks / kRowMarks;

struct ListMarks {
  const uint16_t* marks;
  int64_t* elements;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    int64_t* next = elements;
    for (int64_t group = begin; group < end; ++group) {
      const uint16_t* const words = marks + group * kRowMarks;
      // Bit k of a row is the mark of its element k.
      uint32_t rows[kRows] = {};
      for (int64_t k = 0; k < kRowMarks; ++k) {
        for (int64_t row = 0; row < kRows; ++row) {
          rows[row] |= (words[k] & (1 << row)) != 0 ? uint32_t{1} << k : 0;
        }
      }
      for (int64_t row = 0; row < kRows; ++row) {
        for (uint32_t left = rows[row]; left != 0; left &= left - 1) {
          *next++ = group * kGroupMarks + row * kRowMarks + std::countr_zero(left);
        }
      }
    }
  }
};

}  // namespace

int64_t count_marks(const uint16_t* marks, int64_t numel) {
  int64_t count = 0;
  for (int64_t w = 0; w < mark_words(numel); ++w) count += std::popcount(marks[w]);
  return count;
}

void list_marks(const uint16_t* marks, int64_t numel, int64_t* elements) {
  ListMarks list{marks, elements};
  compiled<ListMarks>()(&list, 0, mark_words(numel) / kRowMarks);  // one after the other
}

}  // namespace zero_ext::kernels
