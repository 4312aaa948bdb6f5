// What autograd tells us: gradients as they arrive, the end of a backward, its failure. Knows
// nothing of units.
//
// Owner:   Engine owns the watch; the hooks live on the parameters' AccumulateGrad nodes and hold
//          the listener weakly.
// Threads: hooks run on autograd's threads, without the GIL; the listener locks.
//
// Note [Which backward is this?]
// One `loss.backward()` may run several graph tasks: reentrant checkpointing calls backward inside
// a node of the outer one. All of them belong to one backward, which ends when the outermost task
// ends. A task's final callback runs inside the node that started the task, so get_current_node()
// is null exactly for the outermost one. When none of our parameters was reached by an outer task,
// its end is learned through a pre-hook on the node that follows the one that started us. A task
// that throws never runs its callbacks, but it destroys them: that is how a failure is noticed.
// Where it throws after such an inner task and before that pre-hook, nobody hears of it: then it is
// noticed by what the caller does next, or by the number of the next outermost task, since numbers
// grow and an outer task has a smaller one than those inside it.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace zero_ext {

// Keeps the node alive, whichever pointer this version of torch has for it. Node is only declared
// here: autograd's headers take longer to compile than most of our files.
using NodePtr = std::shared_ptr<torch::autograd::Node>;

class Call;

class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  // Parameter i's AccumulateGrad is about to run, inside the graph task that is current.
  virtual void before_gradient(int64_t i) = 0;
  // It ran: the gradient is in the parameter's .grad, and the user's own hooks have seen it.
  virtual void after_gradient(int64_t i) = 0;
  // The outermost backward that reached one of our parameters ended, or threw.
  virtual void backward_ended() = 0;
  virtual void backward_failed() noexcept = 0;
  // One inside it ended, while it goes on.
  virtual void inner_backward_ended(int task) = 0;
  // A backward is about to come back into a call, perhaps once more, or has left it, perhaps
  // without having entered it.
  virtual void call_entered(const std::shared_ptr<Call>& call) = 0;
  virtual void call_left(const std::shared_ptr<Call>& call) = 0;
};

// One call of a module in a forward. Hooks on the nodes of its outputs and inputs run in every
// backward over the graph; those of the outputs keep the call alive. The graph itself is left as it
// is: one more node would group the sums of gradients differently. A view loses its node when it is
// written to, and the graph then goes on from that of its base: both have a hook. What a module
// hands through is no output: its node is from before the call, which has been left when that runs.
//
// Note [When has a backward left a call?]
// Autograd runs the ready node that was created last. When a node from before the call runs, or one
// of another call that had ended before this one began, every node of this call has run.
// AccumulateGrad alone runs out of turn. An inner backward has left all calls when it ends.
class Call : public std::enable_shared_from_this<Call> {
 public:
  Call(std::weak_ptr<BackwardListener> listener, int64_t site);
  ~Call() { --living_; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  static int64_t living() { return living_; }
  void watch_input(const at::Tensor& input);
  void watch_output(const at::Tensor& output);
  void end();  // of the forward

  int64_t site() const { return site_; }
  // The forward of `other` had ended when this one began.
  bool is_after(const Call& other) const { return begin_ >= other.end_; }

  void input_reached();  // by a backward

 private:
  void watch_input_node(torch::autograd::Node* node);
  void watch_output_node(torch::autograd::Node* node);
  void enter();

  std::weak_ptr<BackwardListener> listener_;
  int64_t site_;
  uint64_t begin_;  // autograd's sequence numbers
  uint64_t end_ = 0;
  std::set<const torch::autograd::Node*> inputs_;  // that hold a hook of this call
  static inline std::atomic<int64_t> living_{0};
};

// The running backward keeps its graph (retain_graph, create_graph).
bool graph_is_kept();
// The running graph task, or -1.
int current_task();

// Attaches both hooks for parameter i; whether it requires a gradient now does not matter. Keep the
// node alive: autograd holds it only weakly, and with it go the hooks.
[[nodiscard]] NodePtr hook_parameter(const at::Tensor& parameter, int64_t i,
                                     const std::weak_ptr<BackwardListener>& listener);

// Autograd still has `node` for the parameter: it puts another in its place when dtype or device
// change.
bool is_node_of(const NodePtr& node, const at::Tensor& parameter);

// The graph task that is running now will execute `node`.
bool will_run(const NodePtr& node);

// On a device, between backwards: the parameter's `node` belongs to `stream` from now on, as one
// that a forward makes there.
void move_to_stream(const NodePtr& node, const at::Tensor& parameter, const c10::Stream& stream);

// DistributedDataParallel's reducer has its hook on the parameter.
bool reduced_by_ddp(const at::Tensor& parameter);

class BackwardWatch : public std::enable_shared_from_this<BackwardWatch> {
 public:
  // `one_thread`: a backward's hooks run on the thread that called it, as on the host. Then threads
  // take turns with their backwards.
  BackwardWatch(std::weak_ptr<BackwardListener> listener, int64_t rank, bool one_thread)
      : listener_(std::move(listener)), rank_(rank), one_thread_(one_thread) {}

  // From every hook: makes sure that the end of the running graph task will be heard of.
  void enter();

  // Outside of backwards, before a verb: this thread's last one may have thrown unheard.
  void look_for_unheard_failure();

  // Outside of backwards: until those that threw have been heard of. Autograd tells the caller of a
  // failure first and lets go of the graph task, on a device's thread, shortly after that. One that
  // runs on another thread of the user's is waited for in vain, for a second.
  void wait_for_failures();

  // At the beginning of a backward: gradients may arrive that the running task's graph does not
  // show, because it may be inside another backward, or one of its nodes may start one.
  bool may_hide_gradients(bool parameters_missing);
  void expect_inner_backwards();
  // Some ran.
  bool saw_inner_backwards();

 private:
  struct TaskEnd;
  void wait_for_other_threads(std::unique_lock<std::mutex>& lock);
  void let_other_threads_in();
  void task_ended(int task);
  void task_died(int task) noexcept;
  bool has_unknown_python_function();
  void follow_outer_task();
  void count_tasks();

  std::weak_ptr<BackwardListener> listener_;
  int64_t rank_;
  bool one_thread_;
  std::mutex mutex_;      // protects all below; never held while the listener is called
  std::set<int> tasks_;   // graph tasks whose end has not been heard of
  std::set<int> doomed_;  // of them, those around one that threw
  std::atomic<size_t> unfinished_{0};     // how many tasks
  std::condition_variable fewer_;         // tasks, or owners
  std::optional<std::thread::id> owner_;  // the thread whose backward it is, with one_thread_
  int last_task_ = -1;
  int followed_ = -1;  // an inner task that ended, while the one around it is not known
  bool completed_one_ = false;
  bool ever_nested_ = false;
  std::set<std::string>
      harmless_functions_;  // Python functions in graphs that ran no inner backward
  std::set<std::string> functions_in_this_backward_;
};

}  // namespace zero_ext
