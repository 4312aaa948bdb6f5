// What of an Engine happens within a backward: its hooks, its beginning and end, its failure.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/errors.h"
#include "engine/engine.h"

namespace zero_ext {
namespace {

// [members] of [all].
std::vector<uint8_t> picked(const std::vector<uint8_t>& all, const std::vector<int64_t>& members) {
  std::vector<uint8_t> values;
  values.reserve(members.size());
  for (const int64_t i : members) values.push_back(all[i]);
  return values;
}

}  // namespace

void Engine::before_gradient(int64_t i) {
  watch_->enter();  // it may wait for a backward that needs the mutex
  const Access access(*this);
  if (!parameters_[i].managed()) return;
  gatherer_.begin_backward();
  if (!open_) begin_backward(boundary_.reduces());
}

void Engine::after_gradient(int64_t i) {
  const Access access(*this);
  ShardedParameter& parameter = parameters_[i];
  if (!parameter.managed() || !open_) return;
  const at::NoGradGuard no_grad;
  Unit& unit = parameters_.unit(parameter.unit);
  const at::Tensor grad = std::move(parameter.tensor.mutable_grad());
  parameter.tensor.mutable_grad() = at::Tensor();
  const bool unforeseen = unit.arrivals().reduced() && !hidden_;
  if (unforeseen) watch_->expect_inner_backwards();
  TORCH_CHECK(!unforeseen, where(global_rank(), unit.name()), "a gradient of '", parameter.name,
              "' arrived after its unit was"
              " reduced: an inner backward (reentrant checkpointing) that this model did not run "
              "before. Nothing is lost:"
              " repeat this forward and backward.");
  if (reduces_) reductions_.prepare(parameter.unit);
  unit.accumulate(parameter.slot, grad, scales_.accumulate);
  if (reduces_) reductions_.arrived(parameter.unit);
  comm_.make_progress();
  gatherer_.gradient_arrived(gathered_as_[parameter.unit], graph_is_kept());
}

void Engine::call_entered(const std::shared_ptr<Call>& call) {
  watch_->enter();
  const Access access(*this);
  const int task = current_task();
  for (const OpenCall& open : open_calls_) {
    if (open.call == call && open.task == task) return;
  }
  gatherer_.begin_backward();
  // Which gradients will come must be known before the first unit is left. autograd.grad() over
  // inputs brings none, and is no backward of ours.
  if (!open_ && std::exchange(last_task_, task) != task && backward_reaches_us()) {
    begin_backward(boundary_.reduces());
  }
  for (size_t n = open_calls_.size(); n-- > 0;) {
    if (open_calls_[n].task == task && open_calls_[n].call->is_after(*call)) leave_call(n);
  }
  gatherer_.enter_backward(call->site());
  open_calls_.push_back({task, call});
}

void Engine::call_left(const std::shared_ptr<Call>& call) {
  const Access access(*this);
  for (size_t n = open_calls_.size(); n-- > 0;) {
    if (open_calls_[n].call == call && open_calls_[n].task == current_task()) leave_call(n);
  }
}

void Engine::inner_backward_ended(int task) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  for (size_t n = open_calls_.size(); n-- > 0;) {
    if (open_calls_[n].task == task) leave_call(n);
  }
}

void Engine::leave_call(size_t index) {
  const std::shared_ptr<Call> call = std::move(open_calls_[index].call);
  open_calls_.erase(open_calls_.begin() + static_cast<int64_t>(index));
  gatherer_.leave_backward(call->site(), graph_is_kept());
  if (!open_ || !hidden_ || gatherer_.is_root(call->site())) return;
  for (const int64_t number : gatherer_.units_of(call->site())) {
    const auto found = std::find(gathered_as_.begin(), gathered_as_.end(), number);
    if (found == gathered_as_.end()) continue;  // of frozen parameters
    const auto u = found - gathered_as_.begin();
    parameters_.unit(u).arrivals().leave_module();
    if (reduces_) reductions_.arrived(u);
  }
}

bool Engine::backward_reaches_us() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const ShardedParameter& parameter) { return will_run(parameter.node); });
}

