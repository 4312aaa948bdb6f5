// StepUpdate: one update of the parameters `indices`, unit by unit. Its caller asks for the next
// unit, updates the runs of it, and asks for the next, until there is none.
//
// Owner:     its caller, on the stack. Holds the engine's lock.
// Invariant: the parameters of one unit are gathered while the next one is updated.
//
//   StepUpdate update = engine.steps().begin_update(indices);
//   while (update.next_unit()) {
//     for (const Run& run : update.runs(same)) … update.unit() …;
//   }
#pragma once

#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/engine_parts.h"
#include "engine/running_backward.h"

namespace zero_ext {

struct UpdateCounts {
  int64_t updates = 0;  // begun, also those that threw: no later one has their messages
  int64_t gathers = 0;
  int64_t bytes_to_hosts = 0;  // of these gathers
};

class StepUpdate : Facet {
 public:
  StepUpdate(EngineParts& parts, RunningBackward& backward, const std::vector<int64_t>& indices,
             UpdateCounts& counts);
  StepUpdate(const StepUpdate&) = delete;
  StepUpdate& operator=(const StepUpdate&) = delete;

  // Ends the update of the last unit. False: that was the last one, all ranks' parameters and
  // shards are updated, and the lock may be given up.
  bool next_unit();

  // Of the unit that is being updated.
  int64_t unit_index() const { return u_; }
  Unit& unit() const { return parameters_.unit(u_); }
  // What is to be updated, as the longest runs of parameters that are `same` to each other.
  std::vector<Run> runs(const std::function<bool(int64_t, int64_t)>& same) const;
  int64_t first_parameter(const Run& run) const { return members()[run.first_slot]; }
  // The parameters that are updated, on whichever ranks hold them.
  const std::vector<int64_t>& updated() const { return updated_; }

 private:
  const std::vector<int64_t>& members() const { return parameters_.members(u_); }
  void end_unit();
  void finish();
  void for_each_copy(const std::function<void(HostCopies& copies, bool lent)>& visit);

  const Access access_;
  const at::NoGradGuard no_grad_;
  RunningBackward& backward_;
  UpdateCounts& counts_;
  const int64_t number_;
  std::vector<uint8_t> mine_;  // [parameters]
  int64_t u_;                  // counts down
  std::vector<int64_t> updated_;
  Pending gathering_;
};

}  // namespace zero_ext
