#include "gather/shutdown_handshake.h"

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace zero_ext {
namespace {

struct Waiting {
  std::mutex mutex;  // for all below
  std::condition_variable ended;
  std::list<std::shared_ptr<const Comm>> comms;
  int64_t open = 0;  // handshakes whose messages or connections still exist

  uint64_t served() const {
    uint64_t sum = 0;
    for (const auto& comm : comms) sum += comm->served();
    return sum;
  }
};

// Never destroyed: a thread may outlive main().
Waiting& waiting() {
  static auto* instance = new Waiting;
  return *instance;
}

// Runs `job` in a thread.
template <typename Job>
void run_later(Job job) {
  {
    const std::lock_guard lock(waiting().mutex);
    ++waiting().open;
  }
  std::thread([job = std::move(job)]() mutable {
    job();
    const std::lock_guard lock(waiting().mutex);
    --waiting().open;
    waiting().ended.notify_all();
  }).detach();
}

}  // namespace

void finish_shutdown_later(const Comm& comm, OutstandingSends outstanding) {
  std::list<std::shared_ptr<const Comm>> mine{std::make_shared<const Comm>(comm)};
  const auto place = mine.begin();
  {
    const std::lock_guard lock(waiting().mutex);
    waiting().comms.splice(waiting().comms.end(), mine);
  }
  run_later([place, outstanding = std::move(outstanding)]() mutable {
    outstanding.handshake.wait_if_possible();
    (*place)->close();  // a rank that still reads raises
    outstanding = {};
    std::list<std::shared_ptr<const Comm>> done;  // destroyed without the lock
    const std::lock_guard lock(waiting().mutex);
    done.splice(done.end(), waiting().comms, place);
  });
}

void end_groups_later(std::shared_ptr<const ProcessGroups> groups,
                      std::chrono::milliseconds patience) {
  if (groups->world() == 1 || groups->carrier() != Carrier::backend) return;
  run_later([groups = std::move(groups), patience]() mutable {
    groups->abort(patience);
    groups.reset();  // while the process still waits for this thread
  });
}

void wait_for_shutdowns(std::chrono::milliseconds patience) {
  std::unique_lock lock(waiting().mutex);
  uint64_t served = 0;
  do {
    served = waiting().served();
    if (waiting().ended.wait_for(lock, patience, [] { return waiting().open == 0; })) return;
  } while (waiting().served() != served);
}

}  // namespace zero_ext
