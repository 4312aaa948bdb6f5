// SharedGathers: which units one rank has gathered by a device's backend, in their order, and how
// many reductions it has started. In shared memory, zero at first.
//
// Threads: its owner writes; any process that has mapped it reads.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace zero_ext {

class SharedGathers {
 public:
  static constexpr int64_t kKept = 4096;  // the last ones

  void append(int64_t unit) {
    const int64_t n = count();
    at(units_, n).store(static_cast<int32_t>(unit));
    count_.store(n + 1);
  }

  int64_t count() const { return count_.load(); }
  // Where `n` < count(), and n is one of the last kKept.
  int64_t operator[](int64_t n) const { return at(units_, n).load(); }

  void show_reductions(int64_t started) { reductions_.store(started); }
  int64_t reductions() const { return reductions_.load(); }

  // Of rank 0, for all ranks: the first gather that was found in which two ranks differ, see
  // GatherOrder; 0: none.
  void note_difference(uint64_t packed) {
    uint64_t none = 0;
    difference_.compare_exchange_strong(none, packed);
  }
  uint64_t difference() const { return difference_.load(); }

 private:
  using Units = std::array<std::atomic<int32_t>, kKept>;
  static std::atomic<int32_t>& at(Units& units, int64_t n) {
    return units[static_cast<size_t>(n % kKept)];
  }
  static const std::atomic<int32_t>& at(const Units& units, int64_t n) {
    return units[static_cast<size_t>(n % kKept)];
  }

  std::atomic<int64_t> count_;
  std::atomic<int64_t> reductions_;
  std::atomic<uint64_t> difference_;
  Units units_;
};

}  // namespace zero_ext
