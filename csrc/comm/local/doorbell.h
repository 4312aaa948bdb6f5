// Doorbell: what a rank sleeps on while it waits for messages. In shared memory, zero at first.
//
// Threads: its owner sleeps; any process that has mapped it rings.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "comm/local/linux_calls.h"

namespace zero_ext {

class Doorbell {
 public:
  // How often it has rung.
  uint32_t rings() const { return rings_.load(); }

  void ring() {
    rings_.fetch_add(1);
    if (sleepers_.load() > 0) linux_calls::wake_all(&rings_);
  }

  // Returns when it rings, at once where it has rung since rings() was `seen`, and after `timeout`.
  void sleep(uint32_t seen, std::chrono::milliseconds timeout) {
    sleepers_.fetch_add(1);
    linux_calls::sleep_on(&rings_, seen, timeout);
    sleepers_.fetch_sub(1);
  }

 private:
  static_assert(std::atomic<uint32_t>::is_always_lock_free);

  std::atomic<uint32_t> rings_;
  std::atomic<uint32_t> sleepers_;
};

}  // namespace zero_ext
