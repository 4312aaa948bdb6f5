// Pending: a collective under way. PostedSend: a message that waits for its receiver.
//
// Owner:   whoever started it.
// Threads: one at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/collective_watch.h"
#include "comm/message.h"

namespace zero_ext {

class ProcessGroups;

// How long the host has waited, by the rank waited for. Waits for all at once: Pending::kAllRanks.
using WaitedTimes = std::map<int64_t, std::chrono::steady_clock::duration>;

// Owns every tensor that the collective touches, and gives them up only after it was waited for. The
// allocator cannot hand out their memory before.
class Pending {
 public:
  static constexpr int64_t kAllRanks = -1;
  using Relay = std::function<void(const at::Tensor& tensor, Pending& sends)>;
  struct Part {
    Message message;  // null: that of another part, which is waited for first
    at::Tensor tensor;
    int64_t peer = kAllRanks;  // the rank waited for, as error messages call it
    bool sending = false;
    at::Tensor target = {};  // where defined: `tensor` is copied there when it has arrived
    // Where set: when the tensor has arrived, it is summed over the replicas of these groups.
    std::shared_ptr<const ProcessGroups> across = {};
    // Where set: called when the tensor has arrived. Takes it over, and starts sends to other ranks.
    Relay relay = {};
    // Where set: of a part of all ranks, those that have not come, as error messages call them.
    std::function<std::string()> awaited = {};
  };

  Pending();
  ~Pending();
  Pending(Pending&& other) noexcept;
  Pending& operator=(Pending&& other) noexcept;

  // `watch`: where the host does not wait for the collective, else null. `waited`: to be counted up.
  void add(Part part, const std::shared_ptr<CollectiveWatch>& watch,
           const std::shared_ptr<WaitedTimes>& waited);

  // Waits for all parts. An error (a timeout, a dead peer) is raised again after `what`, which names
  // the waiting rank and what it waits for. `meanwhile`: on the host; its errors are raised as they
  // are.
  void wait(const std::function<std::string()>& what, const Meanwhile& meanwhile = {});
  // Gives up the parts that have not arrived or not been read. Call it only where no rank needs them
  // any more: all of them have sent something later.
  void abandon() noexcept;
  // The same of the parts that one rank takes part in.
  void abandon(int64_t peer) noexcept;
  // Has the parts of `other`, too.
  void append(Pending&& other);
  // As wait(), but ignores errors.
  void wait_if_possible() noexcept;

 private:
  std::vector<Part> parts_;
  std::vector<Part> sent_on_;  // by relays, until all parts have arrived
  std::shared_ptr<CollectiveWatch> watch_;
  std::shared_ptr<WaitedTimes> waited_;  // of the parts, if there are any
  std::optional<c10::Event> begun_;      // see CollectiveWatch::begin
};

// See Comm::post_send. Its memory is kept as long as this lives.
using PostedSend = std::shared_ptr<const Message>;

}  // namespace zero_ext
