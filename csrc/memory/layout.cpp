#include "memory/layout.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace zero_ext {
namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Layout::Layout(std::vector<SlotSpec> specs, int64_t ranges, int64_t alignment) : ranges_(ranges) {
  if (ranges < 1 || alignment < 1)
    throw std::invalid_argument("Layout: ranges and alignment must be positive");
  const int64_t block = std::lcm(alignment, kBlockNumel);
  int64_t of_range = alignment;
  int64_t end = 0;
  slots_.reserve(specs.size());
  for (SlotSpec& spec : specs) {
    if (spec.numel < 0) throw std::invalid_argument("Layout: negative numel");
    const int64_t padded = round_up(spec.numel, alignment);
    if (spec.numel >= kBlockedNumel) {
      end = round_up(end, block);
      pad_to(end);
      of_range = block;
    }
    slots_.push_back({.spec = std::move(spec), .offset = end, .padded_numel = padded});
    end += padded;
  }
  // A space without elements still has one aligned block per range, so that no buffer and no
  // message is ever empty.
  range_numel_ = std::max(of_range, round_up((end + ranges - 1) / ranges, of_range));

  pieces_.resize(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    for (int64_t begin = slot.offset; begin < slot.padded_end();) {
      const int64_t range = begin / range_numel_;
      const int64_t stop = std::min(slot.padded_end(), (range + 1) * range_numel_);
      const int64_t numel = std::max<int64_t>(0, std::min(stop, slot.end()) - begin);
      pieces_[i].push_back({.range = range,
                            .range_begin = begin - range * range_numel_,
                            .slot_begin = begin - slot.offset,
                            .numel = numel,
                            .gap_numel = stop - begin - numel});
      begin = stop;
    }
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    const bool ordered = i == 0 || slots_[i - 1].padded_end() <= slots_[i].offset;
    if (!ordered || slots_[i].offset % alignment != 0 || slots_[i].padded_end() > padded_numel()) {
      throw std::logic_error("Layout: slot " + slots_[i].spec.name + " is misplaced");
    }
  }
}

// The last slot that has elements is padded up to `begin`. No range begins inside that padding: it
// is shorter than a block and ends with one.
void Layout::pad_to(int64_t begin) {
  for (auto slot = slots_.rbegin(); slot != slots_.rend(); ++slot) {
    if (slot->padded_numel > 0) {
      slot->padded_numel = begin - slot->offset;
      return;
    }
    slot->offset = begin;
  }
}

std::vector<int64_t> Layout::bounds(int64_t i) const {
  const Slot& slot = slots_.at(i);
  std::vector<int64_t> bounds;
  bounds.reserve(ranges_ + 1);
  for (int64_t range = 0; range <= ranges_; ++range) {
    bounds.push_back(std::clamp<int64_t>(range_begin(range) - slot.offset, 0, slot.spec.numel));
  }
  return bounds;
}

}  // namespace zero_ext
