// PostedSends: this rank's ranges, posted for the other ranks to take when they gather a unit.
//
// Owner:   Gatherer.
// Threads: called only under the engine's lock.
//
// Note [One-sided gathers]
// A collective gather hangs as soon as one rank takes another branch. So each rank posts its range of
// every unit at the beginning of each pass (a root forward, a backward), whether it will gather the
// unit itself or not. A gather takes the ranges that the other ranks have posted: no rank has to
// enter a unit because another one does.
// - A posted send that no rank takes stays for the next pass.
// - After each step the ranks exchange how many they took of each unit, and all wait until every
//   rank's shards are updated.
// - To a rank that reads this one's memory, one persistent send of each unit serves any number of
//   passes, forwards of one rank alone included.
// - Where devices read each other's memory, nothing is posted: Note [Pulled gathers].
// - A device's own backend (NCCL) has no such messages. There gathers are collectives, which every
//   rank must enter in the same order (GatherOrder), and an update follows them on the device's
//   streams.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "gather/pass_order.h"
#include "units/unit.h"

namespace zero_ext {

// Posted sends that other ranks may still take when this engine is destroyed. They live on until
// every rank has sent that it takes no more.
struct OutstandingSends {
  std::vector<std::deque<PostedSend>> posted;
  Pending handshake;
};

class PostedSends {
 public:
  PostedSends(Comm& comm, const UnitContext& context);

  // Units are numbered as they are added.
  void add(const Unit* unit);
  void begin_pass(Pass pass);
  // For the forward and the backward of the other ranks, in which this one takes no part.
  void post_for_a_pass();
  // This rank is about to gather the unit; again, although it has it already. Posts what other ranks
  // may wait for that do the same.
  void count_gather(int64_t unit);
  void count_repeated_gather(int64_t unit);
  // The gather has started.
  void count_taken(int64_t unit);
  void gather_finished(const Unit& unit) { last_gathered_ = unit.name(); }
  // Gathers that took parts from ranks of other hosts.
  int64_t between_hosts() const { return between_hosts_; }
  // For error messages: the last unit that was gathered.
  std::string last_gathered() const;

  // Until all ranks' shards hold what was written to them, see the note. Collective.
  void wait_for_shards();
  OutstandingSends take_outstanding();

 private:
  // What a rank takes when it gathers a unit: parts, or what host copies need.
  struct Posted {
    int64_t taken = 0;  // gathers since the ranks last exchanged their numbers
    std::vector<std::deque<PostedSend>> sends;  // [ranks of the unit]
  };
  struct Entry {
    const Unit* unit;
    int64_t taken_in_pass = 0;
    int64_t due;  // what a peer may have taken by the end of this pass
    Posted parts;
    Posted states;                     // see HostCopies
    std::vector<PostedSend> copies{};  // persistent, of all of them
  };
  bool persist() const { return comm_.way().gathers == Gathers::persistent; }
  // Where they do not persist, they are posted anew for each pass.
  bool post_per_pass() const {
    return context_.shards_parameters() && comm_.way().gathers == Gathers::posted;
  }
  void post_missing(Entry& entry);
  void post_missing(Entry& entry, int64_t peer);
  void exchange_taken();
  void meet_devices();

  Comm& comm_;
  const UnitContext& context_;
  std::vector<Entry> entries_;
  int64_t between_hosts_ = 0;
  std::string last_gathered_ = "none";
  bool posted_any_ = false;
  int64_t passes_ = 0;  // since the ranks last exchanged their numbers
};

}  // namespace zero_ext
