// RankLayout: a unit's layout as one rank sees it, with this rank's part of each slot.
//
// Owner:     one Unit. Frozen: nothing changes after construction.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "memory/flat_buffer.h"
#include "memory/layout.h"

namespace zero_ext {

// Consecutive elements of this rank's range that are updated in one call: its parts of the slots
// first_slot … last_slot, gaps included.
struct Run {
  int64_t begin;
  int64_t numel;
  int64_t first_slot;
  int64_t last_slot;
};

class RankLayout : public Layout {
 public:
  RankLayout(std::vector<SlotSpec> specs, int64_t ranges, int64_t alignment, int64_t rank);
  RankLayout(const RankLayout&) = delete;
  RankLayout& operator=(const RankLayout&) = delete;

  // Ranks that are ranges() apart hold the same range.
  int64_t own_range() const { return rank_ % ranges(); }
  int64_t own_begin() const { return range_begin(own_range()); }
  // Null where this rank holds nothing of slot i.
  const Piece* own_piece(int64_t i) const { return own_pieces_[i]; }
  // Whether this rank's range has gaps between its pieces or after them.
  bool own_gaps() const { return own_gaps_; }

  // This rank's part of slot i, 1-D, in a buffer where this rank's range begins at `range_begin`.
  at::Tensor own_slice(const FlatBuffer& buffer, int64_t i, int64_t range_begin = 0) const;
  // A copy of this rank's part of slot i from whole `values` in the parameter's shape.
  at::Tensor own_part(int64_t i, const at::Tensor& values, at::ScalarType dtype) const;
  // The used slots of this rank's range as the longest possible runs. Neighbouring slots of a run
  // are `same`.
  std::vector<Run> runs(const std::function<bool(int64_t)>& used,
                        const std::function<bool(int64_t, int64_t)>& same) const;

 private:
  int64_t rank_;
  std::vector<const Piece*> own_pieces_;  // [slots]
  bool own_gaps_ = false;
};

}  // namespace zero_ext
