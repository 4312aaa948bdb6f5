// CollectiveWatch: names the unit of a device's collective that does not end.
//
// Owner:   Peers.
// Threads: add() from any; a thread of its own checks.
//
// Note [Stalled collectives]
// The host queues a device's collectives and waits for none of them. When another rank does not take
// part, the backend ends the process (NCCL's watchdog, after the process group's timeout). It logs
// the number and the type of a collective, but not the unit.
// - After half of that time this class logs the unit, the backward and the rank.
// - After a quarter of it a rank tells the others through the group's store what it waits for. Where
//   all ranks wait, and not for the same, they wait for each other. Then the waits of the host for
//   a step raise, with the same text on every rank, until anything ends. No rank sends anything
//   before. A rank whose device has not come to its oldest collective computes, and does not wait.
// - Where the backend notices earlier that a rank has ended, it throws in a thread of its own. Then
//   the handler of std::terminate logs them.
// - Collectives that are captured into a graph are not watched: a graph's progress is unknown.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace zero_ext {

class GatherOrder;
class StalledRanks;

class CollectiveWatch {
 public:
  // `timeout`: the backend's. `rank`: as error messages call it.
  CollectiveWatch(c10::Device device, int64_t rank, std::chrono::milliseconds timeout,
                  std::unique_ptr<StalledRanks> ranks);
  ~CollectiveWatch();
  CollectiveWatch(const CollectiveWatch&) = delete;
  CollectiveWatch& operator=(const CollectiveWatch&) = delete;

  // A collective was queued behind what the current stream has. The event of it: from then on the
  // device waits for other ranks, and no longer for this one. None while a graph is captured.
  std::optional<c10::Event> begin() const;
  // The current stream waits for that collective from now on. `what`: as in Pending::wait.
  void add(const std::string& what, std::optional<c10::Event> begun);
  // How many backwards that reduce this rank has begun since the last step.
  void note_backwards(int64_t count);

  // From now on waits of the host raise what `failure` returns, if it is not empty.
  void ask_about_failures(std::function<std::string()> failure);
  // From now on waits of the host raise where the ranks gather other units.
  void compare_gathers(std::shared_ptr<GatherOrder> order);

  // While a HostWait lives, the host waits for other ranks, and not for the device. `what`: as in
  // Pending::wait. `meanwhile`: what this thread does for others where it waits for the device.
  class HostWait {
   public:
    HostWait(std::shared_ptr<CollectiveWatch> watch, const std::string& what,
             const std::function<void()>& meanwhile);
    ~HostWait();
    void begin_again() const;  // it has done something for others
    HostWait(const HostWait&) = delete;
    HostWait& operator=(const HostWait&) = delete;

   private:
    const std::shared_ptr<CollectiveWatch> watch_;
    const int exceptions_ = std::uncaught_exceptions();
  };
  // Raises where the ranks wait for each other.
  void raise_if_ranks_wait() const;

 private:
  friend void wait_on_host(const c10::Event& event, CollectiveWatch* watch);
  struct State;
  struct All;
  c10::Device device_;
  std::shared_ptr<State> state_;
};

// The host waits for `event`. Raises where the ranks wait for each other or gather other units, and
// where a collective has failed. `watch`: null for one rank.
void wait_on_host(const c10::Event& event, CollectiveWatch* watch);

}  // namespace zero_ext
