// Words: how ranks whose devices read each other's memory say how far they are.
//
// A word is a number of 30 bits and a tag. Numbers go round; none is ahead of another one by half of
// them.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace zero_ext::kernels {

constexpr int32_t kMostWords = 128;  // of one call

ZERO_EXT_EVERYWHERE constexpr uint32_t word_of(uint32_t number, uint32_t tag) {
  return number << 2 | tag;
}

ZERO_EXT_EVERYWHERE constexpr uint32_t tag_of(uint32_t word) { return word & 3; }

// Whether the word's writer has come to `number`, or gone on from there.
ZERO_EXT_EVERYWHERE constexpr bool has_come(uint32_t word, uint32_t number) {
  return word - word_of(number, 0) < 0x80000000U;
}

// What is noted where word k has not come in time, and where it has come with another tag.
ZERO_EXT_EVERYWHERE constexpr int32_t late_word(int32_t k) { return 2 * k + 1; }
ZERO_EXT_EVERYWHERE constexpr int32_t odd_word(int32_t k) { return 2 * k + 2; }

}  // namespace zero_ext::kernels
