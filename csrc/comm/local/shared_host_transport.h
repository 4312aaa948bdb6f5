// SharedHostTransport: messages between ranks of one host, each read straight from the sender's
// memory.
//
// Owner:     Peers, and every message that is not finished.
// Threads:   any, at any time.
// Invariant: a message's memory is kept from send() until its receiver has read it.
//
// Note [Shared-host transport]
// gloo copies a message into a socket and out of it again, by threads that compete with the ranks
// for the cores. Linux lets a process copy from the memory of another one (process_vm_readv): the
// sender announces where its bytes are, and the receiver copies them once, when it needs them.
// - Records ("sent", "taken") go through rings in shared memory, one for each direction of each
//   pair. A waiting rank sleeps on its doorbell, a futex.
// - The system must allow one process to read the other: the same user, and Yama's ptrace_scope 0,
//   or 1 with processes of one launcher. Ranks find out at the start, pair by pair. All other
//   messages (another host, another container, another system) go through the process groups.
// - No thread moves bytes in the background. A message that has arrived is copied when its receiver
//   calls one of these functions.
// - A rank shows "closed" before it frees what it has posted, and its peers check that after each
//   copy. So the bytes of a copy without an error were there throughout.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/local/linux_calls.h"
#include "comm/local/local_peer.h"
#include "comm/local/mailbox.h"
#include "comm/local/transfer.h"
#include "comm/message.h"

namespace zero_ext {

class SharedHostTransport : public std::enable_shared_from_this<SharedHostTransport> {
 public:
  using AllGather = std::function<at::Tensor(const at::Tensor&)>;
  // Collective. `all_gather`: int64 [n] of each rank → [world, n]. `timeout`: of waits that have none
  // of their own. `host`: ranks with the same number may read each other's memory; 0: this rank does
  // not.
  static std::shared_ptr<SharedHostTransport> connect(int64_t rank, int64_t world,
                                                      std::chrono::milliseconds timeout,
                                                      int64_t host, const AllGather& all_gather);
  ~SharedHostTransport();
  SharedHostTransport(const SharedHostTransport&) = delete;
  SharedHostTransport& operator=(const SharedHostTransport&) = delete;

  // Whether messages to and from `peer` can go this way; both ranks have the same answer.
  bool reaches(int64_t peer) const { return peers_[peer].reached(); }
  bool reaches_any() const;
  // Whether every rank reaches every other one; all ranks have the same answer.
  bool reaches_all() const { return reaches_all_; }
  // [world], the same on all ranks: ranks with the same number reach each other, and no other rank.
  // Where no such numbers exist, each rank has its own.
  const std::vector<int64_t>& hosts() const { return hosts_; }

  // Messages of one sender, kind and tag are received in the order in which they were sent, and
  // must have as many bytes as their receiver asks for. The tensors are contiguous, on the host.
  // Waiting for a send ends when its receiver has read it, which happens in the receiver's calls.
  // `offset`: where `into` begins in the message, in bytes, if it is a part of a posted one.
  Message send(const at::Tensor& tensor, int64_t to, const MessageLabel& label);
  Message receive(const at::Tensor& into, int64_t from, const MessageLabel& label,
                  int64_t offset = Transfer::kWhole);
  // A message that may be received any number of times, with the bytes that `tensor` then has; its
  // sender does not notice. The message keeps the memory: drop it when no rank receives it any more.
  // A tag has either posted messages or sent ones.
  Message post(const at::Tensor& tensor, int64_t to, const MessageLabel& label);
  // A sent message that no rank will receive: its memory need not be kept any more. Any other
  // message stays as it is.
  static void withdraw(c10d::Work& message);
  // As message.wait(), and calls `meanwhile`, which may be empty, as long as it waits; for a message
  // of this transport. Returns whether it is one.
  static bool wait(c10d::Work& message, const Meanwhile& meanwhile);

