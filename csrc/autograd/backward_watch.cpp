#include "autograd/backward_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/errors.h"

namespace zero_ext {
namespace {

constexpr std::chrono::minutes kBackwardPatience(5);
constexpr std::chrono::seconds kReportPatience(1);

constexpr char kInnerFailed[] =
    "backward: an inner backward (run by a hook or a node of this one) threw an error. That undid "
    "all"
    " gradients of this backward so far, but the error was caught. Let the error end the outer"
    " backward as well, and repeat forward and backward.";
constexpr char kTwoThreads[] =
    "backward: another thread runs a backward of the same model on this device. Autograd runs the"
    " hooks of both on one thread, so neither can wait for the other. Begin a backward after the"
    " other thread's has returned.";
constexpr char kUnseen[] =
    "backward: an inner backward may end on another thread than the one that called it, and"
    " zero_ext has seen nothing of the backwards around it. Its gradients were undone. Run it after"
    " the outer backward has returned.";

}  // namespace

// Lives in a graph task's final callbacks and is destroyed with them.
struct BackwardWatch::TaskEnd {
  TaskEnd(std::weak_ptr<BackwardWatch> watch, const GraphTask& task)
      : watch(std::move(watch)), task(task) {}
  ~TaskEnd() {
    if (auto alive = watch.lock()) alive->task_gone(task, ended);
  }
  void run() {
    if (auto alive = watch.lock()) {
      task.depth > 0 ? alive->inner_task_ends(task) : alive->outermost_task_ends(task);
    }
    ended = true;
  }

  std::weak_ptr<BackwardWatch> watch;
  GraphTask task;
  bool ended = false;
};

void BackwardWatch::enter() {
  std::unique_lock lock(mutex_);
  if (current_task() == last_task_) return;
  const GraphTask task = running_task();
  if (on_host_) {
    wait_for_other_threads(task, lock);
  } else {
    check_alone(task);
  }
  TORCH_CHECK(failure_ == nullptr, where(rank_), failure_);
  last_task_ = task.number;
  await_end_of(task);
}

void BackwardWatch::wait_for_other_threads(const GraphTask& task,
                                           std::unique_lock<std::mutex>& lock) {
  const bool mine = fewer_unfinished_.wait_for(
      lock, kBackwardPatience, [&] { return owner_ == nullptr || owner_ == task.queue; });
  TORCH_CHECK(mine, where(rank_), "backward: waited ", kBackwardPatience.count(),
              " minutes for a backward of the same model on another thread. Only one thread at a"
              " time runs a backward. Do not let the other thread wait for this one.");
  owner_ = task.queue;
}

void BackwardWatch::check_alone(const GraphTask& task) const {
  const bool alone = std::all_of(tasks_.begin(), tasks_.end(), [&](const auto& other) {
    return task.depth > 0 || other.second.depth > 0 || other.first == task.number;
  });
  TORCH_CHECK(alone, where(rank_), kTwoThreads);
}

void BackwardWatch::await_end_of(const GraphTask& task) {
  if (!tasks_.emplace(task.number, task).second) return;
  ever_nested_ = ever_nested_ || task.depth > 0;
  count_tasks();
  call_at_end_of_task([end = std::make_shared<TaskEnd>(weak_from_this(), task)] { end->run(); });
}

void BackwardWatch::inner_task_ends(const GraphTask& task) {
  if (const auto listener = listener_.lock()) listener->inner_backward_ended(task.number);
  const std::lock_guard lock(mutex_);
  last_task_ = -1;
  TORCH_CHECK(failure_ == nullptr, where(rank_), failure_);
  // Of a task that the host began on a device either thread may be the last to drop it.
  const bool may_go_elsewhere =
      (task.is_deep && !is_inside_node()) || (!on_host_ && task.is_of_host);
  TORCH_CHECK(!may_go_elsewhere || knows_outer_task_of(task), where(rank_), kUnseen);
}

void BackwardWatch::outermost_task_ends(const GraphTask& task) {
  {
    std::unique_lock lock(mutex_);
    const bool alone =
        fewer_unfinished_.wait_for(lock, kReportPatience, [this] { return tasks_.size() == 1; });
    last_task_ = -1;
    TORCH_CHECK(failure_ == nullptr, where(rank_), failure_);
    TORCH_CHECK(alone, where(rank_), kTwoThreads);
    harmless_functions_.merge(functions_in_this_backward_);
    functions_in_this_backward_.clear();
  }
  if (const auto listener = listener_.lock()) listener->backward_ended();
  const std::lock_guard lock(mutex_);
  remove(task);
}

void BackwardWatch::task_gone(const GraphTask& task, bool ended) noexcept {
  if (task.depth == 0 && ended) return;
  if (!ended) fail(kInnerFailed);
  bool two_threads = false;
  bool unended = false;
  {
    const std::lock_guard lock(mutex_);
    if (task.depth > 0 && current_task() != -1) {
      const GraphTask around = running_task();
      if (around.depth < task.depth) await_end_of(around);
    }
    two_threads = std::count_if(tasks_.begin(), tasks_.end(),
                                [](const auto& each) { return each.second.depth == 0; }) > 1;
    unended = ended && failure_ == nullptr && !knows_outer_task_of(task);
    unended_ = unended_ || unended;
  }
  if (two_threads) fail(kTwoThreads);
  if (unended) fail(kUnseen);
  const std::lock_guard lock(mutex_);
  remove(task);
}

void BackwardWatch::fail(const char* failure) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_ == nullptr) failure_ = failure;
    last_task_ = -1;
    functions_in_this_backward_.clear();
  }
  if (const auto listener = listener_.lock()) listener->backward_failed();
}

