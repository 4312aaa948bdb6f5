// Comm: the only file that knows c10d.
//
// Owner:   an Engine (or an op, for the length of a call).
// Threads: calls come from one thread at a time, in the same order on every rank, per process
// group.
//
// Reductions and gathers have a process group each, so that one never waits behind the other.
// Point-to-point messages carry a tag made from numbers that all ranks count alike; a message of a
// backward that failed on one rank can therefore never be taken for one of the next. What is said
// of epochs is in Note [Epochs] in shared_host_transport.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/collective_watch.h"
#include "comm/local/shared_host_transport.h"

// Only declared here: c10d's headers take longer to compile than most of our files.
namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace zero_ext {

// A collective under way. Owns every tensor that it touches and gives them up only when it has been
// waited for: the allocator cannot hand them out again before.
class Pending {
 public:
  Pending();
  ~Pending();
  Pending(Pending&& other) noexcept;
  Pending& operator=(Pending&& other) noexcept;

  // Waits for all parts. An error (a timeout, a dead peer) is raised again behind `what`, which
  // says who waited for what.
  void wait(const std::function<std::string()>& what);
  // Gives up what has not come or gone. Only where no rank wants it any more: all of them have sent
  // something later.
  void abandon() noexcept;
  // As wait(); an error is no error then.
  void wait_if_possible() noexcept;

 private:
  friend class Comm;
  static constexpr int64_t kAll = -1;  // a collective waits for all ranks
  struct Part;
  std::vector<Part> parts_;
  std::shared_ptr<CollectiveWatch> watch_;  // where the host does not wait
};

// A message that waits for its receiver, see Comm::offer.
class PostedSend {
 public:
  explicit PostedSend(c10::intrusive_ptr<c10d::Work> message);
  ~PostedSend();
  PostedSend(PostedSend&& other) noexcept;
  PostedSend& operator=(PostedSend&& other) noexcept;

 private:
  c10::intrusive_ptr<c10d::Work> message_;
};

class Comm {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // One rank alone; every collective is the identity. `global_ranks`: what messages call the ranks;
  // empty: as the group counts them.
  explicit Comm(std::vector<int64_t> global_ranks = {});
  // Of process groups, as torch.distributed calls them (`group.group_name`). The last three where
  // ranks hold several copies, see Note [Replicas] in unit_context.h: two of this rank's replica,
  // in rank order, and one of the ranks that hold the same range.
  struct Names {
    std::string reduce;
    std::string gather;
    std::string within_reduce = {};
    std::string within_gather = {};
    std::string across = {};
  };
  // `device`: of the tensors. Where the groups have no backend for it, its tensors travel through
  // host memory.
  Comm(const Names& groups, c10::Device device, std::vector<int64_t> global_ranks = {});
  ~Comm();
  Comm(const Comm& other);

  // Collective. From now on messages of the host, where `allowed` on both ranks and possible, are
  // read straight from the sender's memory; `timeout` is for those.
  void connect_local_peers(std::chrono::milliseconds timeout, bool allowed);
  // From now on a collective on a device that does not end is named, see CollectiveWatch.
  void watch_collectives(std::chrono::milliseconds timeout);
  // How many ranks' memory this one reads.
  int64_t local_peers() const;
  // Whether every rank reads every other one's.
  bool has_only_local_peers() const {
    return local_transport_ != nullptr && local_transport_->reaches_all();
  }
  // Reads what has come from them; never waits.
  void make_progress() {
    if (local_transport_ != nullptr) local_transport_->make_progress();
  }

  // Tensors of a device travel by its own backend; every call is queued on the current stream.
  bool on_device() const { return way_ == Way::device; }
  // They travel through host memory.
  bool staged() const { return way_ == Way::staged; }

  // This process is a forked child of the one that made this: the connections are its parent's.
  bool is_forked() const { return getpid() != process_; }
  int64_t rank() const { return rank_; }
  int64_t world() const { return world_; }
  int64_t shards() const { return shards_; }  // ranks of a replica
  int64_t global_rank(int64_t rank) const {
    return global_ranks_.empty() ? rank : global_ranks_[rank];
  }
  int64_t global_rank() const { return global_rank(rank_); }

  using Kind = SharedHostTransport::Kind;
  // See Note [Epochs] in shared_host_transport.h. Other hosts' ranks see and show nothing of it.
  using Exit = SharedHostTransport::Exit;
  int64_t next_epoch(Kind kind, int64_t last) const;
  void leave_epoch(Kind kind, int64_t epoch, Exit exit) const noexcept;
  int64_t who_abandoned(Kind kind, int64_t epoch) const;

  // All-to-all: sends[r] goes to rank r, recvs[r] comes from rank r; the entries of this rank are
  // ignored. The tensors may lie on the host in any case.
  void exchange(const std::vector<at::Tensor>& sends, const std::vector<at::Tensor>& recvs,
                int64_t epoch, int64_t tag, Pending& pending);
  // Sum over the ranks of this rank's range: input [shards * n], output [n], same dtype.
  void reduce_scatter(const at::Tensor& input, const at::Tensor& output, Pending& pending);
  // Element-wise sum over the ranks, in place.
  void all_reduce_sum(const at::Tensor& tensor, Pending& pending);
  // In place: every rank's range of `full` [shards * n] is sent to all others of its replica.
  void gather(const at::Tensor& full, int64_t tag, Pending& pending);

  // Parameters of released units travel one-sided, so that ranks may gather at different times and
  // different units: a message that waits here until `to` receives it. Nobody waits for it; its
  // bytes are read when it is taken. Messages of one tag are taken in the order of the offers.
  // Among local peers alone an offer may be lasting: it is received as often as anybody likes, with
  // the bytes that it then has.
  PostedSend post_send(const at::Tensor& tensor, int64_t to, int64_t tag);
  PostedSend post_persistent_send(const at::Tensor& tensor, int64_t to, int64_t tag);
  void receive(const at::Tensor& into, int64_t from, int64_t tag, Pending& pending) {
    receive(into, from, {Kind::gather, tag}, pending);
  }

  // Tells all ranks that this one takes no more offers and sends nothing any more; `pending` ends
  // when all have said so.
  void begin_shutdown(Pending& pending);
  // Nothing of this rank can be received any more.
  void close() const {
    if (local_transport_ != nullptr) local_transport_->close();
  }
  // Before it goes, on a device: what was queued ends, within `patience`. The groups are no longer
  // used then. c10d would cut it off: the user's destroy_process_group() does not know the groups.
  void finish(std::chrono::milliseconds patience) noexcept;
  // How often persistent sends were taken.
  uint64_t served() const { return local_transport_ == nullptr ? 0 : local_transport_->served(); }

  // Small agreements on the gather group, of tensors on the host or on the device; they wait.
  // `what` is for the message, as in Pending::wait. all_gather: int64 [n] of each rank →
  // [world, n]. Raises on all ranks where they are in different ones; on a device nobody looks.
  enum class Agreement : int64_t {
    local_peers,
    late_gradients,
    step,
    reduction_order,
    clip,
    shards
  };
  static const char* name_of(Agreement about);
  at::Tensor all_gather(Agreement about, const at::Tensor& values,
                        const std::function<std::string()>& what);
  void broadcast(const at::Tensor& tensor, const std::function<std::string()>& what);

 private:
  enum class Way { host, staged, device };
  using Label = SharedHostTransport::Label;
  using Work = c10::intrusive_ptr<c10d::Work>;
  bool reads(int64_t peer) const {
    return local_transport_ != nullptr && local_transport_->reaches(peer);
  }
  const Group& group_of(Kind kind) const {
    return kind == Kind::reduction ? reduce_group_ : gather_group_;
  }
  void check_process() const;  // refuses where this is a forked child's
  void add(Pending& pending, Pending::Part part) const;
  // The tensors are on the host, and contiguous.
  Work send(const at::Tensor& tensor, int64_t to, const Label& label);
  Work recv(const at::Tensor& into, int64_t from, const Label& label);
  void receive(const at::Tensor& into, int64_t from, const Label& label, Pending& pending);
  at::Tensor all_gather(const at::Tensor& values, const std::function<std::string()>& what);
  // What is sent for `tensor`, and what is received into for it: itself, or on the host.
  at::Tensor outgoing(const at::Tensor& tensor) const;
  at::Tensor incoming(const at::Tensor& tensor) const;
  at::Tensor target_of(const at::Tensor& tensor) const;
  bool by_host(const at::Tensor& tensor) const { return staged() && !tensor.is_cpu(); }

  Way way_ = Way::host;
  c10::Device device_ = c10::kCPU;
  Group reduce_group_;
  Group gather_group_;
  Group within_reduce_;  // the replica's; without replicas the two above
  Group within_gather_;
  Group across_;                                          // null without replicas
  std::shared_ptr<SharedHostTransport> local_transport_;  // null where there are none
  std::shared_ptr<CollectiveWatch> watch_;                // null on the host
  int64_t rank_ = 0;
  int64_t world_ = 1;
  int64_t shards_ = 1;
  std::vector<int64_t> global_ranks_;  // [world]
  pid_t process_ = getpid();
  int64_t agreements_ = 0;
};

// Each rank's part of the 1-D `full` to all, in place: element bounds[r] is where rank r's begins.
// Of a group that is known by its name. Not from Python: a thread of gloo's lets go of the tensors
// when it likes, also when Python has ended, which tensors of Python's need.
void broadcast_parts(const at::Tensor& full, const std::vector<int64_t>& bounds,
                     const std::string& group);

}  // namespace zero_ext
