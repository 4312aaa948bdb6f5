// GradientSums: the fp32 sums of a unit's gradients: this rank's range of the reduced gradient,
// and, while it accumulates locally, this rank's own sum of the whole unit.
//
// Owner:     one Unit.
// Threads:   called only under Engine::mutex_.
// Invariant: fresh(i) says that this rank's part of the reduced gradient of slot i holds no sum; it
//            is the same on every rank between two backwards.
//
// Note [Undoing]
// A backward that throws must leave the sums as they were. A sum that held nothing is marked fresh
// again. Before a reduced sum that holds something is added to, it is copied (before_: 4 bytes per
// element of one range, only where several backwards accumulate). Copies of local sums would double
// what they take: instead, gradients of a slot that has one are held as they came, until the
// backward ends, or, where it reduces, until the unit's message is made of both. The reduced sum
// then takes the place of this rank's range of the local one (local_before_).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "memory/flat_buffer.h"
#include "memory/rank_layout.h"
#include "units/unit_context.h"

namespace zero_ext {

// See Note [Where a gradient goes] in gradient_intake.h.
enum class GradientPath { direct, bucket, local };

class GradientSums {
 public:
  // A frozen unit's have no memory, ever. `layout`: the unit's, which outlives this.
  GradientSums(const UnitContext& context, const RankLayout& layout, const std::string& unit,
               UnitKind kind);

  // This rank's part of slot i of the reduced gradient, 1-D.
  at::Tensor slice(int64_t i) const { return layout_.own_slice(grad_, i); }
  at::Tensor range(const Run& run) const { return grad_.slice(run.begin, run.numel); }
  float* data() const { return static_cast<float*>(grad_.data()); }
  // They lie somewhere; else `why_unreadable()` says why not.
  bool readable() const { return !grad_.emptied(); }
  const std::string& why_unreadable() const {
    return grad_.offloaded() ? offloaded_message_ : dropped_message_;
  }
  // Of slot i, this rank's part of the reduced gradient.
  float* reduced(int64_t i) const { return data() + layout_.own_piece(i)->range_begin; }
  // Of the local sum, which lies with this rank's range first, so that a buffer of one range is the
  // beginning of a buffer of all.
  float* local(const Piece& piece, int64_t in_slot) const;

  bool fresh(int64_t i) const { return fresh_[i] != 0; }
  bool local_fresh(int64_t i) const { return local_fresh_[i] != 0; }
  // Before this backward.
  bool local_was_fresh(int64_t i) const { return local_fresh_before_[i] != 0; }
  // No slot has a sum, reduced or local.
  bool empty() const;
  // Some slot has a reduced one; the same on every rank, but after a backward that threw on some.
  bool has_reduced() const;
  // Something was added.
  void mark_summed(int64_t i) { fresh_[i] = 0; }
  void mark_local_summed(int64_t i) { local_fresh_[i] = 0; }

  // To be called before they are written: on a device the sums have memory from the first gradient
  // on until they are dropped, because activations need it meanwhile. On the host its pages would
  // have to be made again for each step, and stay unless the system runs short.
  void need();
  // No slot has a gradient any more: the memory is free for others.
  void drop_idle();
  // Slot i becomes fresh; a sum of zeros; `values`, this rank's part, 1-D.
  void clear(int64_t i);
  void zero(int64_t i);
  void write(int64_t i, const at::Tensor& values);

  // One backward.
  void begin_backward(GradientPath path);
  // Before a reduction's contributions are added, and after; once more for those that came late.
  // What was added to must be marked.
  void begin_adding();
  void end_adding();
  // It ended, and cannot be undone any more; with `keep`, the reduced sum stays below the local
  // one.
  void end_backward(bool keep);
  // It threw: the sums become what they were before it, see Note [Undoing]. Returns whether a
  // reduction had been added to them: records of NaN in the sums may be of what is gone.
  [[nodiscard]] bool abort_backward();

  // Adds the squares of a run, in an order that does not matter. `sum` lies where the sums do.
  void add_squares(const Run& run, kernels::SquareSum* sum) const;

  // See FlatBuffer::offload and reload.
  void offload(const std::string& message);
  void reload();

 private:
  bool come_and_go() const { return !context_.state.on_host(); }
  // Where the reduced sum is: below the local one, once that lies where it was.
  const FlatBuffer& reduced_sum() const {
    return path_ == GradientPath::local && kept_ ? before_ : grad_;
  }
  // Of this rank's range, at the beginning of grad_; and back to there.
  void copy_range(FlatBuffer& copy) const;
  void put_back(const FlatBuffer& copy);
  void keep_reduced();
  void restore_reduced();

  const UnitContext& context_;
  const RankLayout& layout_;
  std::string dropped_message_;  // what a read raises meanwhile
  std::string offloaded_message_;
  FlatBuffer grad_;    // [range], fp32; [padded] with this rank's range first once local sums exist
  FlatBuffer before_;  // [range]; the reduced sum before this backward, or below the local sums
  bool kept_ = false;  // before_ holds it
  FlatBuffer local_before_;  // [range]; what the reduced sum of this backward replaced
  bool adding_ = false;      // in this backward, a reduction's contributions
  GradientPath path_ = GradientPath::direct;  // of the last backward

  std::vector<uint8_t> fresh_;        // [slots]
  std::vector<uint8_t> local_fresh_;  // [slots], of the local sums
  std::vector<uint8_t> fresh_before_;
  std::vector<uint8_t> local_fresh_before_;
};

}  // namespace zero_ext
