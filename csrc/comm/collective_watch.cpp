#include "comm/collective_watch.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/util/Logging.h>

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device/kernel_table.h"
#include "device/streams.h"

namespace zero_ext {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// More than are under way at any time; what is older has ended.
constexpr size_t kMost = 4096;

struct Collective {
  std::string what;
  c10::Event ended;
  Clock::time_point queued;
};

double seconds(milliseconds duration) { return static_cast<double>(duration.count()) / 1000; }

milliseconds age_of(const Collective& collective) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - collective.queued);
}

}  // namespace

struct CollectiveWatch::State {
  explicit State(milliseconds timeout) : timeout(timeout) {}

  // The oldest that has not ended, if it was queued at least `age` ago, else null.
  const Collective* oldest(milliseconds age) {
    while (!collectives.empty() && age_of(collectives.front()) >= age) {
      if (!collectives.front().ended.query()) return &collectives.front();
      collectives.pop_front();
      logged = false;
    }
    return nullptr;
  }

  void check() {
    const Collective* collective = oldest(timeout / 2);
    if (collective == nullptr || std::exchange(logged, true)) return;
    LOG(ERROR)
        << collective->what << " for " << seconds(age_of(*collective))
        << " s, and still does. The other ranks have not come to it, or one has ended:"
           " look for the first error in their logs. On this device every rank must run every"
           " backward of a step, see docs/uneven_batches.md. The process group's timeout is "
        << seconds(timeout) << " s.";
  }

  // Another thread may have the lock while the process ends, and the device may not answer.
  void log_at_the_end() {
    const std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock || collectives.empty()) return;
    const Collective* collective = &collectives.front();
    try {
      collective = oldest(milliseconds(0));
    } catch (const std::exception&) {
      // Then the first of those that were not known to have ended.
    }
    if (collective == nullptr) return;
    LOG(ERROR) << collective->what << " for " << seconds(age_of(*collective))
               << " s when the process was ended. Another rank may have ended, or have not come to"
                  " it: look for the first error in the ranks' logs.";
  }

  const milliseconds timeout;
  std::mutex mutex;  // for all below
  std::condition_variable closing;
  bool closed = false;
  bool watched = false;
  bool logged = false;  // the oldest was
  std::deque<Collective> collectives;
};

// All watches of the process. Never destroyed: a thread may end the process while it exits.
struct CollectiveWatch::All {
  static All& get() {
    static auto* all = new All;
    return *all;
  }

  void add(const std::shared_ptr<State>& state) {
    const std::lock_guard lock(mutex);
    std::erase_if(states, [](const std::weak_ptr<State>& other) { return other.expired(); });
    states.push_back(state);
    if (end_process == nullptr) end_process = std::set_terminate(&log_and_end);
  }

  [[noreturn]] static void log_and_end() {
    All& all = get();
    if (const std::unique_lock lock(all.mutex, std::try_to_lock); lock) {
      for (const std::weak_ptr<State>& watch : all.states) {
        if (const auto state = watch.lock()) state->log_at_the_end();
      }
    }
    all.end_process();
    std::abort();  // not reached: it does not return
  }

  std::mutex mutex;  // for all below
  std::vector<std::weak_ptr<State>> states;
  std::terminate_handler end_process = nullptr;  // what was set before
};

CollectiveWatch::CollectiveWatch(c10::Device device, milliseconds timeout)
    : device_(device), state_(std::make_shared<State>(timeout)) {
  All::get().add(state_);
}

// The thread is not waited for: in a forked child there is none.
CollectiveWatch::~CollectiveWatch() {
  c10::OptionalDeviceGuard guard;
  try {
    guard.reset_device(device_);  // events go here: else device 0 would be made ready for it
  } catch (const std::exception&) {
    // The device is in an error, which the next call of the main thread raises.
  }
  const std::lock_guard lock(state_->mutex);
  state_->closed = true;
  state_->collectives.clear();
  state_->closing.notify_all();
}

void CollectiveWatch::add(const std::string& what) {
  const c10::Stream stream = current_stream(device_);
  if (capture_id(stream) != 0) return;
  c10::Event ended(device_.type());
  ended.record(stream);
  const std::lock_guard lock(state_->mutex);
  if (state_->collectives.size() == kMost) state_->collectives.pop_front();
  state_->collectives.push_back({.what = what, .ended = std::move(ended), .queued = Clock::now()});
  if (std::exchange(state_->watched, true)) return;
  std::thread([state = state_, device = device_] {
    const c10::DeviceGuard guard(device);
    kernels_on(device.type()).ask_during_captures();
    std::unique_lock lock(state->mutex);
    while (!state->closing.wait_for(lock, state->timeout / 8, [&] { return state->closed; })) {
      try {
        state->check();
      } catch (const std::exception&) {
        // The device is in an error, which the next call of the main thread raises.
        return;
      }
    }
  }).detach();
}

}  // namespace zero_ext
