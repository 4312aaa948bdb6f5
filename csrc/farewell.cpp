#include "farewell.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace zero_ext {
namespace {

struct Waiting {
  std::mutex mutex;
  std::condition_variable ended;
  int64_t count = 0;
};

// Never destroyed: a thread may outlive main().
Waiting& waiting() {
  static auto* instance = new Waiting;
  return *instance;
}

}  // namespace

void bid_farewell(Comm comm, Gatherer::Legacy legacy) {
  {
    const std::lock_guard lock(waiting().mutex);
    ++waiting().count;
  }
  std::thread([comm = std::move(comm), legacy = std::move(legacy)]() mutable {
    legacy.farewell.wait_if_possible(kNoTimeout);
    legacy = {};
    comm = {};
    const std::lock_guard lock(waiting().mutex);
    --waiting().count;
    waiting().ended.notify_all();
  }).detach();
}

void wait_for_farewells(std::chrono::milliseconds timeout) {
  std::unique_lock lock(waiting().mutex);
  waiting().ended.wait_for(lock, timeout, [] { return waiting().count == 0; });
}

}  // namespace zero_ext
