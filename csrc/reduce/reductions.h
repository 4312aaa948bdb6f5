// Reductions: the reductions of one backward, started in turn and finished in the order of their
// starts.
//
// Owner:     Engine.
// Threads:   called only under Engine::mutex_.
// Invariant: every rank starts the same reductions in the same order; in a backward that reduces,
//            every unit is reduced once, and once more where a rank had late gradients.
//
// Note [Reduction order]
// A unit that is complete before its turn waits, and so do its gradients, as autograd made them:
// buckets are lent to the units of the next two turns alone, so that two are enough. The first
// turns follow the order of the units, the reverse of registration, which is roughly that of a
// backward. But norms that a block registers last are used before what it registers first, and all
// of the block would wait for them: small units come last. After the first step turns follow the
// order in which rank 0's units became complete in its last backward; the ranks agree on that in
// the step (Engine::learn_reduction_order).
//
// Note [Late gradients]
// Where inner backwards bring gradients (reentrant checkpointing), the graph does not show how many
// will come to a unit. It waits for as many more as came in the last backward, in the first one for
// one of each parameter; with stage 3 until its modules were left as often as then, in the first
// backward once each. Fewer came: it is reduced when the backward ends. More came: those that are
// late are held, and reduced when all units were; the ranks agree on which, since only some may
// have late ones. Hence the unit whose turn is the last starts when the backward ends, where
// hidden gradients are possible, and with it each rank tells whether it has any. On a device the host has
// to wait for the answer: there the ranks agree in the first step whether rank 0 runs inner
// backwards, and where it does not, or a graph is captured, hidden gradients wait for the end of the
// backward. So they do where ranks gather together: one that waits there, because it left a
// parameter out, would keep the others' gathers behind its reduction.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "comm/comm.h"
#include "memory/bucket.h"
#include "units/finished_backwards.h"
#include "units/sharded_parameters.h"
#include "units/unit_context.h"

namespace zero_ext {

class Reductions {
 public:
  Reductions(Comm& comm, const UnitContext& context, const ShardedParameters& parameters,
             FinishedBackwards& finished)
      : comm_(comm),
        context_(context),
        parameters_(parameters),
        finished_(finished),
        pool_(context.memory,
              {.gradients = context.compute_place(), .received = context.state_place()}) {}

  // A backward that reduces; `scale`: of what is added to the sums. `hidden gradients`: more gradients may
  // come than the units expect.
  void begin(float scale, bool hidden);
  // A gradient of unit u is about to arrive.
  void prepare(int64_t u);
  // One of unit u has arrived.
  void arrived(int64_t u);
  // All that are left; waits. It may still be aborted.
  void finish();
  // The backward threw, whether it reduces or not: the sums of the first `units`, which had begun
  // it, become what they were.
  void abort(int64_t units);

  // This backward's reductions all ended.
  void count_finished() {
    finished_.add(backward_);
    in_epoch_ = false;
  }

  // See Note [Reduction order]. The units in the order in which they became complete in this rank's last
  // backward; those without gradients last. Empty where none had any.
  std::vector<int64_t> completed() const;
  // `hidden gradients`: some are to be expected from now on; the same on every rank.
  void set_order(std::vector<int64_t> order, bool hidden);
  bool knows_order() const { return knows_order_; }

  int64_t started() const { return started_; }

 private:
  bool is_small(const Unit& unit) const;
  // Waits for reductions under way where no bucket is free.
  void lend_bucket(Unit& unit);
  void start_ready();
  void start(int64_t u);
  void finish_oldest();
  void finish_started();
  bool can_reduce_late() const;
  void reduce_late();
  // How many ranks used each slot, where the contributions do not say it.
  bool counts_users() const;
  void forget_contributions();
  void start_counting();
  void finish_counting();
  void drop_abandoned();

  Comm& comm_;
  const UnitContext& context_;
  const ShardedParameters& parameters_;
  FinishedBackwards& finished_;
  BucketPool pool_;
  float scale_ = 1;
  bool in_epoch_ = false;       // this backward began one, which has not ended
  bool sent_all_ = false;       // that the other ranks wait for
  std::vector<int64_t> order_;  // [units]
  bool knows_order_ = false;
  bool learned_hidden_ = false;
  bool reduces_late_ = false;  // in this backward
  size_t early_ = 0;           // as many may start before the backward ends
  size_t next_ = 0;            // the next of them
  bool any_late_ = false;
  std::vector<size_t> completed_at_;  // [units]: as many were complete before it, if it was
  size_t completed_ = 0;
  int64_t largest_bytes_ = 0;  // of a unit's message
  int64_t backward_ = 0;       // what finished_ knows it by, on every rank alike
  std::deque<int64_t> in_flight_;
  // What is counted: the slots of units in the order of their starts, and whether this rank has
  // something of each.
  std::vector<int64_t> counted_units_;
  std::vector<int32_t> contributed_;
  bool contributes_all_ = true;
  at::Tensor counts_;  // int32, the same over the ranks; then how many ranks have late gradients
  Pending counting_;
  std::vector<Unit::AbandonedReduction>
      abandoned_;  // of backwards that threw, until a later one reduces
  int64_t started_ = 0;
};

}  // namespace zero_ext
