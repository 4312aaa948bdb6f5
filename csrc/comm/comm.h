// Comm: what ranks exchange in backwards, passes and steps.
//
// Owner:   an Engine (or an op, for the length of a call).
// Threads: calls come from one thread at a time, in the same order on every rank, per process
// group.
//
// Point-to-point messages carry a tag made from numbers that all ranks count alike. So a message of
// a backward that failed on one rank is never mistaken for one of the next backward.
// The tensors may be on the host or on the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreements.h"
#include "comm/peer_memory.h"

namespace zero_ext {

// A rank's range as a message, which a receiver unpacks into what it holds of that range.
struct PackedRange {
  at::Tensor own{};        // uint8 [bytes]
  int64_t most_bytes = 0;  // of any rank's
  void (*unpack)(const at::Tensor& message, const at::Tensor& range) = nullptr;
};

class Comm : public Agreements {
 public:
  using Names = ProcessGroups::Names;
  using Kind = MessageKind;
  using Exit = EpochExit;
  using Agreement = zero_ext::Agreement;

  // One rank alone; every collective is the identity.
  explicit Comm(std::vector<int64_t> global_ranks = {});
  // `device`: of the tensors. `global_ranks`: see Peers.
  Comm(const Names& groups, c10::Device device, std::vector<int64_t> global_ranks = {});

  // A part of the ranks, see Peers.
  Comm(const Comm& all, std::vector<int64_t> subset) : Agreements(all, std::move(subset)) {}

  // Collective. From now on messages between ranks of one host are read straight from the sender's
  // memory, where that is possible. `timeout` is for these messages. `host`: as in
  // SharedHostTransport::connect.
  void connect_local_peers(std::chrono::milliseconds timeout, int64_t host);

  // Collective. From now on this rank's device reads what `direct` says in the other ranks' memory,
  // where every rank's device can. Else `why_sent` says what stands in the way.
  void connect_devices(std::chrono::milliseconds timeout, Direct direct);
  const std::string& why_sent() const { return why_sent_; }
  // Collective. A device's backend connects at its first message of a kind: there the host waits for
  // other ranks. From now on no message of these kinds is the first.
  struct Kinds {
    bool exchanges = false;
    bool reduce_scatters = false;
    bool gathers = false;
  };
  void connect_backend(Kinds kinds);
  // Where sums or gathers are pulled; else null.
  PeerMemory* peer_memory() const { return peer_memory_.get(); }
  // See PeerMemory: `pending` ends when all ranks have filled their slot. Returns the slot.
  int64_t show_filled(const at::Tensor& message, Pending& pending);

  // All-to-all: sends[r] goes to rank r, recvs[r] comes from rank r; the entries of this rank are
  // ignored.
  void exchange(const std::vector<at::Tensor>& sends, const std::vector<at::Tensor>& recvs,
                int64_t epoch, int64_t tag, Pending& pending);
  // Sum over the ranks of this rank's range: input [shards * n], output [n], same dtype.
  void reduce_scatter(const at::Tensor& input, const at::Tensor& output, Pending& pending);
  // Element-wise sum over the ranks, in place.
  void all_reduce_sum(const at::Tensor& tensor, Pending& pending);
  // Whether ranks of a replica are on several hosts.
  bool crosses_hosts() const { return routes().cross_hosts(); }
  // In place: every rank's range of `full` [shards * n] is sent to all others of its replica. See Note
  // [Gathers by host] in host_routes.h. `packed`: what other hosts get in place of this rank's range,
  // on all ranks or on none. Returns the bytes sent to other hosts.
  int64_t gather(const at::Tensor& full, int64_t tag, Pending& pending,
                 const PackedRange& packed = {});
  // Sends `part`, this rank's range, once to each other host, and receives the ranges that this rank
  // brings to its host, into `copy_of(range)`. The rest as above.
  int64_t send_to_hosts(const at::Tensor& part,
                        const std::function<at::Tensor(int64_t range)>& copy_of, int64_t tag,
                        Pending& pending, const PackedRange& packed);
  // Whether the rank of a range is on this host, whether this rank brings that range here from
  // another host, and which rank does.
  bool shares_host(int64_t range) const { return routes().share_host(range, rank() % shards()); }
  bool brings_to_host(int64_t range) const {
    return !shares_host(range) && bringer(range) == rank() % shards();
  }
  int64_t bringer(int64_t range) const;
  // The same of ranges of any size: `flat` is 1-D, and range r begins at element bounds[r]. Only
  // ranks that are in `wanting`, one for each rank, receive.
  void gather_parts(const at::Tensor& flat, const std::vector<int64_t>& bounds,
                    const std::vector<bool>& wanting, Pending& pending);
  // From rank 0, in place. `what`: as in Pending::wait.
  void broadcast(const at::Tensor& tensor, const std::function<std::string()>& what);

  static const char* name_of(Agreement about) { return zero_ext::name_of(about); }

  // Parameters of released units travel one-sided, so that ranks may gather at different times and
  // different units. A posted send waits here until `to` receives it, and no rank waits for that.
  // `to` reads its bytes when it receives it. Posted sends of one tag are received in their order.
  // One to a rank that reads this one's memory may be persistent: it is received any number of times,
  // each time with the bytes that it then has. `tensor` is contiguous and on the host.
  PostedSend post_send(const at::Tensor& tensor, int64_t to, int64_t tag);
  PostedSend post_persistent_send(const at::Tensor& tensor, int64_t to, int64_t tag);
  // Where gathers are pulled, nothing is posted, see Note [Pulled gathers]: the current stream copies
  // what `from` keeps.
  void receive(const at::Tensor& into, int64_t from, int64_t tag, Pending& pending);
  // A part of a persistent send, which begins after `offset` bytes.
  void receive_part(const at::Tensor& into, int64_t from, int64_t tag, int64_t offset,
                    Pending& pending);

  // Tells all ranks that this one receives no more posted sends and sends nothing any more.
  // `pending` ends when all ranks have done so.
  void begin_shutdown(Pending& pending);
  // Before this is destroyed: see ProcessGroups::finish.
  void finish(std::chrono::milliseconds patience) const noexcept;
  using Peers::groups;
  using Peers::shared_groups;

 private:
  bool all_can(bool this_one);
  // `message`: this rank's range, or packed. To the ranks that bring it to their hosts. Returns bytes.
  int64_t send_to_other_hosts(const at::Tensor& message, int64_t tag, Pending& pending);
  // `part` has come from another host: to the other ranks of this host and replica.
  void send_on(const at::Tensor& part, int64_t tag, Pending& pending);
  // Receives `range`, which this rank brings to its host. Its message may be a packed one.
  void receive_from_host(const at::Tensor& part, int64_t range, int64_t tag, Pending& pending,
                         const PackedRange& packed, bool sends_on);

  std::shared_ptr<PeerMemory> peer_memory_;
  std::string why_sent_ = "the backend sums them";
};

}  // namespace zero_ext
