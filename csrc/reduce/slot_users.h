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
    bool any = false;
    bool gave_up = false;  // its backward threw: it reduces none
  };
  // Starts the all-reduce. `asks_late`: whether the ranks want to know of each other's late
  // gradients.
  void start(Late own, bool asks_late);
  bool started() const { return counts_.defined(); }
  // Waits, and marks the slots that some rank used as summed. Returns what any rank says, where it
  // was asked for. `backward`: for an error's message.
  Late finish(int64_t backward);
  // The units that were added are forgotten.
  void clear();
  // The backward threw. What the other ranks may still need; only where it was started.
  AbandonedReduction abandon();

 private:
  // This rank has something of every slot, and late gradients are not asked for: the answer is
  // known.
  bool knows_answer() const { return uses_all_ && !asks_late_; }

  Comm& comm_;
  const UnitContext& context_;
  std::vector<Unit*> units_;
  std::vector<int32_t> used_;  // by this rank: the slots of the units, one unit after another
  bool uses_all_ = true;
  bool asks_late_ = false;
  at::Tensor counts_;  // int32: of each slot the ranks that used it; then of both facts in Late
  Pending counting_;
};

}  // namespace zero_ext
