// LocalPeer: another rank of this host, whose memory this process reads and whose mailbox it writes
// to.
//
// Owner:   the transport.
// Threads: under the transport's mutex; the const functions at any time.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <deque>
#include <string>

#include "comm/local/inbox.h"
#include "comm/local/mailbox.h"

namespace zero_ext {

// A random number at a known address: a process whose memory has it there is the one that is meant.
using Nonce = std::array<int64_t, 2>;

// What ranks tell each other first.
struct Introduction {
  int64_t host;  // 0: it is not read; else by ranks with the same number
  int64_t system_and_user;
  int64_t process;
  int64_t descriptor;  // of the mailbox
  int64_t nonce_address;
  Nonce nonce;
};

class LocalPeer {
 public:
  // Whether this process, `rank` of `world`, can read the peer's memory and write to its mailbox.
  bool open(const Introduction& peer, int64_t rank, int64_t world);
  // Whether the peer can do the same. Before that nothing below may be called, but for ring().
  void set_reached(bool reached) { reached_ = reached; }
  bool reached() const { return reached_; }

  // Tells it `record`. Where its ring is full the record waits for flush().
  void write(const Record& record);
  // Returns whether no record waits.
  bool flush() { return waiting_.empty() || write_waiting(); }
  void ring() const {
    if (mailbox_.is_open()) mailbox_.board().doorbell.ring();
  }

  Board& board() const { return mailbox_.board(); }
  Inbox& inbox() { return inbox_; }
  // Copies the bytes of a message; returns what went wrong, or "".
  std::string read(const Record& message, void* into) const;
  // Its process has ended before it closed anything.
  bool has_died() const { return board().closed.load() == 0 && !is_alive(); }
  // Why nothing of the peer can be read any more, or "".
  std::string end() const;
  // Why nothing more comes from the peer, or "".
  std::string end_of_messages() const;

 private:
  // 0, or errno.
  int read_nonce(Nonce* found) const;
  bool is_alive() const;
  bool write_waiting();

  bool reached_ = false;
  Introduction introduction_{};
  Mailbox mailbox_;
  Ring* ring_ = nullptr;        // of this rank, in mailbox_
  std::deque<Record> waiting_;  // the ring was full
  Inbox inbox_;
};

}  // namespace zero_ext
