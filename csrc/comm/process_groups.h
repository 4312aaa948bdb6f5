// ProcessGroups: c10d's process groups of one model. Only this class and Pending know c10d.
//
// Owner:     Peers; shared by its copies.
// Threads:   calls come from one thread at a time, in the same order on every rank.
// Invariant: constant after construction.
//
// Reductions and gathers have a process group each, so that one never waits for the other.
// Every function starts a message or a collective. Its tensors must be where the groups' backend
// takes them, contiguous, and live until the message was waited for.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/message.h"
#include "comm/way.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace zero_ext {

class ProcessGroups {
 public:
  // As torch.distributed names them (`group.group_name`). The last three where ranks hold several
  // copies, see Note [Replicas] in unit_context.h: two of this rank's replica, in rank order, and
  // one of the ranks that hold the same range.
  struct Names {
    std::string reduce;
    std::string gather;
    std::string within_reduce = {};
    std::string within_gather = {};
    std::string across = {};
  };
  ProcessGroups();  // one rank alone
  ProcessGroups(const Names& names, c10::Device device);
  ~ProcessGroups();
  ProcessGroups(const ProcessGroups&) = delete;
  ProcessGroups& operator=(const ProcessGroups&) = delete;

  Carrier carrier() const { return carrier_; }
  c10::Device device() const { return device_; }
  int64_t rank() const { return rank_; }
  int64_t world() const { return world_; }
  int64_t shards() const { return shards_; }  // ranks of a replica
  bool has_replicas() const { return across_ != nullptr; }
  // Of all ranks, with keys of its own.
  c10::intrusive_ptr<c10d::Store> store() const;
  // Tells `ranks`, this one among them, that it has come to `occasion`, a key in the store. Returns
  // those that have not within `patience`; none also where the store's server does not answer.
  std::vector<int64_t> missing_at(const std::string& occasion, const std::vector<int64_t>& ranks,
                                  std::chrono::milliseconds patience) const;

  // The tag wraps at 30 bits: gloo's are 32-bit, and ranks that count alike wrap alike.
  Message send(const at::Tensor& tensor, int64_t to, const MessageLabel& label) const;
  Message receive(const at::Tensor& into, int64_t from, const MessageLabel& label) const;

  // Of all ranks.
  Message all_to_all(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs) const;
  Message all_gather(const at::Tensor& output, const at::Tensor& input, MessageKind among) const;
  Message broadcast(const at::Tensor& tensor) const;  // from rank 0
  Message sum(const at::Tensor& tensor) const;        // in place
  // Of this rank's replica.
  Message reduce_scatter_in_replica(const at::Tensor& output, const at::Tensor& input) const;
  Message all_gather_in_replica(const at::Tensor& output, const at::Tensor& input) const;
  Message broadcast_in_replica(const at::Tensor& tensor, int64_t from) const;
  // Of the ranks that hold the same range; in place.
  Message sum_over_replicas(const at::Tensor& tensor) const;

  // Waits for what was queued on the device, within `patience`. Without it c10d would cut these
  // collectives off: destroy_process_group() does not know them.
  void finish(std::chrono::milliseconds patience) const noexcept;
  // Waits until every rank has called this, within `patience`; the groups cannot be used after it.
  // What this rank has sent may still be on its way when its device has finished, and an abort drops
  // it.
  void abort(std::chrono::milliseconds patience) const noexcept;

 private:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  const Group& group_of(MessageKind kind) const {
    return kind == MessageKind::reduction ? reduce_ : gather_;
  }

  Carrier carrier_ = Carrier::host;
  c10::Device device_ = c10::kCPU;
  Group reduce_;
  Group gather_;
  Group within_reduce_;  // of the replica; without replicas the two above
  Group within_gather_;
  Group across_;  // null without replicas
  int64_t rank_ = 0;
  int64_t world_ = 1;
  int64_t shards_ = 1;
};

// Sends each rank's part of the 1-D `full` to all, in place: element bounds[r] is where rank r's
// begins. `group`: its name. Not from Python: a thread of gloo drops the tensors at any time, also
// after Python has ended, and tensors of Python need the interpreter.
void broadcast_parts(const at::Tensor& full, const std::vector<int64_t>& bounds,
                     const std::string& group);

}  // namespace zero_ext
