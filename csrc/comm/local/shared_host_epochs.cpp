// The epochs of the shared-host transport, and its end. See Note [Epochs] in message.h.
#include <algorithm>

#include "comm/local/shared_host_transport.h"

namespace zero_ext {

int64_t SharedHostTransport::next_epoch(MessageKind kind, int64_t last) {
  int64_t next = last + 1;
  if (reaches_all_) {  // else ranks would skip different ones
    for (const LocalPeer& peer : peers_) {
      if (peer.reached()) next = std::max(next, peer.board().epochs.after_abandoned(kind));
    }
  }
  show_past(kind, next);
  mailbox_.board().epochs.show_begun(kind, next);
  if (kind == MessageKind::reduction) ring_all();  // ranks that wait in a step take part
  return next;
}

void SharedHostTransport::leave_epoch(MessageKind kind, int64_t epoch, EpochExit exit) {
  SharedEpochs& epochs = mailbox_.board().epochs;
  epochs.drop(kind, epoch);
  if (exit == EpochExit::abandoned) epochs.abandon(kind, epoch);
  if (exit != EpochExit::sent_all) show_past(kind, epoch + 1);
}

int64_t SharedHostTransport::who_abandoned(MessageKind kind, int64_t epoch) const {
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (peers_[r].reached() && peers_[r].board().epochs.after_abandoned(kind) > epoch)
      return static_cast<int64_t>(r);
  }
  return -1;
}

bool SharedHostTransport::has_come(int64_t peer) const {
  const int64_t agreement = mailbox_.board().epochs.last_begun(MessageKind::agreement);
  return peer == rank_ || peers_[peer].board().epochs.has_begun(MessageKind::agreement, agreement);
}

int64_t SharedHostTransport::who_began(MessageKind kind, int64_t epoch) const {
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (!peers_[r].reached()) continue;
    const auto peer = static_cast<int64_t>(r);
    // In this order: a rank that ended the agreement has begun it before it began `epoch`.
    if (peers_[r].board().epochs.has_begun(kind, epoch) && !has_come(peer)) return peer;
  }
  return -1;
}

bool SharedHostTransport::is_past(MessageKind kind, int64_t epoch) const {
  return std::any_of(peers_.begin(), peers_.end(), [&](const LocalPeer& peer) {
    return peer.reached() && peer.board().epochs.is_past(kind, epoch);
  });
}

void SharedHostTransport::show_past(MessageKind kind, int64_t epoch) {
  const std::lock_guard lock(mutex_);
  int64_t& past = past_[static_cast<size_t>(kind)];
  past = std::max(past, epoch);
  progress();
}

void SharedHostTransport::leave() {
  const std::lock_guard lock(mutex_);
  leaving_ = true;
  has_left_ = true;
  progress();
}

void SharedHostTransport::close() {
  mailbox_.board().call.write("");  // show_call() no longer reaches it
  mailbox_.board().closed.store(1);
  ring_all();
  const std::lock_guard lock(mutex_);
  reads_.reset();
}

}  // namespace zero_ext
