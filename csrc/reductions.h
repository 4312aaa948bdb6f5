// Reductions: the reductions of one backward, started in unit order and finished in the order of
// their starts.
//
// Owner:     Engine.
// Threads:   called only under Engine::mutex_.
// Invariant: every rank starts the same reductions in the same order; every unit is reduced exactly
//            once in a backward that reduces.
#pragma once

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
  // The backward threw, whether it reduced or not: every unit's sums become what they were.
  void abort() noexcept;

  int64_t started() const { return started_; }
  int64_t extra_buckets() const { return extra_buckets_; }

 private:
  void finish_oldest();
  void drop_orphans();

  Comm& comm_;
  const UnitContext& context_;
  const ShardedParameters& parameters_;
  BucketPool pool_;
  float scale_ = 1;
  int64_t round_ = 0;  // the backward's number among those that reduce: on every rank alike
  int64_t turn_ = 0;   // the next unit to reduce
  std::deque<int64_t> in_flight_;
  std::vector<Unit::Orphan> orphans_;  // of backwards that threw, until a later one reduces
  int64_t started_ = 0;
  int64_t extra_buckets_ = 0;
};

}  // namespace zero_ext
