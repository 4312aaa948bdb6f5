// Serving: how a rank that waits in a step takes part in what other ranks still run.
//
// Owner:   Steps.
// Threads: called only under the engine's lock.
//
// Note [Serving]
// Between two steps each rank runs any number of backwards. A rank that waits for the others in
// step() or clip_grad_norm_() serves those that still run backwards: it takes part in their
// reductions, and contributes nothing but its local sums.
// - A rank shows the number of the backward that it has begun, and the first message of a backward
//   wakes the ranks that wait. Nobody sends anything more for this.
// - A rank that comes to a step answers at once. Where another rank goes on to run a backward, that
//   answer is outdated. The answers show it to every rank, and all answer a second time.
// - The k-th backwards of all ranks are one reduction. So contributions are added in the order
//   (backward of the rank, rank), whenever the ranks come.
// - Ranks that do not see each other's epochs (on several hosts) announce a backward to each other,
//   except for the first one after a step. A rank that comes to a step without one takes part in
//   that unasked.
// - If a rank leaves a backward with an error, the ranks that serve it undo their part and go on
//   waiting. The ranks that run it get an error.
// - Parameters that were unfrozen are sharded when all ranks have met: a rank may come to a forward
//   and another one to a step. Between hosts this counts as the first backward of a step: ranks that
//   have run none take part in one unasked.
// - Parameters of stage 3 need no service on the CPU of one host. Between hosts a serving rank posts
//   the sends of one more pass.
//
// Where a device's backend has the messages:
// - No host waits for another one in a backward. So the hosts of the ranks meet in the step, before
//   anything of it is queued on the device. A rank that has come tells how many backwards it has
//   begun, and each rank serves what it lacks. The device goes on meanwhile with what is queued.
// - A backward that throws before its first gradient has begun nothing: the others' backward is
//   served later, or meets the next one. If they have zeroed its gradients, the ranks' sums are of
//   different backwards. So the ranks also compare which backwards they have finished.
// - In stage 3 a serving rank queues gathers and reductions as the others have shown them, see
//   GatherOrder. Its gathers wait on the device for what it had queued before it served: behind the
//   reductions that it serves they would wait for the backward that needs them.
// - A backward that throws starts the reductions that are left, because no other rank would notice.
//   Where late gradients are possible it waits for them, too: the hosts ask each other about those.
//   The ranks learn of the error when they meet.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/engine_parts.h"
#include "engine/running_backward.h"

namespace zero_ext {

class Serving : Facet {
 public:
  Serving(EngineParts& parts, RunningBackward& backward) : Facet(parts), backward_(backward) {}

  // Where another rank has begun a backward after this rank's last one: takes part in it, and
  // returns true.
  bool serve(const Access& access);
  // Where this rank sees what others have begun: serves them until all ranks have come. On a device
  // it serves until nothing is left to serve, too. Raises on every rank where a backward of a device
  // threw on some ranks alone. Collective.
  struct Met {
    int64_t incomplete = -1;     // a rank whose micro-batches keep a step from being made
    bool values_differ = false;  // see Arrival::values
  };
  Met meet(const Access& access, Comm::Agreement about, Arrival own,
           const std::function<std::string()>& what);
  // The same, and the message says that the call waited for the same call.
  Met meet(const Access& access, Comm::Agreement about, const Arrival& own);

  // Backwards of other ranks that this one served, by rank.
  struct Served {
    int64_t backwards = 0;
    std::chrono::microseconds time{};
  };
  const std::map<int64_t, Served>& served() const { return served_; }

 private:
  void serve(const Access& access, int64_t whom);
  // The same until this rank has started as many reductions as shown. Returns whether it had not.
  bool serve_shown(const Access& access, const GatherOrder::Shown& shown);
  // What the others have shown by now, while this rank waits for them. Returns whether there was any.
  bool serve_one(const Access& access);
  // The first rank with these micro-batches; -1: none.
  int64_t rank_with(MicroBatches micro_batches, const std::vector<Arrival>& arrivals) const;
  // Raises where the ranks' gradients are of different backwards. `finished`: which() and count() of
  // all ranks, [world, 2]; see FinishedBackwards.
  void check_same(const std::string& verb, const at::Tensor& finished,
                  const std::vector<Arrival>& arrivals) const;
  // On a device, when all have come.
  void catch_up(const Access& access, const std::vector<Arrival>& arrivals);
  void learn_from(const Access& access, Comm::Agreement about,
                  const std::vector<Arrival>& arrivals);
  void count(int64_t whom, int64_t backwards, std::chrono::steady_clock::duration time);

  RunningBackward& backward_;
  std::map<int64_t, Served> served_;
};

}  // namespace zero_ext
