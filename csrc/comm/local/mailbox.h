// Mailbox: the shared memory of one rank. What it shows to its local peers, then a ring for each
// rank that writes to it.
//
// Owner:     the transport, of its own rank's; a LocalPeer, of that peer's.
// Invariant: the memory is mapped, or is_open() is false.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/local/doorbell.h"
#include "comm/local/ring.h"
#include "comm/local/shared_epochs.h"
#include "comm/local/shared_gathers.h"
#include "comm/local/shared_text.h"

namespace zero_ext {

// Zero at first.
struct Board {
  alignas(kCacheLine) Doorbell doorbell;
  std::atomic<uint32_t> left;    // its owner sends nothing any more
  std::atomic<uint32_t> closed;  // its owner's messages may not be read any more
  std::atomic<uint64_t> served;  // how often its owner's posted messages were read
  alignas(kCacheLine) SharedEpochs epochs;
  SharedText call;  // that its owner is in, see current_call.h
  alignas(kCacheLine) SharedGathers gathers;
};

class Mailbox {
 public:
  Mailbox() = default;
  // Not open where the system has no such memory.
  static Mailbox create(int64_t world);
  // Of another process, where that has it by `descriptor`.
  static Mailbox of(pid_t process, int64_t descriptor, int64_t world);
  Mailbox(Mailbox&& other) noexcept;
  Mailbox& operator=(Mailbox&& other) noexcept;
  ~Mailbox();

  bool is_open() const { return memory_ != nullptr; }
  int descriptor() const { return descriptor_; }
  // From now on no other process can open it.
  void drop_descriptor();

  Board& board() const { return *static_cast<Board*>(memory_); }
  Ring& from(int64_t rank) const {
    return reinterpret_cast<Ring*>(static_cast<char*>(memory_) + sizeof(Board))[rank];
  }

 private:
  Mailbox(int descriptor, size_t bytes);

  int descriptor_ = -1;
  size_t bytes_ = 0;
  void* memory_ = nullptr;
};

}  // namespace zero_ext
