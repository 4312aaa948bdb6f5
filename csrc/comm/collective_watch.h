// CollectiveWatch: logs the unit of a device's collective that does not end.
//
// Owner:   Peers.
// Threads: add() from any; a thread of its own checks.
//
// Note [Stalled collectives]
// The host queues a device's collectives and waits for none of them. When another rank does not take
// part, the backend ends the process (NCCL's watchdog, after the process group's timeout). It logs
// the number and the type of a collective, but not the unit.
// - After half of that time this class logs the unit, the backward and the rank.
// - Where the backend notices earlier that a rank has ended, it throws in a thread of its own. Then
//   the handler of std::terminate logs them.
// - Collectives that are captured into a graph are not watched: a graph's progress is unknown.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace zero_ext {

class CollectiveWatch {
 public:
  // `timeout`: the backend's.
  CollectiveWatch(c10::Device device, std::chrono::milliseconds timeout);
  ~CollectiveWatch();
  CollectiveWatch(const CollectiveWatch&) = delete;
  CollectiveWatch& operator=(const CollectiveWatch&) = delete;

  // The current stream waits for a collective from now on. `what`: as in Pending::wait.
  void add(const std::string& what);

 private:
  struct State;
  struct All;
  c10::Device device_;
  std::shared_ptr<State> state_;
};

}  // namespace zero_ext