bool BackwardWatch::knows_outer_task_of(const GraphTask& task) const {
  return std::any_of(tasks_.begin(), tasks_.end(),
                     [&](const auto& other) { return other.second.depth < task.depth; });
}

void BackwardWatch::remove(const GraphTask& task) {
  tasks_.erase(task.number);
  if (tasks_.empty()) {
    failure_ = nullptr;
    owner_ = nullptr;
  }
  count_tasks();
}

void BackwardWatch::count_tasks() {
  unreported_ = std::count_if(tasks_.begin(), tasks_.end(), [this](const auto& each) {
    return !on_host_ || each.second.is_deep;
  });
  fewer_unfinished_.notify_all();
}

void BackwardWatch::wait_for_failures() {
  if (unreported_ == 0 || current_task() != -1) return;
  std::unique_lock lock(mutex_);
  fewer_unfinished_.wait_for(lock, kReportPatience, [this] { return unreported_ == 0; });
}

void BackwardWatch::check_ended(const char* verb) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!std::exchange(unended_, false), where(rank_), verb,
              ": the end of the last backward was not seen, because it ran inside another one on"
              " another thread. Its gradients were undone. Repeat forward and backward.");
}

bool BackwardWatch::may_hide_gradients(bool parameters_missing) {
  // Asks for the GIL, so before mutex_ is taken; see Note [Locks and the GIL].
  std::vector<std::string> functions = python_functions_of_task();
  const std::lock_guard lock(mutex_);
  const bool unknown_function = note_unknown(std::move(functions));
  return ever_nested_ || unknown_function || (parameters_missing && !completed_one_);
}

void BackwardWatch::expect_inner_backwards() {
  const std::lock_guard lock(mutex_);
  ever_nested_ = true;
}

void BackwardWatch::note_completed() {
  const std::lock_guard lock(mutex_);
  completed_one_ = true;
}

bool BackwardWatch::completed_one() {
  const std::lock_guard lock(mutex_);
  return completed_one_;
}

bool BackwardWatch::saw_inner_backwards() {
  const std::lock_guard lock(mutex_);
  return ever_nested_;
}

bool BackwardWatch::note_unknown(std::vector<std::string> functions) {
  bool unknown = false;
  for (std::string& name : functions) {
    if (harmless_functions_.count(name) > 0) continue;
    functions_in_this_backward_.insert(std::move(name));
    unknown = true;
  }
  return unknown;
}

}  // namespace zero_ext
