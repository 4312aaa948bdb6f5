// Arrival and StepAnswer: what a rank tells the others when it comes to a call that all ranks make
// together: a step, clipping, unfreezing.
//
// Between hosts' ranks one message has all of a StepAnswer. Where a device's backend has the
// messages, the hosts of the ranks send an Arrival, and the devices the rest; see DeviceAnswer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/square_sum.h"

namespace zero_ext {

// How far a rank's micro-batches have come when it comes to a step.
enum class MicroBatches : int64_t {
  none,               // it had none
  complete,           // as many as a step needs
  too_few,            // fewer: other ranks had enough, or the step is rejected with an error
  unreduced,          // its local sums were never reduced: the step is rejected with an error
  changed_too_early,  // likewise; see Note [Changed too early] in finished_backwards.h
};

struct Arrival {
  // See FinishedBackwards.
  int64_t epoch = 0;
  int64_t backwards = 0;
  int64_t which = 0;
  int64_t lost = 0;
  MicroBatches micro_batches = MicroBatches::none;
  int64_t values = 0;  // a digest of what must be the same on every rank
  // Of a device, see Note [Serving].
  int64_t gathers = 0;
  int64_t reductions = 0;
  int64_t completed_one = 0;
  int64_t saw_inner = 0;
};

struct StepAnswer {
  Arrival arrival;
  int64_t finite = 1;
  int64_t first_record = 0;  // the first NaN record
  int64_t settings = 0;
  int64_t written = 0;  // see PublishedGradients::written_by_hand
  int64_t subset = -1;  // the first rank of this rank's subset, see UnitContext
  int64_t of_subset = 0;
  double divide_by = 0;  // this rank's part; 0: none was given
  kernels::SquareSum squares{};
  // The place of `arrival.which` in the message.
  static constexpr int64_t kWhich = offsetof(Arrival, which) / sizeof(int64_t);
};

// On a device each number more is another launch.
struct DeviceAnswer {
  enum Place : int64_t { kFinite, kFirstRecord, kAgreed, kSquares };
};

// Which rank's micro-batches keep a step from being made; -1: none.
struct Completeness {
  int64_t unreduced = -1;
  int64_t too_few = -1;  // where no rank has had enough
  int64_t changed_too_early = -1;
};
Completeness completeness_of(const std::vector<Arrival>& arrivals);

}  // namespace zero_ext
