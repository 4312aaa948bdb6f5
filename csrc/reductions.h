// Reductions: the reductions of one backward, started in unit order and finished in the order of
// their starts.
//
// Owner:     Engine.
// Threads:   called only under Engine::mutex_.
// Invariant: every rank starts the same reductions in the same order; every unit is reduced exactly
//            once in a backward that reduces.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "bucket.h"
#include "comm.h"
#include "sharded_parameters.h"
#include "unit_context.h"

namespace zero_ext {

class Reductions {
 public:
  Reductions(Comm& comm, const UnitContext& context, const ShardedParameters& parameters)
      : comm_(comm),
        context_(context),
        parameters_(parameters),
        pool_(context.memory,
              {.gradients = context.compute_place(), .received = context.state_place()}) {}

  // A backward that reduces; `scale`: of what is added to the sums.
  void begin(float scale);
  // To a unit that needs one now; waits for the oldest reduction where none is free.
  void lend_bucket(Unit& unit);
  // Those of complete units whose turn it is.
  void start_ready();
  // All that are left; waits.
  void finish();
  // The backward threw, whether it reduces or not: the sums of the first `units`, which had begun
  // it, become what they were.
  void abort(int64_t units);

  // Backwards since the last step whose reductions all ended. Ranks differ where one threw after
  // the others had all that they needed of it.
  int64_t finished() const { return finished_; }
  void forget_finished() { finished_ = 0; }
  // What messages are told apart by; ranks differ where not all began a backward that threw.
  int64_t round() const { return round_; }
  void agree_on_round(int64_t round) { round_ = round; }

  int64_t started() const { return started_; }
  int64_t extra_buckets() const { return extra_buckets_; }

 private:
  void finish_oldest();
  // How many ranks used each slot, where the contributions do not say it.
  bool counts_users() const;
  bool contributes_all() const;
  void start_counting();
  void finish_counting();
  void drop_orphans();

  Comm& comm_;
  const UnitContext& context_;
  const ShardedParameters& parameters_;
  BucketPool pool_;
  float scale_ = 1;
  int64_t round_ = 0;  // the backward's number among those that reduce: on every rank alike
  int64_t turn_ = 0;   // the next unit to reduce
  int64_t finished_ = 0;
  std::deque<int64_t> in_flight_;
  std::vector<uint8_t> contributed_;  // of the units that were started, slot by slot
  at::Tensor counts_;                 // int32, the same over the ranks
  Pending counting_;
  std::vector<Unit::Orphan> orphans_;  // of backwards that threw, until a later one reduces
  int64_t started_ = 0;
  int64_t extra_buckets_ = 0;
};

}  // namespace zero_ext
