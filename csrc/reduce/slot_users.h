// SlotUsers: how many ranks used each slot of the units that were reduced, from one all-reduce,
// where contributions bring no flags (UnitReduction::brings_flags).
//
// Owner:     Reductions.
// Threads:   called only under the engine's lock.
// Invariant: every rank adds the same units in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/comm.h"
#include "reduce/unit_reduction.h"
#include "units/unit.h"
#include "units/unit_context.h"

namespace zero_ext {

class SlotUsers {
 public:
  SlotUsers(Comm& comm, const UnitContext& context) : comm_(comm), context_(context) {}

  // The reduction of `unit` has started.
  void add(Unit& unit);
  // What a rank, or one of them, says of late gradients.
  struct Late {
    std::vector<uint8_t> units;  // [units]: it has some; empty where it was not asked for
    bool gave_up = false;        // its backward threw: it reduces none
  };
  // Starts the all-reduce. Every rank asks for late gradients, or none does. `steps`: see
  // Reductions::note_step_without_messages. On the host finish() raises where the ranks differ.
  void start(const Late& own, int32_t steps);
  bool started() const { return counts_.defined(); }
  // Waits, and marks the slots that some rank used as summed. Returns what any rank says.
  // `backward`: for an error's message.
  Late finish(int64_t backward);
  // The units that were added are forgotten.
  void clear();
  // The backward threw. What the other ranks may still need; only where it was started.
  AbandonedReduction abandon();

 private:
  // This rank has something of every slot, and late gradients are not asked for: the answer is
  // known.
  bool knows_answer() const { return comm_.way().queued && uses_all_ && late_units_ == 0; }

  Comm& comm_;
  const UnitContext& context_;
  std::vector<Unit*> units_;
  std::vector<int32_t> used_;  // by this rank: the slots of the units, one unit after another
  bool uses_all_ = true;
  int64_t late_units_ = 0;
  int32_t steps_ = 0;
  // int32: of each slot the ranks that used it; then of Late's facts; then the sum of `steps`.
  at::Tensor counts_;
  Pending counting_;
};

}  // namespace zero_ext
