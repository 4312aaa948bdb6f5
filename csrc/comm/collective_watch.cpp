#include "comm/collective_watch.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "comm/gather_order.h"
#include "comm/host_wait.h"
#include "comm/local/shared_host_transport.h"
#include "comm/stalled_ranks.h"
#include "core/errors.h"
#include "core/interrupts.h"
#include "device/kernel_table.h"
#include "device/streams.h"

namespace zero_ext {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// More than are under way at any time; what is older has ended.
constexpr size_t kMost = 4096;

}  // namespace

struct Collective {
  std::string what;
  std::optional<c10::Event> begun;
  c10::Event ended;
  Clock::time_point queued;
  int64_t backwards = 0;  // that its rank had begun
};

namespace {

double seconds(milliseconds duration) { return static_cast<double>(duration.count()) / 1000; }

milliseconds age_of(const Collective& collective) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - collective.queued);
}

// What a rank tells the others that it waits for. They know which rank it is.
std::string told(const std::string& what, int64_t backwards) {
  const size_t unit = what.find(", unit '");
  const size_t end = what.find("]: ");
  std::string text = end == std::string::npos ? what : what.substr(end + 3);
  if (unit < end) text = what.substr(unit + 2, end - unit - 2) + " " + text;
  return "with " + std::to_string(backwards) + " backward(s) begun in this step: " + text;
}

// In a wait that has taken `so_far`. The host goes on soon after the device.
void pause(Clock::duration so_far) {
  if (so_far < milliseconds(1)) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::min<Clock::duration>(so_far / 16, milliseconds(1)));
  }
}

constexpr char kSameEverywhere[] =
    " Between hosts every rank must run the same forwards and backwards of a step, see"
    " docs/uneven_batches.md.";

}  // namespace

struct CollectiveWatch::State {
  State(int64_t rank, milliseconds timeout, std::unique_ptr<StalledRanks> ranks)
      : rank(rank), timeout(timeout), ranks(std::move(ranks)) {}

  // The oldest that has not ended, if it was queued at least `age` ago, else null.
  const Collective* oldest(milliseconds age) {
    while (!collectives.empty() && age_of(collectives.front()) >= age) {
      if (!collectives.front().ended.query()) return &collectives.front();
      collectives.pop_front();
      if (std::exchange(logged, false)) went_on = Clock::now();
      if (first_seen.has_value() && Clock::now() - *first_seen >= timeout * 3 / 4) gave_up = true;
      if (!gave_up) of_all_ranks.clear();
      first_seen.reset();
    }
    return nullptr;
  }

  // What this rank tells the others; empty where it goes on.
  std::string stalled() {
    const auto long_enough = [this](Clock::time_point since) {
      return Clock::now() - since >= timeout / 4;
    };
    // The device first: as long as that goes on, other ranks may still get what they wait for.
    if (const Collective* collective = oldest(milliseconds(0))) {
      if (collective->begun.has_value() && !collective->begun->query()) return {};
      if (!first_seen.has_value()) first_seen = Clock::now();
      return long_enough(*first_seen) ? told(collective->what, collective->backwards)
                                      : std::string();
    }
    if (!host_waits_since.has_value() || !long_enough(*host_waits_since)) return {};
    return told(host_waits_for, backwards);
  }

  // `lock`: of the mutex. Others take it meanwhile.
  void compare_ranks(std::unique_lock<std::mutex>& lock) {
    const std::string what = stalled();
    lock.unlock();
    std::string of_all = ranks->exchange(what);
    lock.lock();
    if (of_all.empty() || !of_all_ranks.empty()) return;
    of_all_ranks = std::move(of_all);
    logged = true;
    LOG(ERROR) << where(rank) << wait_for_each_other();
  }

  std::string wait_for_each_other() const {
    return "on the device the ranks wait for each other: " + of_all_ranks + "." + kSameEverywhere;
  }

  void raise_if_they_do() {
    if (gather_order != nullptr) gather_order->raise_if_ranks_differ();
    const std::lock_guard lock(mutex);
    if (!of_all_ranks.empty()) oldest(milliseconds(0));  // it may have ended since
    TORCH_CHECK(of_all_ranks.empty(), where(rank), wait_for_each_other());
    const std::string text = failure ? failure() : std::string();
    TORCH_CHECK(text.empty(), where(rank), text);
  }

  std::function<void()> meanwhile_of_host() {
    const std::lock_guard lock(mutex);
    return meanwhile;
  }