  // See Note [Epochs] in message.h. The epoch after `last`, this rank's last one, but for those that
  // others have abandoned; it begins.
  int64_t next_epoch(MessageKind kind, int64_t last);
  void leave_epoch(MessageKind kind, int64_t epoch, EpochExit exit);
  // A rank that has abandoned the epoch, or a later one; -1: none.
  int64_t who_abandoned(MessageKind kind, int64_t epoch) const;
  // The same of a rank that has begun it, and not the agreement that this rank has begun last.
  int64_t who_began(MessageKind kind, int64_t epoch) const;
  // `peer` has begun the agreement that this rank has begun last.
  bool has_come(int64_t peer) const;
  // Wakes the peers that wait.
  void ring_all() const;
  int64_t world() const { return static_cast<int64_t>(peers_.size()); }
  // This rank's, or a peer's.
  SharedGathers& gathers_of(int64_t rank) const {
    return rank == rank_ ? mailbox_.board().gathers : peers_[rank].board().gathers;
  }
  // Whether a peer has ended its part of the epoch.
  bool is_past(MessageKind kind, int64_t epoch) const;

  // From now on this rank sends nothing. Its peers can still receive what it has sent and posted;
  // waiting for more from it raises.
  void leave();
  // From now on nothing of this rank can be received, and its memory may be freed.
  void close();
  // Shows the peers of all transports of this process which call it is in.
  static void show_call(const std::string& name);
  // Which calls the peers of all transports are in: a part of a message, "" without peers.
  static std::string calls_of_peers();
  // Whose processes have ended, of the peers of all transports: a sentence, "" where none has.
  static std::string dead_peers();
  // How error messages call the ranks; before other threads use this.
  void set_global_ranks(std::vector<int64_t> ranks) { global_ranks_ = std::move(ranks); }

  // How many messages of a peer have arrived that this rank has not received; posted ones do not
  // count.
  int64_t announced(int64_t peer);

  // How often peers have received what this rank has posted.
  uint64_t served() const { return mailbox_.board().served.load(); }

  // Reads the messages that have arrived of those being received; never waits.
  void make_progress() {
    if (receiving_count_.load(std::memory_order_relaxed) > 0) make_progress_in_parent();
  }

 private:
  class MessageWork;

  SharedHostTransport(int64_t rank, int64_t world, std::chrono::milliseconds timeout);
  void connect(int64_t host, const AllGather& all_gather);
  void find_hosts(const std::function<bool(int64_t, int64_t)>& reach_each_other);
  // Whether another rank may reach this one.
  bool has_candidates(const at::Tensor& introductions) const;
  // Opens all peers; [world] int64: which could be opened.
  at::Tensor open_peers(const at::Tensor& introductions);

  Message work_of(std::shared_ptr<Transfer> transfer);
  void wait(const std::shared_ptr<Transfer>& transfer, std::chrono::milliseconds timeout,
            const Meanwhile& meanwhile);
  bool has_ended(const Transfer& transfer);
  void cancel(const std::shared_ptr<Transfer>& transfer);
  void withdraw(const std::shared_ptr<Transfer>& transfer);

  void make_progress_in_parent();
  void progress();
  void read_ring(int64_t rank);
  bool try_receive(Transfer& transfer);
  void show_past(MessageKind kind, int64_t epoch);
  std::string call_of(int64_t peer) const;
  // Other ranks from which the same message is missing: a part of a message, "" where there are none.
  std::string missing_beside(const Transfer& transfer);

  struct Living;
  // Of all transports: `visit` gets a peer that is reached, and its rank as error messages call it.
  static void for_each_peer(const std::function<void(int64_t, const LocalPeer&)>& visit);
  const int64_t rank_;
  const std::chrono::milliseconds timeout_;
  const pid_t process_ = getpid();
  const Nonce nonce_;
  Mailbox mailbox_;
  std::vector<LocalPeer> peers_;
  std::vector<int64_t> global_ranks_;  // empty: as the transport counts them
  bool reaches_all_ = false;
  std::vector<int64_t> hosts_;

  std::mutex mutex_;  // for what follows, and what changes in peers_
  std::optional<linux_calls::ReadsWithinTheLaunch> reads_;  // until nothing can be received
  uint64_t sent_count_ = 0;
  bool leaving_ = false;  // the peers cannot see it yet
  bool has_left_ = false;
  // Of each kind, the epoch before which all is sent; shown when all records are in their rings.
  std::array<int64_t, kMessageKinds> past_{};
  std::unordered_map<uint64_t, std::shared_ptr<Transfer>> sending_;  // by number
  std::list<std::shared_ptr<Transfer>> receiving_;                   // in the order of the calls
  std::atomic<int64_t> receiving_count_{0};
};

}  // namespace zero_ext
