// BackwardWatch: which backward is running, when it ends, and whether it failed.
//
// Owner:   Engine; callbacks of graph tasks hold the watch weakly.
// Threads: called from hooks on autograd's threads and from the threads of the user, without the
//          GIL. mutex_ is never held while the listener is called.
//
// Note [Which backward is this?]
// One `loss.backward()` may run several graph tasks: a hook or a node of a task may call backward
// again. All of them belong to one backward, which ends when the outermost task ends.
//
// A task has a callback of ours as soon as anything of ours is reached in it. Autograd runs the
// callback when the task ends, and destroys it with the task. At that moment the thread is back in
// the task around it, if there is one, and that task gets a callback, too. So the outermost task has
// one before the hook or the node that began the inner task goes on. No other node has to follow.
//
// A task that throws never runs its callbacks, but destroys them: that reports the failure. Then
// every task around it raises an error as well, even if the user caught the first one.
//
// A task may end on another thread than the one that waits for it: one of autograd's pool for very
// deep tasks, or a device's thread. That thread is back in no task. Then a task around it must be
// known already, because a forward or a gradient was seen there. Otherwise the inner backward
// raises an error. Where the host began a task on a device it always does: the thread that drops the
// task last destroys it, wherever its last node ran.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "autograd/backward_listener.h"
#include "core/torch_internals.h"

namespace zero_ext {

class BackwardWatch : public std::enable_shared_from_this<BackwardWatch> {
 public:
  // `on_host`: a backward's hooks run on the thread that called backward, or on threads that it
  // waits for. Threads then run their backwards one after the other. On a device a second thread's
  // backward raises an error, because autograd's thread of the device runs the hooks of both.
  BackwardWatch(std::weak_ptr<BackwardListener> listener, int64_t rank, bool on_host)
      : listener_(std::move(listener)), rank_(rank), on_host_(on_host) {}

  // Every hook calls it, and every forward inside a backward: from then on the watch learns when the
  // running graph task ends.
  void enter();

  // Before a verb, and outside of backwards: waits until the failures of backwards that threw have
  // been reported. On a device, and in very deep backwards, autograd raises the error first and
  // destroys the graph task shortly after, on another thread. The wait ends after one second,
  // because a backward may run on a thread of the user.
  void wait_for_failures();
  // Raises, once, after a backward whose end was not seen.
  void check_ended(const char* verb);

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
  void wait_for_other_threads(const GraphTask& task, std::unique_lock<std::mutex>& lock);
  void check_alone(const GraphTask& task) const;
  void await_end_of(const GraphTask& task);
  // The running task ends.
  void inner_task_ends(const GraphTask& task);
  void outermost_task_ends(const GraphTask& task);
  // It was destroyed. `ended`: without an error.
  void task_gone(const GraphTask& task, bool ended) noexcept;
  void fail(const char* failure) noexcept;
  bool knows_outer_task_of(const GraphTask& task) const;
  void remove(const GraphTask& task);
  void count_tasks();
  // Whether one of the `functions` is not known to be harmless.
  bool note_unknown(std::vector<std::string> functions);

  std::weak_ptr<BackwardListener> listener_;
  int64_t rank_;
  bool on_host_;

  std::mutex mutex_;  // protects all below
  // Tasks of the running backward that have not been destroyed, as far as they are known.
  std::map<int, GraphTask> tasks_;
  const char* failure_ = nullptr;             // what undid the running backward; null: nothing
  bool unended_ = false;                      // a backward's end was not seen
  std::atomic<size_t> unreported_{0};         // of tasks_: those that may fail without a report yet
  std::condition_variable fewer_unfinished_;  // also: owner_ changed
  const void* owner_ = nullptr;               // on the host: the queue of the running backward
  int last_task_ = -1;
  bool completed_one_ = false;
  bool ever_nested_ = false;
  // Names of Python functions: those whose graphs have run no inner backward, and those of the
  // running backward that are not known to be harmless.
  std::set<std::string> harmless_functions_;
  std::set<std::string> functions_in_this_backward_;
};

}  // namespace zero_ext
