// pack_marked, unpack_marked: see Note [Marks of changed elements] in changes.h.
// Compile alone: g++ -std=c++20 -O3 -I. -c kernels/cpu/pack_marked.cpp
#include <bit>
#include <cstring>

#include "kernels/changes.h"

namespace zero_ext::kernels {
namespace {

constexpr int64_t kWordBits = 16;
constexpr int64_t kAtOnce = 4;  // words

// Calls visit(i) for each marked element, in the order of groups, words and bits.
template <class Visit>
void for_each_marked(const uint16_t* marks, int64_t numel, const Visit& visit) {
  for (int64_t w = 0; w < mark_words(numel); w += kAtOnce) {
    uint64_t left = 0;
    std::memcpy(&left, marks + w, sizeof(left));
    const int64_t first = w / kRowMarks * kGroupMarks + w % kRowMarks;
    for (; left != 0; left &= left - 1) {
      const int64_t bit = std::countr_zero(left);
      visit(first + bit / kWordBits + bit % kWordBits * kRowMarks);
    }
  }
}

}  // namespace

void pack_marked(const uint16_t* marks, int64_t numel, const uint16_t* elements, uint16_t* packed) {
  for_each_marked(marks, numel, [&](int64_t i) { *packed++ = elements[i]; });
}

void unpack_marked(const uint16_t* marks, int64_t numel, const uint16_t* packed,
                   uint16_t* elements) {
  for_each_marked(marks, numel, [&](int64_t i) { elements[i] = *packed++; });
}

}  // namespace zero_ext::kernels
