// GatherOrder: the order in which the ranks of a replica gather units, where gathers are collectives
// of a device's backend.
//
// Owner:     Peers, and the CollectiveWatch.
// Threads:   enter() and next() under the engine's lock; raise_if_ranks_differ() from any.
// Invariant: a rank enters its n-th gather after it has compared it with the other ranks' n-th ones.
//
// The backend would mix gathers of different units, or never end. So each rank of a host shows in
// shared memory which units it gathers, before it queues them. The rank that sees another unit at
// the same place queues nothing, and all ranks raise the same error.
// A rank that waits in a step sees what the others gather, and takes part. It also sees how many
// reductions they have started, and starts no more. So it queues each gather before the reductions
// that the others have started after it: a reduction waits on the device for what they compute.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace zero_ext {

class SharedHostTransport;

class GatherOrder {
 public:
  struct Ranks {
    int64_t own;
    int64_t first;  // of the replica
    int64_t count;
    std::vector<int64_t> global;  // as Peers has them
  };
  GatherOrder(std::shared_ptr<SharedHostTransport> transport, Ranks ranks);

  // Units are numbered as they are added.
  void add_unit(const std::string& name) { units_.push_back(name); }
  // This rank gathers the unit next.
  void enter(int64_t unit);
  // How many it has entered.
  int64_t count() const;
  // This rank has started so many reductions.
  void show_reductions(int64_t started);
  // How many another rank has started that has not come to this rank's agreement, and which.
  struct Shown {
    int64_t reductions;
    int64_t rank;
  };
  Shown most_reductions() const;
  // The unit that another rank has entered where this one has not come to yet, before its gather
  // number `end`; -1: none. Without `end`: of ranks that have not come to this rank's agreement.
  int64_t next() const { return next(std::numeric_limits<int64_t>::max(), /*met=*/false); }
  int64_t next(int64_t end) const { return next(end, /*met=*/true); }
  void raise_if_ranks_differ() const;

 private:
  int64_t global_rank(int64_t rank) const {
    return ranks_.global.empty() ? rank : ranks_.global[rank];
  }
  int64_t next(int64_t end, bool met) const;

  const std::shared_ptr<SharedHostTransport> transport_;
  const Ranks ranks_;
  std::vector<std::string> units_;
};

}  // namespace zero_ext
