// Reductions: the reductions of one backward, started in turn and finished in the order of their
// starts.
//
// Owner:     Engine.
// Threads:   called only under Engine::mutex_.
// Invariant: every rank starts the same reductions in the same order; every unit is reduced exactly
//            once in a backward that reduces.
//
// Note [Turns]
// A unit that is complete before its turn waits, and so do its gradients, as autograd made them:
// buckets are lent to the units of the next two turns alone, so that two are enough. The first
// turns follow the order of the units, the reverse of registration, which is roughly that of a
// backward. But norms that a block registers last are used before what it registers first, and all
// of the block would wait for them: small units come last. After the first step turns follow the
// order in which rank 0's units became complete in its last backward; the ranks agree on that in
// the step (Engine::learn_turns).
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
  // A gradient of unit u is about to arrive. `starts_at_end`: no reduction starts before finish().
  void prepare(int64_t u, bool starts_at_end);
  // One of unit u has arrived. `start`: the reductions of complete units whose turn it is.
  void arrived(int64_t u, bool start);
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

  // See Note [Turns]. The units in the order in which they became complete in this rank's last
  // backward; those without gradients last. Empty where none had any.
  std::vector<int64_t> completed() const;
  void set_turns(std::vector<int64_t> turns);
  bool knows_turns() const { return knows_turns_; }

  int64_t started() const { return started_; }

 private:
  bool is_small(const Unit& unit) const;
  // Waits for reductions under way where no bucket is free.
  void lend_bucket(Unit& unit);
  void start_ready();
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
  std::vector<int64_t> turns_;  // [units]
  bool knows_turns_ = false;
  size_t turn_ = 0;  // the next of them
  std::vector<int64_t> completed_;
  std::vector<uint8_t> is_completed_;  // [units]
  int64_t largest_bytes_ = 0;          // of a unit's message
  int64_t finished_ = 0;
  std::deque<int64_t> in_flight_;
  std::vector<std::vector<uint8_t>> contributed_;  // [units][slots]
  at::Tensor counts_;                              // int32, the same over the ranks
  Pending counting_;
  std::vector<Unit::Orphan> orphans_;  // of backwards that threw, until a later one reduces
  int64_t started_ = 0;
};

}  // namespace zero_ext
