#include "autograd/backward_watch.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "core/errors.h"

namespace zero_ext {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr std::chrono::minutes kBackwardPatience(5);

constexpr char kInnerFailed[] =
    "backward: an inner backward (run by a node of this one) threw, which undid all gradients of"
    " this one so far. The exception was caught; let it end the outer backward as well, and repeat"
    " forward and backward.";
constexpr char kEarlierFailed[] =
    "backward: an earlier one threw right after an inner backward (reentrant checkpointing), where"
    " nobody heard of it. Its gradients and this one's were undone: repeat forward and backward.";

class BeforeGradient : public torch::autograd::FunctionPreHook {
 public:
  BeforeGradient(std::weak_ptr<BackwardListener> listener, int64_t i)
      : listener_(std::move(listener)), i_(i) {}
  variable_list operator()(const variable_list& grads) override {
    if (auto listener = listener_.lock()) listener->before_gradient(i_);
    return grads;
  }

 private:
  std::weak_ptr<BackwardListener> listener_;
  int64_t i_;
};

class AfterGradient : public torch::autograd::FunctionPostHook {
 public:
  AfterGradient(std::weak_ptr<BackwardListener> listener, int64_t i)
      : listener_(std::move(listener)), i_(i) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    if (auto listener = listener_.lock()) listener->after_gradient(i_);
    return outputs;
  }

 private:
  std::weak_ptr<BackwardListener> listener_;
  int64_t i_;
};

// Runs whenever autograd enters the node.
class OnEachEntry : public torch::autograd::FunctionPreHook {
 public:
  explicit OnEachEntry(std::function<void()> action) : action_(std::move(action)) {}
  variable_list operator()(const variable_list& grads) override {
    action_();
    return grads;
  }

 private:
  std::function<void()> action_;
};

// Tells calls that autograd enters the node of one of their inputs: one hook for all of them, for
// an input may outlive many.
class WhenReached : public torch::autograd::FunctionPreHook {
 public:
  static WhenReached& on(Node& node) {
    for (const auto& hook : node.pre_hooks()) {
      if (auto* found = dynamic_cast<WhenReached*>(hook.get())) return *found;
    }
    auto made = std::make_unique<WhenReached>();
    WhenReached& hook = *made;
    node.add_pre_hook(std::move(made));
    return hook;
  }

  void add(std::weak_ptr<Call> call) {
    std::erase_if(calls_, [](const std::weak_ptr<Call>& each) { return each.expired(); });
    calls_.push_back(std::move(call));
  }

  variable_list operator()(const variable_list& grads) override {
    const std::vector<std::weak_ptr<Call>> calls = calls_;
    for (const std::weak_ptr<Call>& each : calls) {
      if (const std::shared_ptr<Call> call = each.lock()) call->input_reached();
    }
    return grads;
  }

 private:
  std::vector<std::weak_ptr<Call>> calls_;
};

// Runs once, when autograd enters the node.
class OnEntry : public torch::autograd::FunctionPreHook {
 public:
  explicit OnEntry(std::function<void()> action) : action_(std::move(action)) {}
  variable_list operator()(const variable_list& grads) override {
    if (auto action = std::exchange(action_, nullptr)) action();
    return grads;
  }

 private:
  std::function<void()> action_;
};

// torch's own pointer is a shared_ptr or an intrusive_ptr, by its version.
template <typename Pointer>
NodePtr shared(Pointer node) {
  if constexpr (std::is_same_v<Pointer, NodePtr>) {
    return node;
  } else {
    Node* bare = node.get();
    return {bare, [owner = std::move(node)](Node*) {}};
  }
}

}  // namespace

NodePtr hook_parameter(const at::Tensor& parameter, int64_t i,
                       const std::weak_ptr<BackwardListener>& listener) {
  // A frozen parameter has no node. Made while it is unfrozen for a moment, the node serves when it
  // is unfrozen for good.
  const bool requires_grad = parameter.requires_grad();
  if (!requires_grad) parameter.set_requires_grad(true);
  NodePtr node = shared(torch::autograd::impl::grad_accumulator(parameter));
  if (!requires_grad) parameter.set_requires_grad(false);
  node->add_pre_hook(std::make_unique<BeforeGradient>(listener, i));
  node->add_post_hook(std::make_unique<AfterGradient>(listener, i));
  return node;
}

bool is_node_of(const NodePtr& node, const at::Tensor& parameter) {
  return torch::autograd::impl::try_get_grad_accumulator(parameter).get() == node.get();
}

void move_to_stream(const NodePtr& node, const at::Tensor& parameter, const c10::Stream& stream) {
  if (node->input_metadata(0).stream() == stream) return;
  node->clear_input_metadata();
  node->add_input_metadata(parameter);
}

