// SharedText: a short text that one process shows to others. In shared memory, empty at first.
//
// Threads: any process that has mapped it reads, at any time. A text that is read while it changes
//          may be a mixture of two: it is for messages alone.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace zero_ext {

class SharedText {
 public:
  void write(std::string_view text) {
    std::array<char, kBytes> bytes{};
    text.copy(bytes.data(), kBytes - 1);
    for (size_t word = 0; word < words_.size(); ++word) {
      uint64_t value = 0;
      std::memcpy(&value, bytes.data() + word * sizeof(value), sizeof(value));
      words_[word].store(value, std::memory_order_relaxed);
    }
  }

  std::string read() const {
    std::array<char, kBytes> bytes{};
    for (size_t word = 0; word < words_.size(); ++word) {
      const uint64_t value = words_[word].load(std::memory_order_relaxed);
      std::memcpy(bytes.data() + word * sizeof(value), &value, sizeof(value));
    }
    bytes.back() = 0;
    return bytes.data();
  }

 private:
  static constexpr size_t kBytes = 64;
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  std::array<std::atomic<uint64_t>, kBytes / sizeof(uint64_t)> words_;
};

}  // namespace zero_ext
