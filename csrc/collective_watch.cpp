#include "collective_watch.h"

#include <c10/core/Event.h>
#include <c10/util/Logging.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "stream.h"

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

}  // namespace

struct CollectiveWatch::State {
  explicit State(milliseconds timeout) : timeout(timeout) {}

  void look() {
    const Clock::time_point now = Clock::now();
    while (!collectives.empty() && now - collectives.front().queued >= timeout / 2) {
      const Collective& oldest = collectives.front();
      if (oldest.ended.query()) {
        collectives.pop_front();
        said = false;
        continue;
      }
      if (std::exchange(said, true)) return;
      const auto age = std::chrono::duration_cast<milliseconds>(now - oldest.queued);
      LOG(ERROR) << oldest.what << " for " << seconds(age)
                 << " s, and still does. The other ranks have not come to it, or one has ended:"
                    " look for the first error in their logs. The process group's timeout is "
                 << seconds(timeout) << " s.";
      return;
    }
  }

  const milliseconds timeout;
  std::mutex mutex;  // for all below
  std::condition_variable closing;
  bool closed = false;
  bool watched = false;
  bool said = false;  // of the oldest
  std::deque<Collective> collectives;
};

CollectiveWatch::CollectiveWatch(c10::Device device, milliseconds timeout)
    : device_(device), state_(std::make_shared<State>(timeout)) {}

// The thread is not waited for: in a forked child there is none.
CollectiveWatch::~CollectiveWatch() {
  const std::lock_guard lock(state_->mutex);
  state_->closed = true;
  state_->collectives.clear();
  state_->closing.notify_all();
}

void CollectiveWatch::add(const std::string& what) {
  c10::Event ended(device_.type());
  ended.record(current_stream(device_));
  const std::lock_guard lock(state_->mutex);
  if (state_->collectives.size() == kMost) state_->collectives.pop_front();
  state_->collectives.push_back({.what = what, .ended = std::move(ended), .queued = Clock::now()});
  if (std::exchange(state_->watched, true)) return;
  std::thread([state = state_] {
    std::unique_lock lock(state->mutex);
    while (!state->closing.wait_for(lock, state->timeout / 8, [&] { return state->closed; })) {
      try {
        state->look();
      } catch (const std::exception&) {
        // The device is in an error, which the next call of the main thread raises.
        return;
      }
    }
  }).detach();
}

}  // namespace zero_ext
