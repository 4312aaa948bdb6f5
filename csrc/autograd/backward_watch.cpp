#include "autograd/backward_watch.h"

#include <chrono>

#include "core/errors.h"
#include "core/torch_internals.h"

namespace zero_ext {
namespace {

constexpr std::chrono::minutes kBackwardPatience(5);

constexpr char kInnerFailed[] =
    "backward: an inner backward (run by a node of this one) threw an error. That undid all"
    " gradients of this backward so far, but the error was caught. Let the error end the outer"
    " backward as well, and repeat forward and backward.";
constexpr char kEarlierFailed[] =
    "backward: an earlier backward threw an error right after an inner backward (reentrant"
    " checkpointing), where zero_ext could not notice it. The gradients of both backwards were"
    " undone. Repeat forward and backward.";

// Enters the watch, once.
class EnterOnce : public EntryHook {
 public:
  explicit EnterOnce(std::weak_ptr<BackwardWatch> watch) : watch_(std::move(watch)) {}
  void run() override {
    if (auto watch = std::exchange(watch_, {}).lock()) watch->enter();
  }

 private:
  std::weak_ptr<BackwardWatch> watch_;
};

}  // namespace

// Lives in a graph task's final callbacks and is destroyed with them.
struct BackwardWatch::TaskEnd {
  TaskEnd(std::weak_ptr<BackwardWatch> watch, int task) : watch(std::move(watch)), task(task) {}
  ~TaskEnd() {
    if (ran) return;
    if (auto alive = watch.lock()) alive->task_died(task);
  }
  void run() {
    ran = true;
    if (auto alive = watch.lock()) alive->task_ended(task);
  }

  std::weak_ptr<BackwardWatch> watch;
  int task;
  bool ran = false;
};

void BackwardWatch::enter() {
  std::unique_lock lock(mutex_);
  const int task = current_task();
  if (task == last_task_) return;
  if (one_thread_) wait_for_other_threads(lock);
  TORCH_CHECK(doomed_.count(task) == 0, where(rank_), kInnerFailed);
  last_task_ = task;
  if (!tasks_.insert(task).second) return;
  count_tasks();
  if (task < followed_) followed_ = -1;
  call_at_end_of_task([end = std::make_shared<TaskEnd>(weak_from_this(), task)] { end->run(); });
}

void BackwardWatch::wait_for_other_threads(std::unique_lock<std::mutex>& lock) {
  const std::thread::id me = std::this_thread::get_id();
  const bool mine = fewer_unfinished_.wait_for(lock, kBackwardPatience,
                                               [&] { return owner_.value_or(me) == me; });
  TORCH_CHECK(mine, where(rank_), "backward: waited ", kBackwardPatience.count(),
              " minutes for a backward of the same model on another thread. Only one thread at a"
              " time runs a backward. Do not let the other thread wait for this one.");
  owner_ = me;
}

void BackwardWatch::let_other_threads_in() {
  const std::lock_guard lock(mutex_);
  if (!tasks_.empty()) return;
  owner_.reset();
  fewer_unfinished_.notify_all();
}

void BackwardWatch::task_ended(int task) {
  const auto listener = listener_.lock();
  const bool inner = is_inside_node();
  if (listener != nullptr && inner) {
    try {
      listener->inner_backward_ended(task);
    } catch (...) {
      task_died(task);
      throw;
    }
  }
  const char* failure = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (listener == nullptr || tasks_.erase(task) == 0) return;
    count_tasks();
    last_task_ = -1;
    if (inner) {
      ever_nested_ = true;
      if (!tasks_.empty()) return;
      follow_outer_task();
      if (followed_ < 0) followed_ = task;
      return;
    }
    if (doomed_.count(task) > 0) failure = kInnerFailed;
    if (followed_ >= 0 && task > followed_) failure = kEarlierFailed;
    tasks_.clear();
    doomed_.clear();
    followed_ = -1;
    count_tasks();
    completed_one_ = true;
    harmless_functions_.merge(functions_in_this_backward_);
    functions_in_this_backward_.clear();
  }
  try {
    if (failure != nullptr) listener->backward_failed();
    TORCH_CHECK(failure == nullptr, where(rank_), failure);
    listener->backward_ended();
  } catch (...) {
    let_other_threads_in();
    throw;
  }
  let_other_threads_in();
}

void BackwardWatch::task_died(int task) noexcept {
  {
    const std::lock_guard lock(mutex_);
    last_task_ = -1;
    functions_in_this_backward_.clear();
  }
  if (auto listener = listener_.lock()) listener->backward_failed();
  {
    const std::lock_guard lock(mutex_);
    tasks_.erase(task);
    doomed_ = tasks_;
    if (tasks_.empty()) followed_ = -1;
    count_tasks();
  }
  let_other_threads_in();
}

void BackwardWatch::look_for_unreported_failure() {
  {
    const std::lock_guard lock(mutex_);
    if (followed_ < 0 || !tasks_.empty() || current_task() != -1) return;
    if (one_thread_ && owner_ != std::this_thread::get_id()) return;
    followed_ = -1;
    last_task_ = -1;
    functions_in_this_backward_.clear();
  }
  if (auto listener = listener_.lock()) listener->backward_failed();
  let_other_threads_in();
}

void BackwardWatch::count_tasks() {
  unfinished_ = tasks_.size();
  fewer_unfinished_.notify_all();
}

void BackwardWatch::wait_for_failures() {
  if (unfinished_ == 0 || current_task() != -1) return;
  std::unique_lock lock(mutex_);
  fewer_unfinished_.wait_for(lock, std::chrono::seconds(1), [this] { return tasks_.empty(); });
}

// The node that started the inner task hands gradients to at least one of the next nodes.
void BackwardWatch::follow_outer_task() {
  for (Node* node : next_nodes()) add_hook(*node, std::make_unique<EnterOnce>(weak_from_this()));
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
