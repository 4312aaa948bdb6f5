// Layout: where each parameter of a unit lies in the unit's flat index space, and how that space is
// cut over the ranks. docs/glossary.md has a picture.
//
// Owner:     one Unit. Frozen: nothing changes after construction.
// Invariant: slots are aligned, in bounds, disjoint and in order (proved in the constructor);
//            padded_numel() == ranges() * range_numel(); every range begins at an aligned index.
//
// Note [Blocks of a slot]
// A slot of kBlockedNumel elements or more consists of blocks of kBlockNumel, counted from its
// first element. It begins at a multiple of kBlockNumel, and so do all ranges of a space that has
// such a slot. So no block lies in two ranges, and what is computed block by block (8-bit optimizer
// states) does not depend on the number of ranks. The price is less than one block of padding
// before such a slot. Smaller parameters are not cut into blocks: for biases the padding would be
// more than the parameter.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zero_ext {

constexpr int64_t kBlockNumel = 256;
constexpr int64_t kBlockedNumel = 4096;

// The properties of a parameter that a layout needs. `strides` describe the dense memory order,
// which the flat buffer keeps.
struct SlotSpec {
  std::string name;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t numel;
};

struct Slot {
  SlotSpec spec;
  int64_t offset;        // first element in the unit's index space, aligned
  int64_t padded_numel;  // with the gap before the next slot, which holds zeros
  bool in_blocks() const { return spec.numel >= kBlockedNumel; }
  int64_t end() const { return offset + spec.numel; }
  int64_t padded_end() const { return offset + padded_numel; }
};

// The part of a slot that lies in one range.
struct Piece {
  int64_t range;        // which range
  int64_t range_begin;  // first element, from the beginning of the range
  int64_t slot_begin;   // first element, from the beginning of the slot
  int64_t numel;        // elements of the parameter, without the gap
  int64_t gap_numel;    // elements of padding after the last one
};

class Layout {
 public:
  // `ranges`: the number of equal ranges that the space is cut into. `alignment`: in elements;
  // every slot and every range begins at a multiple of it. See also Note [Blocks of a slot].
  Layout(std::vector<SlotSpec> specs, int64_t ranges, int64_t alignment);

  int64_t size() const { return static_cast<int64_t>(slots_.size()); }
  const Slot& slot(int64_t i) const { return slots_.at(i); }
  std::span<const Piece> pieces(int64_t i) const { return pieces_.at(i); }

  int64_t ranges() const { return ranges_; }
  int64_t range_numel() const { return range_numel_; }
  int64_t range_begin(int64_t range) const { return range * range_numel_; }
  int64_t padded_numel() const { return ranges_ * range_numel_; }

  // The elements of slot i that each range holds, as flat indices of the parameter. Range r holds
  // [bounds[r], bounds[r + 1]); there are [ranges + 1] bounds.
  std::vector<int64_t> bounds(int64_t i) const;

 private:
  void pad_to(int64_t begin);

  std::vector<Slot> slots_;
  std::vector<std::vector<Piece>> pieces_;
  int64_t ranges_;
  int64_t range_numel_;
};

}  // namespace zero_ext
