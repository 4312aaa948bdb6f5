// show_words, await_words: see kernels.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/words.cpp
#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/cpu/table.h"

namespace zero_ext::kernels {
namespace {

using Clock = std::chrono::steady_clock;

template <class T>
std::atomic_ref<T> shared(const T* value) {
  return std::atomic_ref<T>(*const_cast<T*>(value));
}

}  // namespace

Status show_words_cpu(uint32_t* const* words, int32_t count, uint32_t* number, bool next,
                      uint32_t tag, const Launch& /*launch*/) {
  if (count < 0 || count > kMostWords || tag > 3) return Status::bad_argument;
  if (next) ++*number;
  for (int32_t k = 0; k < count; ++k)
    shared(words[k]).store(word_of(*number, tag), std::memory_order_release);
  return Status::ok;
}

Status await_words_cpu(const uint32_t* words, int32_t count, const uint32_t* number, uint32_t tag,
                       int64_t timeout_ns, int32_t* failed, const Launch& /*launch*/) {
  if (count < 0 || count > kMostWords || tag > 3) return Status::bad_argument;
  const auto end = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  for (int32_t k = 0; k < count; ++k) {
    uint32_t word = shared(words + k).load(std::memory_order_acquire);
    while (!has_come(word, *number)) {
      if (shared(failed).load(std::memory_order_relaxed) != 0) return Status::ok;
      if (Clock::now() >= end) {
        shared(failed).store(late_word(k), std::memory_order_release);
        return Status::ok;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      word = shared(words + k).load(std::memory_order_acquire);
    }
    if (tag_of(word) == tag) continue;
    shared(failed).store(odd_word(k), std::memory_order_release);
    return Status::ok;
  }
  return Status::ok;
}

}  // namespace zero_ext::kernels
