// Gatherer: when the passes of a model gather and release its units.
//
// Owner:   Engine.
// Threads: called only under the engine's lock.
//
// Which units are in memory: ResidencyTable. In which order passes enter them: PassOrder. What other
// ranks may take from this one: PostedSends.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "autograd/backward_phase.h"
#include "comm/comm.h"
#include "gather/pass_order.h"
#include "gather/posted_sends.h"
#include "gather/residency.h"
#include "gather/residency_table.h"
#include "units/unit.h"

namespace zero_ext {

struct GatherOptions {
  int64_t prefetch_bytes = 0;  // gathered ahead of their use, at most
  // Also where all hosts read each other's memory. No copy overlaps with computation there, and what
  // is copied early has left the caches when it is used (3 to 5 % of a step of the GPT benchmark).
  bool prefetch_from_local_peers = false;
  int64_t retained_bytes = -1;  // what kept graphs may hold gathered; -1: no limit
};

// A module with hooks, where forwards enter and leave units.
struct HookSite {
  std::vector<int64_t> units;  // numbers that add_unit() returned
  bool root = false;           // the sharded module itself: passes begin and end here
  bool first = true;           // of the sites of its units, in registration order
  bool last = true;
  bool inner = false;  // inside the units' modules, and called from outside of them
};

class Gatherer {
 public:
  Gatherer(Comm& comm, const UnitContext& context, const BackwardPhase& backward,
           GatherOptions options);

  int64_t add_unit(Unit* unit);
  int64_t add_hook_site(HookSite site);
  // A module inside those of `sites`, which uses all of their units.
  int64_t add_inner_site(const std::vector<int64_t>& sites);
  // The sites of `unit` use `added`, too.
  void add_to_sites_of(int64_t unit, int64_t added);

  // See ResidencyTable::Watcher.
  void watch(int64_t unit, ResidencyTable::Watcher watcher) {
    table_.watch(unit, std::move(watcher));
  }

  void enter_forward(int64_t site);
  struct Left {
    bool backward_may_follow = false;
    std::vector<int64_t> escaped{};  // units of which the output holds views
  };
  void leave_forward(int64_t site, const Left& left);

  // A backward has reached its first parameter or call; it has ended.
  void begin_backward();
  void enter_backward(int64_t site) { enter(site, ResidencyEvent::enter_backward); }
  void leave_backward(int64_t site, bool graph_kept);
  void gradient_arrived(int64_t unit, bool graph_kept);
  void end_backward(bool graph_kept);
  void reset_after_failure() noexcept;

  // Whether a unit is released between forward and backward, and after a backward. At first it is.
  void set_reshard_after_forward(const std::vector<int64_t>& units, bool reshards);
  void set_reshard_after_backward(const std::vector<int64_t>& units, bool reshards);

  // Starts gathers of units that are used soon.
  void start(const std::vector<int64_t>& units);
  // unshard() and reshard().
  void hold(const std::vector<int64_t>& units);
  void drop(const std::vector<int64_t>& units, Writes writes);

  // Releases the units that kept graphs alone hold. A backward over such a graph gathers them again.
  // Without effect where gathers are collectives, which other ranks would not enter.
  void release_kept();

  // This rank serves the gathers of others from now on, which wait for what is queued by now alone.
  // See Note [Serving] in serving.h.
  void begin_serving();
  void end_serving() { serving_since_.reset(); }
  // Takes part in what other ranks gather that have not come to the step; returns whether one does.
  bool serve();
  // All have come: takes part in the gathers before number `end`.
  void serve_until(int64_t end);
  // The same in another call that all ranks make. Collective.
  void serve_all(Comm::Agreement about);
  // How many gathers it has entered, its own and other ranks'.
  int64_t entered() const;
  // Passes begin as before the first one. Where gathers are collectives, what is gathered ahead must
  // be the same on every rank, and ranks that ran different passes would foretell different ones.
  void forget_order() { order_.forget(); }

  // Before the update: everything is released.
  void begin_step();

  // See PostedSends.
  void post_sends_for_a_pass() { sends_.post_for_a_pass(); }
  void wait_for_shards();
  OutstandingSends take_outstanding_sends() { return sends_.take_outstanding(); }

  int64_t unit_count() const { return table_.size(); }
  Residency state(int64_t unit) const { return table_.state(unit); }
  const Holds& holds(int64_t unit) const { return table_.holds(unit); }
  const Unit& unit(int64_t unit) const { return table_.unit(unit); }
  int64_t gathers() const { return table_.gathers(); }
  int64_t gathers_between_hosts() const { return sends_.between_hosts(); }
  // Neither the root nor inner.
  bool is_of_its_own(int64_t site) const { return !sites_.at(site).root && !sites_[site].inner; }
  // A backward is inside of calls that hold all units of the site.
  bool is_recomputed(int64_t site) const;
  const std::vector<int64_t>& units_of(int64_t site) const { return sites_.at(site).units; }
  // How many sites use the unit, the root and inner ones not counted.
  int64_t sites_of(int64_t unit) const { return site_counts_[unit]; }

 private:
  void serve(int64_t unit) { table_.serve(unit, *serving_since_); }
  bool in_backward() const { return backward_ != BackwardPhase::none; }
  // A gather is a cast on this rank's device.
  bool only_casts() const { return context_.shards == 1 && !context_.parameters_on_host; }
  bool is_inside() const { return root_depth_ > 0 || in_backward(); }

  void begin_pass(Pass pass);
  void enter(int64_t site, ResidencyEvent event);
  void prefetch(Pass pass);
  void end_root_forward(const HookSite& root, bool backward_may_follow);
  bool is_kept_for_backward(int64_t unit) const;
  bool is_kept_after_backward(int64_t unit) const { return !reshards_[unit].after_backward; }
  void release_deferred(const HookSite& entered);

  Comm& comm_;
  const UnitContext& context_;
  const BackwardPhase& backward_;
  GatherOptions options_;
  PostedSends sends_;
  ResidencyTable table_;
  PassOrder order_;
  std::vector<HookSite> sites_;
  std::vector<int64_t> site_counts_;  // of each unit, see sites_of()
  struct Reshards {
    bool after_forward = true;
    bool after_backward = true;
  };
  std::vector<Reshards> reshards_;  // [units]
  int64_t root_depth_ = 0;
  std::optional<StreamEvent> serving_since_;
  std::vector<int64_t>
      deferred_releases_;  // units left, but kept for the next site of the same unit
};

}  // namespace zero_ext