  void check() {
    const Collective* collective = oldest(timeout / 2);
    // Those behind a logged one have waited as long, and end soon after it.
    const bool soon = went_on.has_value() && Clock::now() - *went_on < timeout / 2;
    if (collective == nullptr || soon || std::exchange(logged, true)) return;
    LOG(ERROR) << collective->what << " for " << seconds(age_of(*collective))
               << " s, and still does. The other ranks have not come to it, or one has ended:"
                  " look for the first error in their logs."
               << kSameEverywhere << " The process group's timeout is " << seconds(timeout)
               << " s.";
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

  const int64_t rank;
  const milliseconds timeout;
  const std::unique_ptr<StalledRanks> ranks;  // the thread's
  std::function<std::string()> failure;       // set before anything is watched
  std::shared_ptr<GatherOrder> gather_order;  // null where it is not compared
  std::mutex mutex;                           // for all below
  std::condition_variable closing;
  bool closed = false;
  bool watched = false;
  bool logged = false;                       // the oldest was
  std::optional<Clock::time_point> went_on;  // the last one that was logged ended
  std::deque<Collective> collectives;
  int64_t backwards = 0;
  std::optional<Clock::time_point> first_seen;  // the oldest was, as the oldest
  std::optional<Clock::time_point> host_waits_since;
  std::string host_waits_for;
  std::function<void()> meanwhile;
  std::string of_all_ranks;  // who waits for what, where they wait for each other
  bool gave_up = false;      // the backend may have ended collectives that waited, with errors
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

CollectiveWatch::CollectiveWatch(c10::Device device, int64_t rank, milliseconds timeout,
                                 std::unique_ptr<StalledRanks> ranks)
    : device_(device), state_(std::make_shared<State>(rank, timeout, std::move(ranks))) {
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

std::optional<c10::Event> CollectiveWatch::begin() const {
  const c10::Stream stream = current_stream(device_);
  if (capture_id(stream) != 0) return std::nullopt;
  c10::Event begun(device_.type());
  begun.record(stream);
  return begun;
}

void CollectiveWatch::add(const std::string& what, std::optional<c10::Event> begun) {
  const c10::Stream stream = current_stream(device_);
  if (capture_id(stream) != 0) return;
  c10::Event ended(device_.type());
  ended.record(stream);
  const std::lock_guard lock(state_->mutex);
  if (state_->collectives.size() == kMost) state_->collectives.pop_front();
  state_->collectives.push_back({.what = what,
                                 .begun = std::move(begun),
                                 .ended = std::move(ended),
                                 .queued = Clock::now(),
                                 .backwards = state_->backwards});
  if (std::exchange(state_->watched, true)) return;
  std::thread([state = state_, device = device_] {
    const c10::DeviceGuard guard(device);
    kernels_on(device.type()).ask_during_captures();
    std::unique_lock lock(state->mutex);
    while (!state->closing.wait_for(lock, state->timeout / 16, [&] { return state->closed; })) {
      try {
        state->compare_ranks(lock);
        state->check();
      } catch (const std::exception&) {
        // The device is in an error, which the next call of the main thread raises.
        return;
      }
    }
  }).detach();
}

void CollectiveWatch::note_backwards(int64_t count) {
  const std::lock_guard lock(state_->mutex);
  state_->backwards = count;
}

void CollectiveWatch::ask_about_failures(std::function<std::string()> failure) {
  state_->failure = std::move(failure);
}

void CollectiveWatch::compare_gathers(std::shared_ptr<GatherOrder> order) {
  state_->gather_order = std::move(order);
}

CollectiveWatch::HostWait::HostWait(std::shared_ptr<CollectiveWatch> watch, const std::string& what,
                                    const std::function<void()>& meanwhile)
    : watch_(std::move(watch)) {
  State& state = *watch_->state_;
  const std::lock_guard lock(state.mutex);
  state.host_waits_for = what;
  state.host_waits_since = Clock::now();
  state.meanwhile = [meanwhile, thread = std::this_thread::get_id()] {
    if (std::this_thread::get_id() == thread) meanwhile();
  };
}

CollectiveWatch::HostWait::~HostWait() {
  State& state = *watch_->state_;
  const std::lock_guard lock(state.mutex);
  state.host_waits_since.reset();
  state.meanwhile = nullptr;
  if (std::uncaught_exceptions() == exceptions_) state.of_all_ranks.clear();
}

void CollectiveWatch::HostWait::begin_again() const {
  const std::lock_guard lock(watch_->state_->mutex);
  watch_->state_->host_waits_since = Clock::now();
  watch_->state_->of_all_ranks.clear();
}

void CollectiveWatch::raise_if_ranks_wait() const { state_->raise_if_they_do(); }

void raise_if_ranks_wait(c10::Device device, CollectiveWatch* watch) {
  if (watch != nullptr) wait_on_host(c10::Event(device.type()), watch);  // one that has ended
}

void wait_for_stream(c10::Device device, CollectiveWatch* watch) {
  if (watch == nullptr) return;
  c10::Event queued(device.type());
  queued.record(current_stream(device));
  wait_on_host(queued, watch);
}

void wait_on_host(const c10::Event& event, CollectiveWatch* watch) {
  if (watch == nullptr) return event.synchronize();
  CollectiveWatch::State& state = *watch->state_;
  const auto begin = Clock::now();
  auto checked = begin;
  // What the device and its backend have reported until now.
  const auto named = [&](const auto& ask) {
    try {
      return ask();
    } catch (const std::exception& error) {
      TORCH_CHECK(false, where(state.rank), "the device has failed, or a collective on it.",
                  SharedHostTransport::dead_peers(),
                  " Look for the first error in the ranks' logs. Here: ", text_of(error));
    }
  };
  state.raise_if_they_do();
  const std::function<void()> meanwhile = state.meanwhile_of_host();
  while (!named([&] { return event.query(); })) {
    const auto now = Clock::now();
    if (meanwhile) meanwhile();
    pause(now - begin);
    if (now - checked < kInterruptSlice) continue;
    checked = now;
    check_interrupt();
    state.raise_if_they_do();
  }
  named([&] { event.synchronize(); });
  state.raise_if_they_do();  // it may have gone on without a rank
}

}  // namespace zero_ext
