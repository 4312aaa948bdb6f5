// Gatherer: which units' parameters are in memory, over all the passes of a model.
//
// Owner:     Engine.
// Threads:   called only under Engine::mutex_.
// Invariant: a unit's state and holds change by transition() alone (residency.h). Between two
//            steps no rank's shard changes, unless a forward writes to its own parameters, so that
//            it does not matter when a rank takes its range.
//
// Note [One-sided gathers]
// A collective gather hangs as soon as one rank takes another branch. Here each rank offers its
// range of every unit at the beginning of each pass (a root forward, a backward), whether it will
// gather the unit itself or not, and a gather takes the other ranks' offers: nobody has to enter
// a unit for another rank's sake. An offer that nobody takes stays for the next pass. After each
// step the ranks tell each other what they took, and all wait until everybody's shards are updated.
// Where all ranks read each other's memory, one offer of each unit lasts for ever, and any number
// of passes is served: also the forwards of one rank alone.
// A device's own backend (NCCL) has no such messages: there gathers are collectives, which every
// rank must enter in the same order, and an update follows them on the device's streams.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "autograd/backward_phase.h"
#include "comm/comm.h"
#include "gather/residency.h"
#include "units/unit.h"

namespace zero_ext {

struct GatherOptions {
  int64_t prefetch_bytes = 0;  // gathered ahead of their use, at most
  // Also where all ranks read each other's memory: nothing overlaps with that, and what comes early
  // has left the caches when it is used (3 to 5 % of a step of the GPT benchmark).
  bool prefetch_from_local_peers = false;
  int64_t retained_bytes = -1;  // what kept graphs may hold gathered; -1: no limit
  bool reshard_after_forward = true;
};

// Where forwards enter and leave units: a module with hooks.
struct HookSite {
  std::vector<int64_t> units;  // numbers that add_unit() gave
  bool root = false;           // the sharded module itself: passes begin and end here
  bool first = true;           // of the sites of its units, in registration order
  bool last = true;
};

class Gatherer {
 public:
  Gatherer(Comm& comm, const UnitContext& context, const BackwardPhase& backward,
           GatherOptions options);

  int64_t add_unit(Unit* unit);
  int64_t add_hook_site(HookSite site);
  // `added` is needed wherever `unit` is.
  void add_to_sites_of(int64_t unit, int64_t added);

  void enter_forward(int64_t site);
  struct Left {
    bool backward_may_follow = false;
    std::vector<int64_t> escaped{};  // units of which the output holds views
  };
  void leave_forward(int64_t site, const Left& left);

  // A backward has reached its first parameter or call; it has ended.
  void begin_backward();
  void enter_backward(int64_t site);
  void leave_backward(int64_t site, bool graph_kept);
  void gradient_arrived(int64_t unit, bool graph_kept);
  void end_backward(bool graph_kept);
  void reset_after_failure() noexcept;

  // For the forward and the backward of the other ranks, in which this one takes no part.
  void post_sends_for_a_pass();

  // unshard() and reshard().
  void hold(const std::vector<int64_t>& units);
  void drop(const std::vector<int64_t>& units, Writes writes);

  // Before the update: everything is released.
  void begin_step();
  // Until all ranks' shards hold what was written to them, see the note. Collective.
  void wait_for_shards();

  // Posted sends that other ranks may still take when this engine dies. They live on until every rank
  // has said that it takes no more.
  struct OutstandingSends {
    std::vector<std::deque<PostedSend>> posted_sends;
    Pending farewell;
  };
  OutstandingSends take_outstanding_sends();

  bool inside() const { return root_depth_ > 0; }
  int64_t unit_count() const { return static_cast<int64_t>(entries_.size()); }
  Residency state(int64_t unit) const { return entries_[unit].state; }
  const Holds& holds(int64_t unit) const { return entries_[unit].holds; }
  const Unit& unit(int64_t unit) const { return *entries_[unit].unit; }
  bool is_root(int64_t site) const { return sites_[site].root; }
  // How many there are of unit u, but for the whole model.
  int64_t sites_of(int64_t u) const { return entries_[u].sites; }
  const std::vector<int64_t>& units_of(int64_t site) const { return sites_[site].units; }
  int64_t gathers() const { return gathers_; }

 private:
  struct Entry {
    Unit* unit;
    Residency state;
    Holds holds;
    bool ahead = false;  // prefetched or kept for the backward, and not entered since
    int64_t taken = 0;   // gathers since the ranks last told each other
    int64_t taken_in_pass = 0;
    int64_t due = 0;    // posted sends that a peer may have taken by the end of this pass
    int64_t sites = 0;  // but for the whole model
    std::vector<std::deque<PostedSend>> posted_sends;  // [world]
  };
  enum Phase { kForward, kBackward };

  bool in_backward() const { return backward_ != BackwardPhase::none; }
  bool sends_persist() const { return comm_.has_only_local_peers(); }
  // A gather is a cast on this rank's device.
  bool is_alone() const { return context_.shards == 1; }

  void apply(int64_t unit, ResidencyEvent event, const ResidencyContext& context = {},
             Writes writes = Writes::keep);
  void start(Entry& entry);
  void finish(Entry& entry);
  std::string waiting_for(const Entry& entry) const;
  void enter(int64_t site, ResidencyEvent event);
  void prefetch(Phase phase);
  bool is_kept_for_backward(int64_t unit) const;
  void begin_pass(Phase phase);
  void end_pass(Phase phase);
  void post_missing_sends(Entry& entry);
  void tell_what_was_taken();
  void release_deferred(const HookSite& entered);
  bool may_retain(int64_t unit) const;

  Comm& comm_;
  const UnitContext& context_;
  const BackwardPhase& backward_;
  GatherOptions options_;
  std::vector<Entry> entries_;
  std::vector<HookSite> sites_;
  int64_t root_depth_ = 0;
  std::vector<int64_t> order_[2];           // of units, in the last pass of each phase
  std::vector<int64_t> current_[2];         // in this pass
  size_t position_[2] = {0, 0};             // in order_: what comes next
  std::vector<int64_t> deferred_releases_;  // left, but kept for the next site of the same unit
  std::string last_gathered_ = "none";
  int64_t passes_ = 0;  // since the ranks last told each other
  int64_t gathers_ = 0;
};

}  // namespace zero_ext
