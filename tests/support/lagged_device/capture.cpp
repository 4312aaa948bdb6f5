#include "capture.h"

#include <map>
#include <mutex>
#include <utility>

namespace lagged::capture {
namespace {

std::mutex mutex;
const Queue* origin = nullptr;          // null: nothing is captured
std::map<const Queue*, bool> captured;  // and whether somebody waits for its last work
std::vector<std::string> violations;
std::vector<std::string> misuses;
uint64_t graphs = 0;
thread_local bool may_ask = false;
int64_t questions = 0;

std::string name(const Queue& queue) { return "stream " + std::to_string(queue.id); }

}  // namespace

void begin(Queue& queue) {
  const std::lock_guard lock(mutex);
  origin = &queue;
  ++graphs;
  captured = {{&queue, true}};
  violations.clear();
}

std::vector<std::string> end() {
  const std::lock_guard lock(mutex);
  for (const auto& [queue, joined] : captured) {
    if (queue != origin && !joined) violations.push_back(name(*queue) + " was not joined");
  }
  origin = nullptr;
  captured.clear();
  return std::exchange(violations, {});
}

uint64_t id_of(const Queue& queue) {
  const std::lock_guard lock(mutex);
  return captured.count(&queue) > 0 ? graphs : 0;
}

void let_this_thread_ask() { may_ask = true; }

void launched(const Queue& queue) {
  const std::lock_guard lock(mutex);
  if (origin == nullptr) return;
  const auto found = captured.find(&queue);
  if (found != captured.end()) {
    found->second = found->first == origin;
  } else if (queue.id == 0) {
    violations.push_back("work for the default stream");
  }
}

void waited_for(const Event& moment, const Queue& by) {
  const std::lock_guard lock(mutex);
  if (moment.queue == nullptr) return;
  if (origin != nullptr && moment.graph == graphs) {
    if (moment.queue == &by) return;
    captured[moment.queue] = true;
    captured.emplace(&by, false);
  } else if (moment.graph != 0) {
    misuses.push_back(name(by) + " waits for work that was captured before");
  } else if (captured.count(&by) > 0) {
    violations.push_back(name(by) + " waits for work of " + name(*moment.queue) +
                         " that is not captured");
  }
}

void released(const std::vector<Queue*>& users) {
  const std::lock_guard lock(mutex);
  for (const Queue* user : users) {
    if (captured.count(user) == 0) continue;
    violations.push_back("pinned memory of captured work was released");
    return;
  }
}

void asked_by_host(const char* what) {
  const std::lock_guard lock(mutex);
  if (origin != nullptr && !may_ask) violations.push_back(std::string("the host ") + what);
}

void asked_for(const Event& moment) {
  const std::lock_guard lock(mutex);
  ++questions;
  if (moment.graph != 0) misuses.push_back("the host asked for an event that was captured");
}

std::vector<std::string> faults() {
  const std::lock_guard lock(mutex);
  return std::exchange(misuses, {});
}

}  // namespace lagged::capture

LAGGED_EXPORT void lagged_begin_capture(int device, int64_t stream) {
  lagged::capture::begin(lagged::queue(device, stream));
}

LAGGED_EXPORT int64_t lagged_event_queries() {
  const std::lock_guard lock(lagged::capture::mutex);
  return lagged::capture::questions;
}

LAGGED_EXPORT const char* lagged_end_capture() {
  static std::string lines;
  lines.clear();
  for (const std::string& line : lagged::capture::end()) lines += line + "\n";
  return lines.c_str();
}