void Engine::begin_backward(bool reduces) {
  parameters_.check("backward");
  check_usable("backward");
  follow_last_use();
  std::vector<int64_t> all(parameters_.size());
  std::iota(all.begin(), all.end(), 0);
  published_.take_over(all, "backward");
  if (!has_reduced_sums()) finished_.clear();
  nan_records_.begin_backward(boundary_.micro_batch());
  published_.withdraw();

  reduces_ = reduces;
  zeroed_.clear();
  if (reduces && !boundary_.reached()) ++reduced_in_no_sync_;
  const bool local = !reduces || boundary_.local_next();
  const bool direct = world() == 1 && !context_.offloads();
  const GradientPath path = direct  ? GradientPath::direct
                            : local ? GradientPath::local
                                    : GradientPath::bucket;
  scales_ = boundary_.scales(path == GradientPath::local);
  std::vector<uint8_t> expected(parameters_.size());
  std::vector<uint8_t> trained(parameters_.size());
  bool missing = false;
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].managed()) continue;
    expected[i] = will_run(parameters_[i].node) ? 1 : 0;
    trained[i] = parameters_[i].tensor.requires_grad() ? 1 : 0;
    missing = missing || expected[i] < trained[i];
  }
  hidden_ = watch_->may_hide_gradients(missing);
  begun_units_ = 0;
  try {
    for (int64_t u = 0; u < parameters_.unit_count(); ++u) {
      const std::vector<int64_t>& members = parameters_.members(u);
      Unit& unit = parameters_.unit(u);
      ++begun_units_;
      unit.begin_backward(path, reduces, picked(expected, members));
      if (hidden_) {
        unit.arrivals().await_hidden(picked(trained, members), gatherer_.sites_of(gathered_as_[u]));
      }
    }
    if (path == GradientPath::local) published_.follow_memory();  // which may have grown
  } catch (...) {
    abort_backward();
    throw;
  }
  ++backwards_;
  if (reduces) reductions_.begin(scales_.reduce, hidden_);
  open_ = true;
}

void Engine::finish_backward(Gradients gradients) {
  // As long as anything can fail all of it can be undone.
  if (reduces_) reductions_.finish();
  for (const auto& unit : parameters_.units()) unit->flush();
  nan_records_.end_gradients();
  for (const auto& unit : parameters_.units()) {
    unit->end_backward(/*remember=*/hidden_ && gradients == Gradients::own);
  }
  nan_records_.end_backward(/*direct=*/world() == 1);
  if (reduces_) reductions_.count_finished();
  remember_use();
  open_ = false;
  if (gradients == Gradients::own) {
    boundary_.end_backward(reduces_);
  } else {
    boundary_.end_others_backward();
  }
  if (!boundary_.local_open()) published_.publish();
}

// No parameter was reached on this rank. Others may have reached some, and they wait for this
// rank's answer.
void Engine::take_part_in_others_backward() {
  if (world() == 1) return;
  gatherer_.post_sends_for_a_pass();
  try {
    begin_backward(/*reduces=*/true);
    finish_backward(Gradients::of_others);
  } catch (...) {
    undo_backward();
    throw;
  }
}

void Engine::backward_ended() {
  const Access access(*this);
  last_task_ = -1;
  open_calls_.clear();
  try {
    const at::NoGradGuard no_grad;
    if (open_) finish_backward(Gradients::own);
    gatherer_.end_backward(graph_is_kept());
  } catch (...) {
    undo_backward();
    throw;
  }
}

void Engine::backward_failed() noexcept {
  try {
    const Access access(*this, Access::Failures::are_told);
    last_task_ = -1;
    open_calls_.clear();
    undo_backward();
  } catch (const std::exception&) {
    // The device is in an error that lasts: whatever is asked of it next raises that.
  }
}

void Engine::undo_backward() noexcept {
  try {
    // What is on its way there writes to what is undone here.
    context_.reducing.join();
    context_.gathering.join();
    if (open_) abort_backward();
    gatherer_.reset_after_failure();
    remember_use();
  } catch (const std::exception& error) {
    open_ = false;
    not_undone_ = text_of(error);
  }
}

void Engine::abort_backward() {
  nan_records_.abort_backward();
  reductions_.abort(begun_units_);
  published_.follow_memory();
  threw_ = true;
  open_ = false;
  for (const ShardedParameter& parameter : parameters_) {
    // What the failed backward left there is a gradient that was not reduced.
    if (parameter.managed()) parameter.tensor.mutable_grad().reset();
  }
  if (!boundary_.local_open()) published_.publish();
}

}  // namespace zero_ext
