// Python's lock, for code that knows no Python.
//
// Owner:   the process.
// Threads: check_no_gil() from any; the hook is set once, before any lock is taken.
//
// Note [Locks and the GIL]
// A thread that holds the GIL waits for leaves alone: locks whose holders take no other lock, and do
// not ask for the GIL. Engine::lock is no leaf. Its holder asks for the GIL in check_interrupt(), to
// make the view of a gradient, and when it drops a tensor that Python has seen. The holder gets the
// GIL, because no thread waits for the lock while it holds the GIL: Access checks that. So every
// binding that takes an Access releases the GIL first. All other locks are leaves.
// Python code that runs under the lock must not wait for it: the handler of a signal, for example.
// OwnedMutex raises an error then.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace zero_ext {

// `holds`: whether the calling thread holds the GIL. Without a hook no thread does.
void set_gil_hook(bool (*holds)());
// Before a wait for a lock whose holder may ask for the GIL.
void check_no_gil();

// A mutex whose holder may ask for the GIL. A thread that holds it cannot wait for itself: lock()
// raises an error, as it does where the thread holds the GIL.
class OwnedMutex {
 public:
  explicit OwnedMutex(int64_t rank) : rank_(rank) {}
  void lock();
  void unlock() {
    owner_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  const int64_t rank_;  // in the message
  std::mutex mutex_;
  // Only the thread itself writes its own number, so that it needs no order.
  std::atomic<std::thread::id> owner_;
};

}  // namespace zero_ext
