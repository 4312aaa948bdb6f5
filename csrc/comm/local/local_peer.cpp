#include "comm/local/local_peer.h"

#include <cerrno>
#include <cstring>

#include "comm/local/linux_calls.h"

namespace zero_ext {
namespace {

// A rank whose script raised an error drops its model as well.
constexpr char kScriptEnded[] = "its script has ended, or has dropped the model.";

}  // namespace

bool LocalPeer::open(const Introduction& peer, int64_t rank, int64_t world) {
  introduction_ = peer;
  if (!is_alive()) return false;
  mailbox_ = Mailbox::of(static_cast<pid_t>(peer.process), peer.descriptor, world);
  if (!mailbox_.is_open()) return false;
  ring_ = &mailbox_.from(rank);
  return true;
}

int LocalPeer::read_nonce(Nonce* found) const {
  return linux_calls::read_memory_of(static_cast<pid_t>(introduction_.process),
                                     static_cast<uint64_t>(introduction_.nonce_address), found,
                                     sizeof(*found));
}

bool LocalPeer::is_alive() const {
  Nonce found{};
  return read_nonce(&found) == 0 && found == introduction_.nonce;
}

void LocalPeer::write(const Record& record) {
  if (waiting_.empty() && ring_->try_write(record)) {
    ring();
  } else {
    waiting_.push_back(record);
  }
}

bool LocalPeer::write_waiting() {
  bool written = false;
  while (!waiting_.empty() && ring_->try_write(waiting_.front())) {
    waiting_.pop_front();
    written = true;
  }
  if (written) ring();
  return waiting_.empty();
}

std::string LocalPeer::read(const Record& message, void* into) const {
  const int failure = linux_calls::read_memory_of(static_cast<pid_t>(introduction_.process),
                                                  message.address, into, message.bytes);
  // Asked after the copy: bytes that were read before the peer's end were still there.
  std::string error = end();
  if (failure != 0 && error.empty())
    error = std::string("its memory cannot be read: ") + std::strerror(failure) + ".";
  return error;
}

std::string LocalPeer::end() const {
  if (board().closed.load() != 0) return kScriptEnded;
  Nonce found{};
  const int failure = read_nonce(&found);
  if (failure == EPERM)
    return "the system no longer lets this rank read its memory. Set ZERO_EXT_CROSS_MEMORY=0 on all"
           " ranks.";
  return failure == 0 && found == introduction_.nonce ? "" : "its process has ended.";
}

std::string LocalPeer::end_of_messages() const {
  std::string ended = end();
  if (ended.empty() && board().left.load() != 0) ended = kScriptEnded;
  return ended;
}

}  // namespace zero_ext
