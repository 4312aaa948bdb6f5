// Reductions: the reductions of one backward, started in their order and finished in the order of
// their starts.
//
// Owner:     Engine.
// Threads:   called only under the engine's lock.
// Invariant: every rank starts the same reductions in the same order; in a backward that reduces,
//            every unit is reduced once, and once more where a rank had late gradients.
//
// Note [Reduction order]
// Units are reduced in one order, the same on every rank. A unit that is complete before the units
// in front of it waits, and autograd's tensors hold its gradients. Buckets are lent to the next two
// units alone, so that two buckets are enough.
// The first order is that of the units, the reverse of registration, which is roughly the order of
// a backward. Small units come last: a block often registers its norms last and uses them first,
// and the whole block would wait for them. After the first step the order is the one in which rank
// 0's units became complete in its last backward. The ranks agree on it in the step
// (Steps::learn_reduction_order).
//
// Note [Late gradients]
// A hidden gradient is one that the running graph does not show: inner backwards bring it
// (reentrant checkpointing). A unit awaits as many hidden gradients as it had in the last backward.
// In the first backward it awaits one of each parameter. With stage 3 it waits instead until the
// backward has left its modules as often as last time, in the first backward once each.
// If fewer arrive, the unit is reduced when the backward ends. If more arrive, they are late: the
// unit holds them, and they are reduced after all units. Only some ranks may have late gradients.
// Hence, where hidden gradients are possible, the last unit of the order starts when the backward
// ends, and each rank's message of it says which units have late gradients on that rank.
// On a device the host has to wait for that answer. A rank whose backward threw does not: it says in
// its own answer that it gives up, and the others raise an error where they have late gradients.
// There the ranks agree in the first step whether rank 0 runs inner backwards. Where it does not, or
// a graph is captured, every unit with possible hidden gradients is reduced at the end of the
// backward. The same holds where gathers are collectives: a rank that waits in a gather, because it
// left a parameter out, would keep the others' gathers behind its reduction.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "comm/comm.h"
#include "memory/bucket.h"
#include "reduce/notices.h"
#include "reduce/reduction_order.h"
#include "reduce/slot_users.h"
#include "reduce/unit_reduction.h"
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
              {.gradients = context.compute_place(), .received = context.state_place()}),
        users_(comm, context),
        notices_(comm) {}

  // A rank that has begun a backward that reduces, after this rank's last one; -1: none is known.
  int64_t who_began();
  // Whether it would be known: ranks see each other's epochs, or announce their backwards.
  bool sees_others() const { return comm_.way().begun != Begun::unknown; }
  // Ranks announce their backwards, but not the next one, which is the first since the last step: a
  // rank that comes to a step takes part in it unasked. The same on every rank.
  bool next_is_unannounced() const { return needs_notices() && is_first(); }
  // Another rank has ended its part of this rank's last backward that reduced.
  bool others_left() const { return comm_.is_past(Comm::Kind::reduction, finished_.epoch()); }

  // A backward that reduces begins. `scale`: of what is added to the sums. `hidden`: more gradients
  // may arrive than the graph shows.
  void begin(float scale, bool hidden);
  // Adds a gradient of unit u, times `scale`, and starts what is complete with it.
  void accept(int64_t u, int64_t slot, const at::Tensor& grad, float scale);
  // Starts what is complete with unit u, in a backward that reduces.
  void arrived(int64_t u);
  // Starts the reductions that are left, and waits for all. The backward may still be aborted.
  void finish();
  // The backward threw, and other ranks' devices wait for its reductions: queues what is left, with
  // the gradients that have arrived. Waits for no rank, which may never come.
  void complete_for_others();
  // In a backward without gradients: the next one.
  void start_next();
  bool all_started() const { return all_started_; }
  // The backward threw, whether it reduces or not: the sums of the first `units`, which had begun
  // it, become what they were.
  void abort(int64_t units);

  // Room for the messages of all units, where other ranks read them in place; in fp32, because local
  // sums may be sent. Collective.
  void reserve_messages();

  // This backward's reductions all ended.
  void count_finished() {
    finished_.add(backward_);
    in_epoch_ = false;
  }
  // In such a step no rank compares which backwards it is made with: the next backward does.
  void note_step_without_messages() {
    if (finished_.count() > 0) steps_ = c10::get_hash(steps_, finished_.which()) & 0xffff;
  }

  // See Note [Reduction order]. The units in the order in which they became complete in this rank's
  // last backward; those without gradients last. Empty where none had any.
  std::vector<int64_t> completed() const;
  // `hidden`: hidden gradients are to be expected from now on; the same on every rank.
  void set_order(std::vector<int64_t> order, bool hidden);
  bool knows_order() const { return order_.is_learned(); }

  int64_t started() const { return started_; }

 private:
  // One rank: gradients went straight into the reduced sums.
  bool sums_directly() const { return comm_.world() == 1 && !context_.offloads(); }
  bool counts_users() const {
    return !sums_directly() && !UnitReduction::brings_flags(context_, comm_);
  }
  // Ranks must tell each other that they begin a backward.
  bool needs_notices() const { return comm_.world() > 1 && comm_.way().begun == Begun::notices; }
  // No rank has reduced since the last step, and no gradient is left of before.
  bool is_first() const;
  bool can_reduce_late() const;
  // The reduction of unit u, which has a bucket from now on. Waits for older ones where no bucket
  // is free.
  UnitReduction& reduction_of(int64_t u);
  void start_ready();
  void start_all();
  void start_one();
  void after_starts();
  // `late`: see UnitReduction::start.
  void start(int64_t u, std::vector<uint8_t> late);
  void start_reduction(int64_t u, std::vector<uint8_t> late);
  void finish_oldest();
  void count_users(bool gives_up);
  void finish_started();
  // Of each unit whether this rank has late gradients.
  std::vector<uint8_t> own_late() const;
  bool any_late() const;
  void reduce_late();
  void drop_abandoned();
  // This rank has sent all that the other ranks need.
  bool sent_all() const;

  Comm& comm_;
  const UnitContext& context_;
  const ShardedParameters& parameters_;
  FinishedBackwards& finished_;
  BucketPool pool_;
  ReductionOrder order_;
  bool learned_hidden_ = false;
  int64_t started_ = 0;  // since the engine began
  int32_t steps_ = 0;    // a hash of those steps' backwards; the sum over all ranks is an int32

  // One backward.
  float scale_ = 1;
  bool in_epoch_ = false;      // it began one, which has not ended
  bool all_started_ = false;   // every reduction that the other ranks wait for
  bool reduces_late_ = false;  // late gradients are possible
  std::vector<uint8_t> late_;  // [units]: late gradients on any rank; empty where it is not known
  bool finishing_ = false;     // all were started, and finish() waits for them
  int64_t backward_ = 0;       // its number in finished_, the same on every rank
  SlotUsers users_;
  Notices notices_;
  bool announced_ = false;                                // this backward
  std::vector<std::unique_ptr<UnitReduction>> lent_;      // a bucket, but not started
  std::deque<std::unique_ptr<UnitReduction>> in_flight_;  // started, the oldest first
  // Of backwards that threw, until a later one reduces.
  std::vector<AbandonedReduction> abandoned_;
};

}  // namespace zero_ext
