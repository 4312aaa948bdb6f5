// GradientSums: the fp32 sums of a unit's gradients: this rank's range of the reduced gradient,
// and, while the rank accumulates locally, its own sum of the whole unit.
//
// Owner:     one Unit.
// Threads:   called only under the engine's lock.
// Invariant: fresh(i) means that this rank's part of the reduced gradient of slot i holds no sum.
//            Between two backwards it is the same on every rank.
//
// Note [Undoing]
// A backward that throws must leave the sums as they were. A sum that held nothing is marked fresh
// again. A reduced sum that holds something is copied before it is added to. The copy (before_)
// takes 4 bytes per element of one range, and exists only where several backwards accumulate.
// Local sums are not copied, which would double their memory. Instead the gradients of a slot with
// a local sum are held until the backward ends, or, where it reduces, until the unit's message is
// made of both. The reduced sum then takes the place of this rank's range of the local sum, which
// is copied before (local_before_).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "memory/flat_buffer.h"
#include "memory/rank_layout.h"
#include "units/unit_context.h"

namespace zero_ext {

// See Note [Where a gradient goes] in gradient_intake.h.
enum class GradientPath { direct, bucket, local };

class GradientSums {
 public:
  // The sums of a frozen unit never have memory. `layout`: the unit's, which outlives this.
  GradientSums(const UnitContext& context, const RankLayout& layout, const std::string& unit,
               UnitKind kind);

  // This rank's part of slot i of the reduced gradient, 1-D.
  at::Tensor slice(int64_t i) const { return layout_.own_slice(grad_, i); }
  at::Tensor range(const Run& run) const { return grad_.slice(run.begin, run.numel); }
  float* data() const { return static_cast<float*>(grad_.data()); }
  // The sums have memory; otherwise `why_unreadable()` is what a read raises.
  bool readable() const { return !grad_.emptied(); }
  const std::string& why_unreadable() const {
    return grad_.offloaded() ? offloaded_message_ : dropped_message_;
  }
  // This rank's part of the reduced gradient of slot i.
  float* reduced(int64_t i) const { return data() + layout_.own_piece(i)->range_begin; }
  // An element of the local sum. This rank's range comes first there, so that a buffer of one range
  // is the beginning of a buffer of all ranges.
  float* local(const Piece& piece, int64_t in_slot) const;

  bool fresh(int64_t i) const { return fresh_[i] != 0; }
  bool local_fresh(int64_t i) const { return local_fresh_[i] != 0; }
  // As local_fresh(), before this backward.
  bool local_was_fresh(int64_t i) const { return local_fresh_before_[i] != 0; }
  // Some slot has a reduced sum. The same on every rank, except after a backward that threw on some
  // ranks only.
  bool has_reduced() const;
  // Something was added to the sum.
  void mark_summed(int64_t i) { fresh_[i] = 0; }
  void mark_local_summed(int64_t i) { local_fresh_[i] = 0; }

  // Makes sure that the sums have memory; call it before they are written. On a device they have
  // memory from the first gradient until drop_idle(), because activations need it in between. On
  // the host they keep it, since new pages cost time in each step; the system may take idle pages.
  void need();
  // Gives the memory up where no slot has a gradient any more.
  void drop_idle();
  // Slot i becomes fresh; becomes a sum of zeros; becomes `values`, this rank's part, 1-D.
  void clear(int64_t i);
  void zero(int64_t i);
  void write(int64_t i, const at::Tensor& values);

  // One backward.
  void begin_backward(GradientPath path);
  // Around the addition of a reduction's contributions, and once more for late gradients. The
  // caller marks the slots that were added to.
  void begin_adding();
  void end_adding();
  // The backward cannot be undone any more. `keep`: the local sums go on, above the reduced ones.
  void end_backward(bool keep);
  // The backward threw: the sums become what they were before it, see Note [Undoing]. Returns
  // whether a reduction had been added to them. NaN records of the sums are unreliable then.
  [[nodiscard]] bool abort_backward();

  // See FlatBuffer::offload and reload.
  void offload(const std::string& message);
  void reload();

 private:
  // No slot has a sum, reduced or local.
  bool empty() const;
  bool come_and_go() const { return !context_.state.on_host(); }
  // Where the reduced sum is: in before_ while a local sum lies in its place.
  const FlatBuffer& reduced_sum() const {
    return path_ == GradientPath::local && kept_ ? before_ : grad_;
  }
  // Copies this rank's range, at the beginning of grad_, and copies it back.
  void copy_range(FlatBuffer& copy) const;
  void put_back(const FlatBuffer& copy);
  void keep_reduced();
  void restore_reduced();

  const UnitContext& context_;
  const RankLayout& layout_;
  std::string dropped_message_;  // what a read raises while the sums have no memory
  std::string offloaded_message_;
  FlatBuffer grad_;    // [range], fp32; [padded] with this rank's range first once local sums exist
  FlatBuffer before_;  // [range]; the reduced sum before this backward, or below the local sums
  bool kept_ = false;  // before_ holds the reduced sum
  FlatBuffer local_before_;  // [range]; the local sum that this backward's reduced sum replaced
  bool adding_ = false;      // a reduction's contributions were added in this backward
  GradientPath path_ = GradientPath::direct;  // of the last backward

  std::vector<uint8_t> fresh_;        // [slots]
  std::vector<uint8_t> local_fresh_;  // [slots], of the local sums
  std::vector<uint8_t> fresh_before_;
  std::vector<uint8_t> local_fresh_before_;
};

}  // namespace zero_ext