bool will_run(const NodePtr& node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || nodes->find(node.get()) == nodes->end()) return false;
  const auto* selected = torch::autograd::get_current_graph_task_exec_info();
  if (selected == nullptr || selected->empty()) return true;
  const auto found = selected->find(node.get());
  // Not where its gradient is only captured, for torch.autograd.grad().
  return found != selected->end() && found->second.needed_;
}

bool graph_is_kept() { return torch::autograd::get_current_graph_task_keep_graph(); }

int current_task() { return torch::autograd::get_current_graph_task_id(); }

Call::Call(std::weak_ptr<BackwardListener> listener, int64_t site)
    : listener_(std::move(listener)), site_(site), begin_(at::sequence_number::peek()) {
  ++living_;
}

void Call::end() { end_ = at::sequence_number::peek(); }

void Call::watch_input(const at::Tensor& input) {
  if (!input.requires_grad()) return;
  watch_input_node(input.grad_fn().get());
  if (input.is_view()) watch_input_node(input._base().grad_fn().get());
}

void Call::watch_input_node(Node* node) {
  if (node == nullptr || !inputs_.insert(node).second) return;
  WhenReached::on(*node).add(weak_from_this());
}

void Call::watch_output(const at::Tensor& output) {
  if (!output.requires_grad()) return;
  watch_output_node(output.grad_fn().get());
  if (!output.is_view()) return;
  const auto node = output._base().grad_fn();
  if (node != nullptr && node->sequence_nr() >= begin_) watch_output_node(node.get());
}

void Call::watch_output_node(Node* node) {
  if (node == nullptr || inputs_.count(node) > 0) return;
  node->add_pre_hook(std::make_unique<OnEachEntry>([call = shared_from_this()] { call->enter(); }));
}

void Call::enter() {
  if (auto listener = listener_.lock()) listener->call_entered(shared_from_this());
}

void Call::input_reached() {
  if (auto listener = listener_.lock()) listener->call_left(shared_from_this());
}

bool reduced_by_ddp(const at::Tensor& parameter) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (node == nullptr) return false;
  const auto& hooks = node->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return std::strstr(typeid(*hook).name(), "LambdaPostHook") != nullptr;
  });
}

// Lives in a graph task's final callbacks; destroyed with them.
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
  auto end = std::make_shared<TaskEnd>(weak_from_this(), task);
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->run(); });
}

void BackwardWatch::wait_for_other_threads(std::unique_lock<std::mutex>& lock) {
  const std::thread::id me = std::this_thread::get_id();
  const bool mine =
      fewer_.wait_for(lock, kBackwardPatience, [&] { return owner_.value_or(me) == me; });
  TORCH_CHECK(mine, where(rank_), "backward: waited ", kBackwardPatience.count(),
              " minutes for a backward of the same model on another thread. Threads take turns;"
              " that one may be waiting for this thread.");
  owner_ = me;
}

void BackwardWatch::let_other_threads_in() {
  const std::lock_guard lock(mutex_);
  if (!tasks_.empty()) return;
  owner_.reset();
  fewer_.notify_all();
}

void BackwardWatch::task_ended(int task) {
  const auto listener = listener_.lock();
  const bool inner = torch::autograd::get_current_node() != nullptr;
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

void BackwardWatch::look_for_unheard_failure() {
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
  fewer_.notify_all();
}

void BackwardWatch::wait_for_failures() {
  if (unfinished_ == 0 || current_task() != -1) return;
  std::unique_lock lock(mutex_);
  fewer_.wait_for(lock, std::chrono::seconds(1), [this] { return tasks_.empty(); });
}

// The node has what it needs, and hands it on to at least one of the next.
void BackwardWatch::follow_outer_task() {
  for (const auto& edge : torch::autograd::get_current_node()->next_edges()) {
    if (!edge.is_valid()) continue;
    edge.function->add_pre_hook(std::make_unique<OnEntry>([watch = weak_from_this()] {
      if (auto alive = watch.lock()) alive->enter();
    }));
  }
}

bool BackwardWatch::may_hide_gradients(bool parameters_missing) {
  const std::lock_guard lock(mutex_);
  const bool unknown_function = has_unknown_python_function();
  return ever_nested_ || unknown_function || (parameters_missing && !completed_one_);
}

void BackwardWatch::expect_inner_backwards() {
  const std::lock_guard lock(mutex_);
  ever_nested_ = true;
}

bool BackwardWatch::saw_inner_backwards() {
  const std::lock_guard lock(mutex_);
  return ever_nested_;
}

bool BackwardWatch::has_unknown_python_function() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return false;
  bool unknown = false;
  for (Node* node : *nodes) {
    // By its mangled name, because this file links no Python.
    if (std::strcmp(typeid(*node).name(), "N5torch8autograd6PyNodeE") != 0) continue;
    std::string name = node->name();
    if (harmless_functions_.count(name) > 0) continue;
    functions_in_this_backward_.insert(std::move(name));
    unknown = true;
  }
  return unknown;
}

}  // namespace zero_ext
