// BackwardWatch: which backward is running, when it ends, and whether it failed.
//
// Owner:   Engine; callbacks of graph tasks hold the watch weakly.
// Threads: called from hooks on autograd's threads and from the threads of the user, without the
//          GIL. mutex_ is never held while the listener is called.
//
// Note [Which backward is this?]
// One `loss.backward()` may run several graph tasks: reentrant checkpointing calls backward inside
// a node of the outer one. All of them belong to one backward, which ends when the outermost task
// ends. A task's final callback runs inside the node that started the task, so is_inside_node() is
// false exactly for the outermost one.
//
// An outer task may end without having reached one of our parameters itself. Its end is learned
// through a hook on the node that follows the node which started the inner task.
//
// A task that throws never runs its callbacks, but destroys them: that reports the failure.
// Exception: an outer task may throw after such an inner task and before the hook that would have
// learned of its end. Two things notice that later. One is the next verb of the same thread. The
// other is the number of the next outermost task: numbers grow, and an outer task has a smaller
// number than those inside it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "autograd/backward_listener.h"

namespace zero_ext {

class BackwardWatch : public std::enable_shared_from_this<BackwardWatch> {
 public:
  // `one_thread`: a backward's hooks run on the thread that called backward, as on the host. Threads
  // then run their backwards one after the other.
  BackwardWatch(std::weak_ptr<BackwardListener> listener, int64_t rank, bool one_thread)
      : listener_(std::move(listener)), rank_(rank), one_thread_(one_thread) {}

  // Every hook calls it: from then on the watch learns when the running graph task ends.
  void enter();

  // Before a verb, outside of backwards: reports a failure of this thread's last backward that no
  // callback reported.
  void look_for_unreported_failure();

  // Outside of backwards: waits until the failures of backwards that threw have been reported.
  // On a device autograd raises the error first and destroys the graph task shortly after, on
  // another thread. The wait ends after one second, because a backward may run on a thread of the
  // user.
  void wait_for_failures();

  // At the beginning of a backward: hidden gradients may arrive, which the graph of the running
  // task does not show. The task may be inside another backward, or a node may start one.
  bool may_hide_gradients(bool parameters_missing);
  void expect_inner_backwards();
  bool saw_inner_backwards();
  // A backward has ended, of this rank or of another one that runs the same.
  void note_completed();
  bool completed_one();

 private:
  struct TaskEnd;
  void wait_for_other_threads(std::unique_lock<std::mutex>& lock);
  void let_other_threads_in();
  void task_ended(int task);
  void task_died(int task) noexcept;
  // Whether one of the `functions` is not known to be harmless.
  bool note_unknown(std::vector<std::string> functions);
  void follow_outer_task();
  void count_tasks();

  std::weak_ptr<BackwardListener> listener_;
  int64_t rank_;
  bool one_thread_;

  std::mutex mutex_;                          // protects all below
  std::set<int> tasks_;                       // graph tasks that have not ended, as far as is known
  std::set<int> doomed_;                      // of them, those around one that threw
  std::atomic<size_t> unfinished_{0};         // tasks_.size()
  std::condition_variable fewer_unfinished_;  // also: owner_ changed
  std::optional<std::thread::id> owner_;      // with one_thread_: whose backward runs
  int last_task_ = -1;
  int followed_ = -1;  // an inner task that ended, while the task around it is unknown
  bool completed_one_ = false;
  bool ever_nested_ = false;
  // Names of Python functions: those whose graphs have run no inner backward, and those of the
  // running backward that are not known to be harmless.
  std::set<std::string> harmless_functions_;
  std::set<std::string> functions_in_this_backward_;
};

}  // namespace zero_ext
