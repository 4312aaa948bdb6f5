// SharedHostTransport: messages between ranks of one host, each read straight from the sender's memory.
//
// Owner:     Comm, and every message that is not finished.
// Threads:   any, at any time.
// Invariant: a message's memory is kept from send() until its receiver has read it.
//
// Note [Shared-host transport]
// gloo copies a message into a socket and out of it again, by threads that compete with the ranks
// for the cores. Linux lets a process copy from the memory of another one (process_vm_readv): the
// sender says where its bytes are, the receiver copies them once, when it needs them. What the
// ranks say to each other ("posted", "taken") goes through rings in shared memory, one for each
// direction of each pair; a rank that waits sleeps on its doorbell, a futex.
// It needs leave to look into the other process: the same user, and Yama's ptrace_scope 0, or 1
// with processes of one launcher. Ranks find out at the start, pair by pair; where it cannot be had
// (another host, another container, another system), messages go through the process group.
// No thread moves bytes in the background: what has come is copied whenever its receiver calls one
// of these functions, and what has not is waited for.
// A rank says "closed" before it frees what it had posted, and its peers ask for that after each
// copy: what they then take was there throughout.
//
// Note [Epochs]
// Messages that all ranks exchange together belong to a epoch: a backward, an agreement. An error
// may end one on one rank alone before it has sent all of it: the others would wait until the
// timeout. Hence each rank shows which epochs it is past. Who waits for a message of a epoch that
// its sender is past, and that was not sent, hears so at once. Each also shows of which epochs it
// takes no more messages: whoever waits for it to read one goes on, the message is not needed.
// A backward that is repeated is a epoch of its own. Where one threw on all ranks, or on one while
// the others waited for it, all have the same number of the next. Where one waited in vain until
// its timeout, it abandons the epoch: a rank that comes too late, or whose own backward threw
// before it began the epoch, passes over it and meets the others in the next; who is inside it
// fails. Rounds that a rank left for an error of its own are not passed over: after an error of all
// ranks a slow one would pass over what a fast one has left and now repeats.
// An agreement repeats nothing that ranks count alike: some may ask again after an error, others
// not have asked. Whatever error ends one, it is abandoned: nobody can complete it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

namespace c10d {
class Work;
}

namespace zero_ext {

class SharedHostTransport {
 public:
  // Collective. `all_gather`: [n] int64 of each rank → [world, n]. Null where no peer is in reach.
  // `timeout`: how long a message is waited for unless said otherwise. `allowed`: on this rank; the
  // others must be told, too.
  static std::shared_ptr<SharedHostTransport> connect(
      int64_t rank, int64_t world, std::chrono::milliseconds timeout, bool allowed,
      const std::function<at::Tensor(const at::Tensor&)>& all_gather);

  virtual ~SharedHostTransport() = default;

  // Whether messages to and from `peer` can go this way: both ranks say the same.
  virtual bool reaches(int64_t peer) const = 0;
  // Whether every rank reaches every other one: all ranks say the same.
  virtual bool reaches_all() const = 0;

  // Messages of one sender, kind and tag are received in the order in which they were sent, and
  // must have as many bytes as their receiver asks for. The tensors are contiguous, on the host.
  // Waiting for what is sent ends when it has been read; bytes are read no later than that, and not
  // before the receiver calls one of these functions.
  enum class Kind : int { reduction, gather, agreement };
  static constexpr int kKinds = 3;
  static constexpr int64_t kNoEpoch = -1;
  struct Label {
    Kind kind;
    int64_t tag;
    int64_t epoch = kNoEpoch;  // see the note
  };
  using Message = c10::intrusive_ptr<c10d::Work>;
  virtual Message send(const at::Tensor& tensor, int64_t to, const Label& label) = 0;
  virtual Message receive(const at::Tensor& into, int64_t from, const Label& label) = 0;
  // A message that was sent and that nobody will receive: its memory need not be kept any more. Of
  // anything else nothing changes.
  static void withdraw(c10d::Work& message);
  // A message that may be received any number of times, with the bytes that `tensor` has then; its
  // sender is not told. The work keeps its memory, and is to live until nobody receives it any
  // more. A tag has either this or messages that are sent.
  virtual Message post(const at::Tensor& tensor, int64_t to, const Label& label) = 0;

  // The epoch after `last`, this rank's last one, but for those that others have abandoned; it
  // begins.
  virtual int64_t next_epoch(Kind kind, int64_t last) = 0;
  // How an error has ended this rank's part of a epoch. Nothing that others have sent is needed any
  // more.
  enum class Exit {
    sent_all,   // the others can do without this rank
    early,      // they cannot
    abandoned,  // nor may who has not begun the epoch begin it. A timeout of a wait() does that.
  };
  virtual void leave_epoch(Kind kind, int64_t epoch, Exit exit) = 0;
  // A rank that has abandoned the epoch, or a later one; -1: none.
  virtual int64_t who_abandoned(Kind kind, int64_t epoch) const = 0;

  // From now on this rank sends nothing. What it has sent and posted can still be received; who
  // waits for more from it hears that it has ended.
  virtual void leave() = 0;
  // From now on nothing of this rank can be received, and its memory may be freed.
  virtual void close() = 0;
  // How often others have received what this rank has posted.
  virtual uint64_t served() const = 0;

  // Reads what has come of the messages that are being received; never waits.
  virtual void make_progress() = 0;
};

}  // namespace zero_ext
