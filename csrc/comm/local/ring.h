// Ring: records from one process to another, in memory that both have mapped.
//
// Threads: one writer, one reader, without a lock.
// Invariant: written - read <= kRecords; the records between them are the reader's. Fresh shared
//            memory is zero, and so is an empty ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace zero_ext {

constexpr size_t kCacheLine = 64;

struct Record {
  enum Kind : uint64_t {
    sent,       // a message is at `address`, and is received once
    posted,     // the same, but it is received any number of times
    taken,      // the reader of this record may free message `number`, which it has sent
    withdrawn,  // message `number` of this tag is not to be read any more
  };
  uint64_t kind;
  uint64_t number = 0;  // of the message, counted by its sender
  uint64_t tag = 0;
  uint64_t address = 0;  // in the sender
  uint64_t bytes = 0;
};

class Ring {
 public:
  // False where the ring is full.
  bool try_write(const Record& record) {
    const uint64_t at = written_.load(std::memory_order_relaxed);
    if (at - read_.load(std::memory_order_acquire) == kRecords) return false;
    records_[at % kRecords] = record;
    written_.store(at + 1, std::memory_order_release);
    return true;
  }

  // False where the ring is empty.
  bool try_read(Record* record) {
    const uint64_t at = read_.load(std::memory_order_relaxed);
    if (at == written_.load(std::memory_order_acquire)) return false;
    *record = records_[at % kRecords];
    read_.store(at + 1, std::memory_order_release);
    return true;
  }

 private:
  static constexpr uint64_t kRecords = 4096;
  static_assert(std::atomic<uint64_t>::is_always_lock_free);

  alignas(kCacheLine) std::atomic<uint64_t> written_;
  alignas(kCacheLine) std::atomic<uint64_t> read_;
  alignas(kCacheLine) Record records_[kRecords];
};

}  // namespace zero_ext
