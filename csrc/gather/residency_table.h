// ResidencyTable: which units' parameters are in memory, and what holds them there.
//
// Owner:     Gatherer.
// Threads:   called only under the engine's lock.
// Invariant: a unit's state and holds change by transition() alone (residency.h). Between two
//            steps no rank's shard changes, unless a forward writes to its own parameters. So it
//            does not matter when a rank takes another one's range.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/comm.h"
#include "gather/posted_sends.h"
#include "gather/residency.h"
#include "units/unit.h"

namespace zero_ext {

class ResidencyTable {
 public:
  // `retained_bytes`: what kept graphs may hold gathered; -1: no limit.
  ResidencyTable(Comm& comm, const UnitContext& context, PostedSends& sends,
                 int64_t retained_bytes);

  // Called when a unit comes into memory or leaves it, and when the first forward or call of a
  // backward begins to use it or the last one ends: before anybody reads it, and after it is
  // released. Where it throws, the event has changed nothing, but a gather stays under way.
  using Watcher = std::function<void(bool in_memory, bool in_use)>;

  // Returns the unit's number, from 0.
  int64_t add(Unit* unit);
  void watch(int64_t u, Watcher watcher) { entries_[u].watcher = std::move(watcher); }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  Unit& unit(int64_t u) const { return *entries_[u].unit; }
  Residency state(int64_t u) const { return entries_[u].state; }
  const Holds& holds(int64_t u) const { return entries_[u].holds; }
  int64_t gathers() const { return gathers_; }  // since construction

  // Does what transition() returns. An error leaves the unit's state and holds as they were, but a
  // gather whose wait throws stays under way.
  void apply(int64_t u, ResidencyEvent event, const ResidencyContext& context = {},
             Writes writes = Writes::keep);
  // Takes part in the other ranks' gather of unit u, see UnitParameters::serve_gather.
  void serve(int64_t u, const StreamEvent& since);
  // Gathers a unit again that is in memory: what was written there is lost.
  void gather_again(int64_t u);

  // A unit is ahead while it is prefetched, or kept for the backward, and was not used since.
  bool is_ahead(int64_t u) const { return entries_[u].ahead; }
  void set_ahead(int64_t u, bool ahead) { entries_[u].ahead = ahead; }
  int64_t ahead_bytes() const;
  // Whether a kept graph may hold the unit, within the limit.
  bool may_retain(int64_t u) const;

 private:
  struct Entry {
    Unit* unit;
    Residency state;
    Holds holds;
    bool ahead = false;
    Watcher watcher{};
    bool in_memory = false;  // as the watcher knows it
    bool in_use = false;
  };
  void start(int64_t u);
  void finish(Entry& entry);
  void release(Entry& entry, Writes writes);
  static void tell_watcher(Entry& entry, Residency state, const Holds& holds);
  std::string waiting_for(const Entry& entry) const;

  Comm& comm_;
  const UnitContext& context_;
  PostedSends& sends_;
  const int64_t retained_bytes_;
  std::vector<Entry> entries_;
  int64_t gathers_ = 0;
};

}  // namespace zero_ext
