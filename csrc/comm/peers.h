// Peers: the other ranks, and the way that a message takes to each of them.
//
// Owner:   Comm, which is one.
// Threads: calls come from one thread at a time, in the same order on every rank.
//
// A message between ranks of one host is read straight from the sender's memory where that is
// possible; all other messages go through the process groups. Tensors of a device that the groups
// have no backend for are staged: their messages go through copies in host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/collective_watch.h"
#include "comm/gather_order.h"
#include "comm/host_routes.h"
#include "comm/message.h"
#include "comm/pending.h"
#include "comm/process_groups.h"
#include "comm/way.h"

namespace zero_ext {

class SharedHostTransport;

class Peers {
 public:
  // `global_ranks`: [world], the ranks as error messages call them; empty: as the group counts them.
  Peers(std::shared_ptr<const ProcessGroups> groups, std::vector<int64_t> global_ranks);
  // A part of the ranks of `all`, which rise, by the same ways: those numbered `subset` there, one
  // replica. Point to point alone. In epochs and in what is asked of the transport ranks are still
  // numbered as in `all`.
  Peers(const Peers& all, std::vector<int64_t> subset);
  Peers(const Peers& other);
  ~Peers();

  int64_t rank() const { return rank_; }
  int64_t world() const { return subset_.empty() ? groups_->world() : std::ssize(subset_); }
  int64_t shards() const { return subset_.empty() ? groups_->shards() : world(); }  // of a replica
  // By the connections of all ranks.
  bool is_subset() const { return !subset_.empty(); }
  int64_t global_rank(int64_t rank) const {
    return global_ranks_.empty() ? rank : global_ranks_[rank];
  }
  int64_t global_rank() const { return global_rank(rank()); }
  // This process is a forked child of the one that made this: the connections are its parent's.
  bool is_forked() const { return getpid() != process_; }

  const Way& way() const {
    return way_of(groups_->carrier() == Carrier::backend, only_local_peers_, direct_);
  }
  // Tensors of a device travel through host memory.
  bool staged() const { return groups_->carrier() == Carrier::staged; }
  // From now on the ranks of a replica compare the order of their gathers of units. Before each: the
  // unit's number. Not of those that are captured into a graph, which is replayed without the host.
  void compare_gathers();
  void show_gather(int64_t unit) const;
  // Of some of the ranks of `all`, on a device: gathers and collectives of both are watched together.
  void join_watch_of(const Peers& all);
  // The same after each reduction of a unit that has started: how many have.
  void show_reduction(int64_t unit, int64_t started) const;
  // On a device without local peers: a hash of the units that this rank has gathered since
  // forget_collectives(), and of those that it has reduced, each in their order.
  int64_t collectives() const { return static_cast<int64_t>(gathered_ + 3 * reduced_); }
  void forget_collectives() { gathered_ = reduced_ = 0; }
  // From now on a collective on a device that does not end is logged, see CollectiveWatch.
  void watch_collectives(std::chrono::milliseconds timeout);
  void note_backwards(int64_t count) const {
    if (watch_ != nullptr) watch_->note_backwards(count);
  }
  const WaitedTimes& waited() const { return *waited_; }
  // Null on the host.
  const std::shared_ptr<CollectiveWatch>& watch() const { return watch_; }
  // Of gathers of released units; null where ranks need not, or cannot, compare them.
  const std::shared_ptr<GatherOrder>& gather_order() const { return gather_order_; }

  // Whether messages of that rank are read in its memory.
  bool reads(int64_t peer) const;
  // How many ranks' memory this one reads. Of a device's memory none is read.
  int64_t local_peers() const;
  // Reads the messages that have arrived from local peers; never waits.
  void make_progress();
  // How often local peers have read this rank's persistent sends.
  uint64_t served() const;
  // From now on local peers can receive nothing of this rank.
  void close() const;

  // See Note [Epochs] in message.h. The epoch after `last`, this rank's last one; it begins.
  int64_t next_epoch(MessageKind kind, int64_t last) const;
  void leave_epoch(MessageKind kind, int64_t epoch, EpochExit exit) const noexcept;
  // A rank that has abandoned the epoch, or a later one; -1: none.
  int64_t who_abandoned(MessageKind kind, int64_t epoch) const;
  // The same of one that has begun it. Whether one has ended its part of it.
  int64_t who_began(MessageKind kind, int64_t epoch) const;
  bool is_past(MessageKind kind, int64_t epoch) const;
  // A part of an error: that rank has given up waiting for this one, and what to do then.
  std::string given_up_by(int64_t rank, const std::string& remedy) const;

 protected:
  using AllGather = std::function<at::Tensor(const at::Tensor&)>;
  void connect_local(std::chrono::milliseconds timeout, int64_t host, const AllGather& all_gather);
  void leave_local();
  void read_in_place(Direct direct) { direct_ = direct; }
  const ProcessGroups& groups() const { return *groups_; }
  const std::shared_ptr<const ProcessGroups>& shared_groups() const { return groups_; }
  void check_process() const;  // raises in a forked child
  void add(Pending& pending, Pending::Part part) const;

  void send(const at::Tensor& tensor, int64_t to, const MessageLabel& label, Pending& pending);
  // `relay`: see Pending::Part.
  void receive(const at::Tensor& into, int64_t from, const MessageLabel& label, Pending& pending,
               Pending::Relay relay = {});
  // A part of what the local peer `from` has posted; it begins after `offset` bytes.
  void receive_part(const at::Tensor& into, int64_t from, const MessageLabel& label, int64_t offset,
                    Pending& pending);
  // `tensor` is contiguous and on the host.
  Message start_send(const at::Tensor& tensor, int64_t to, const MessageLabel& label);
  Message post_persistent(const at::Tensor& tensor, int64_t to, const MessageLabel& label);

  // Between the ranks of a replica, which are numbered from 0 there.
  const HostRoutes& routes() const { return routes_; }

  // What travels for `tensor`: itself, or where it is staged a copy of it on the host, or a tensor
  // there that is received into. target_of: where the latter is copied then, see Pending::Part.
  at::Tensor outgoing(const at::Tensor& tensor) const;
  at::Tensor incoming(const at::Tensor& tensor) const;
  at::Tensor target_of(const at::Tensor& tensor) const;

 private:
  void find_routes();
  // See Pending::Part.
  std::string awaited() const;
  // The number of `rank` among all ranks.
  int64_t place(int64_t rank) const { return subset_.empty() ? rank : subset_[rank]; }
  void note_collective(size_t& hash, int64_t unit) const;
  bool is_staged(const at::Tensor& tensor) const { return staged() && !tensor.is_cpu(); }
  // Null where there are no local peers, and in a forked child.
  SharedHostTransport* own_transport() const {
    return is_forked() ? nullptr : local_transport_.get();
  }

  std::shared_ptr<const ProcessGroups> groups_;
  std::vector<int64_t> subset_;  // empty: all ranks
  int64_t rank_;
  std::vector<int64_t> global_ranks_;
  std::shared_ptr<SharedHostTransport> local_transport_;  // null without local peers
  bool only_local_peers_ = false;
  std::vector<int64_t> hosts_;  // [world of all ranks], see SharedHostTransport::hosts
  HostRoutes routes_;
  Direct direct_ = Direct::nothing;
  std::shared_ptr<GatherOrder> gather_order_;
  mutable size_t gathered_ = 0;
  mutable size_t reduced_ = 0;
  std::shared_ptr<CollectiveWatch> watch_;  // null on the host
  std::shared_ptr<WaitedTimes> waited_ = std::make_shared<WaitedTimes>();
  pid_t process_ = getpid();
};

}  // namespace zero_ext
