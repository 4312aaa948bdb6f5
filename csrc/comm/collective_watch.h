// CollectiveWatch: says of which unit a collective of a device's backend is that does not end.
//
// Owner:   Comm.
// Threads: add() from any; a thread of its own looks.
//
// Note [Stalled collectives]
// The host waits for none of a device's collectives: it queues them. When another rank does not
// come, the backend ends the process (NCCL's watchdog, after the process group's timeout) with the
// number and the type of a collective, of which nobody knows the unit. After half of that time the
// unit, the backward and the rank are logged here. Where the backend notices earlier that a rank is
// gone, it throws in a thread of its own, and they are logged by what std::terminate calls.
// Collectives that are captured into a graph are not watched: nobody can ask how far a graph is.
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

  // The current stream has just been told to wait for a collective. `what` says who waits for what.
  void add(const std::string& what);

 private:
  struct State;
  struct All;
  c10::Device device_;
  std::shared_ptr<State> state_;
};

}  // namespace zero_ext
