#include "engine/running_backward.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/errors.h"
#include "core/torch_internals.h"

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

RunningBackward::RunningBackward(EngineParts& parts, Forwards& forwards)
    : lock_(parts.lock),
      last_use_(parts.last_use),
      offloaded_(parts.offloaded),
      comm_(parts.comm),
      nan_records_(parts.nan_records),
      context_(parts.context),
      parameters_(parts.parameters),
      published_(parts.published),
      finished_(parts.finished),
      reductions_(parts.reductions),
      boundary_(parts.boundary),
      phase_(parts.backward_phase),
      gatherer_(parts.gatherer),
      forwards_(forwards) {}

void RunningBackward::listen_as(const std::weak_ptr<BackwardListener>& self) {
  watch_ = std::make_shared<BackwardWatch>(self, context_.global_rank,
                                           /*on_host=*/context_.compute.on_host());
  lock_.set_watch(watch_);
  parameters_.set_listener(self);
  forwards_.set_listener(self);
}

void RunningBackward::retire() {
  const Access access(lock_);
  retired_ = true;
}

// Between backwards

std::vector<int64_t> RunningBackward::before_forward() {
  const bool on_host = context_.compute.on_host();
  // A backward of this forward may run inside the one that runs now.
  if (at::GradMode::is_enabled() && current_task() != -1) watch_->enter();
  const Access access(lock_);
  offloaded_.check_forward();
  if (open()) return {};  // a later verb shards what was unfrozen in between
  std::vector<int64_t> unfrozen = unfrozen_among(parameters_);
  if (!unfrozen.empty()) return unfrozen;
  // Without gradients a model that was cast may be evaluated.
  check_kinds(parameters_, context_, "forward", at::GradMode::is_enabled());
  // A gradient beside the published ones may be of a backward that was not seen. The next backward
  // raises an error for it.
  if (!published_.has_foreign()) parameters_.repair_hooks();
  if (!on_host) parameters_.follow_stream();
  published_.make_missing_views();
  sees_forwards_ = true;
  return {};
}

void RunningBackward::check_none(const Access& /*access*/, const char* verb) const {
  TORCH_CHECK(!open(), where(context_.global_rank), verb,
              " inside a backward. Call it after loss.backward() has returned.");
}

void RunningBackward::check_none_on_this_thread(const Access& access, const char* verb) const {
  check_none(access, verb);
  TORCH_CHECK(!reaches_parameters(), where(context_.global_rank), verb,
              " inside a backward. Call it after loss.backward() has returned.");
}

void RunningBackward::check_usable(const Access& /*access*/, const char* verb) const {
  TORCH_CHECK(not_undone_.empty(), where(context_.global_rank), verb,
              ": an earlier backward threw and could not be undone, so the gradients are unknown."
              " Continue from a checkpoint in a new process. The error was: ",
              not_undone_);
  watch_->check_ended(verb);
  offloaded_.check_none(verb);
}

bool RunningBackward::reaches_parameters() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const ShardedParameter& parameter) { return will_run(parameter.node); });
}

// Hooks

void RunningBackward::reach() {
  if (phase_ != BackwardPhase::none) return;
  phase_ = BackwardPhase::reached;
  gatherer_.begin_backward();
}

void RunningBackward::before_gradient(int64_t i) {
  watch_->enter();  // it may wait for a backward that needs the lock
  const Access access(lock_);
  if (retired_ || !parameters_[i].managed()) return;
  reach();
  if (may_begin()) begin(access, boundary_.reduces());
}

void RunningBackward::after_gradient(int64_t i) {
  const Access access(lock_);
  ShardedParameter& parameter = parameters_[i];
  if (retired_ || !parameter.managed() || published_.keeps_local()) return;
  const at::NoGradGuard no_grad;
  Unit& unit = parameters_.unit(parameter.unit);
  const at::Tensor grad = std::move(parameter.tensor.mutable_grad());
  parameter.tensor.mutable_grad() = at::Tensor();
  if (!open()) reject_gradient(unit, parameter);
  const bool unforeseen = unit.arrivals().reduced() && !hidden_;
  if (unforeseen) watch_->expect_inner_backwards();
  TORCH_CHECK(!unforeseen, where(context_.global_rank, unit.name()), "a gradient of '",
              parameter.name,
              "' arrived after its unit was reduced: this model runs an inner backward (reentrant"
              " checkpointing) that it did not run before. Nothing is lost: repeat this forward and"
              " backward.");
  reductions_.accept(parameter.unit, parameter.slot, grad, scales_.accumulate);
  comm_.make_progress();
  gatherer_.gradient_arrived(forwards_.number_of(parameter.unit), graph_is_kept());
}

void RunningBackward::localize_gradient(int64_t i) {
  at::Tensor distributed;
  PublishedGradients::ToLocal to_local;
  {
    const Access access(lock_);
    if (retired_ || !parameters_[i].managed() || published_.keeps_local()) return;
    distributed = parameters_[i].tensor.grad();
    to_local = published_.to_local();
  }
  if (!distributed.defined()) return;
  // It may wait for the ranks of another dimension, and so holds no lock.
  at::Tensor local = to_local(i, distributed);
  const Access access(lock_);
  parameters_[i].tensor.mutable_grad() = std::move(local);
}

void RunningBackward::reject_gradient(const Unit& unit, const ShardedParameter& parameter) {
  watch_->enter();  // raises where a hook of the parameter caught the error of an inner backward
  TORCH_CHECK(false, where(context_.global_rank, unit.name()),
              "a backward of another thread ended"
              " while this one brought a gradient of '",
              parameter.name,
              "'. Begin a backward after"
              " the other thread's has returned.");
}

void RunningBackward::call_entered(const std::shared_ptr<Call>& call) {
  watch_->enter();
  const Access access(lock_);
  if (retired_) return;
  const int task = current_task();
  for (const OpenCall& open : open_calls_) {
    if (open.call == call && open.task == task) return;
  }
  reach();
  // It must be known which gradients will come before the first unit is left. autograd.grad() over
  // inputs brings none, and begins nothing here.
  if (may_begin() && std::exchange(last_task_, task) != task && reaches_parameters()) {
    begin(access, boundary_.reduces());
  }
  leave_calls_of(task, [&](const Call& open) { return open.is_after(*call); });
  gatherer_.enter_backward(call->site());
  open_calls_.push_back({task, call});
}

void RunningBackward::call_left(const std::shared_ptr<Call>& call) {
  const Access access(lock_);
  leave_calls_of(current_task(), [&](const Call& open) { return &open == call.get(); });
}

void RunningBackward::inner_backward_ended(int task) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  leave_calls_of(task, [](const Call&) { return true; });
}

template <typename Left>
void RunningBackward::leave_calls_of(int task, const Left& left) {
  for (size_t n = open_calls_.size(); n-- > 0;) {
    if (open_calls_[n].task == task && left(*open_calls_[n].call)) leave_call(n);
  }
}

void RunningBackward::leave_call(size_t index) {
  const std::shared_ptr<Call> call = std::move(open_calls_[index].call);
  open_calls_.erase(open_calls_.begin() + static_cast<int64_t>(index));
  gatherer_.leave_backward(call->site(), graph_is_kept());
  if (!open() || !hidden_ || !gatherer_.is_of_its_own(call->site())) return;
  for (const int64_t number : gatherer_.units_of(call->site())) {
    const std::optional<int64_t> u = forwards_.unit_of(number);
    if (!u.has_value()) continue;
    parameters_.unit(*u).arrivals().leave_module();
    reductions_.arrived(*u);
  }
}

void RunningBackward::backward_ended() {
  const Access access(lock_);
  last_task_ = -1;
  open_calls_.clear();
  try {
    const at::NoGradGuard no_grad;
    if (open()) finish(Gradients::own);
    if (std::exchange(phase_, BackwardPhase::none) != BackwardPhase::none) {
      gatherer_.end_backward(graph_is_kept());
    }
  } catch (...) {
    undo();
    throw;
  }
}

void RunningBackward::backward_failed() noexcept {
  try {
    const Access access(lock_, Access::Failures::reported);
    last_task_ = -1;
    open_calls_.clear();
    undo();
  } catch (const std::exception&) {
    // The device is in a lasting error, which its next use raises.
  }
}

// Beginning, end, failure

void RunningBackward::begin(const Access& access, bool reduces) {
  parameters_.check("backward");
  check_usable(access, "backward");
  last_use_.follow();
  published_.make_missing_views();
  std::vector<int64_t> all(parameters_.size());
  std::iota(all.begin(), all.end(), 0);
  published_.adopt_changes(all, "backward");
  if (!published_.has_reduced_gradients()) {
    finished_.clear();
    published_.forget_nones();
  }
  nan_records_.begin_backward(boundary_.micro_batch());
  published_.withdraw();

  reduces_ = reduces;
  ++attempts_;
  if (reduces && !boundary_.reached()) ++reduced_in_no_sync_;
  const GradientPath path = choose_path();
  scales_ = boundary_.scales(path == GradientPath::local);
  begun_units_ = 0;
  try {
    begin_units(path);
    if (path == GradientPath::local) published_.follow_memory();  // which may have grown
  } catch (...) {
    abort();
    throw;
  }
  ++count_;
  if (reduces) reductions_.begin(scales_.reduce, hidden_);
  phase_ = BackwardPhase::open;
}

GradientPath RunningBackward::choose_path() const {
  if (context_.world == 1 && !context_.offloads()) return GradientPath::direct;
  return !reduces_ || boundary_.local_next() ? GradientPath::local : GradientPath::bucket;
}

void RunningBackward::begin_units(GradientPath path) {
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
  for (int64_t u = 0; u < parameters_.unit_count(); ++u) {
    const std::vector<int64_t>& members = parameters_.members(u);
    Unit& unit = parameters_.unit(u);
    ++begun_units_;
    unit.begin_backward(path, reduces_, picked(expected, members));
    if (!hidden_) continue;
    unit.arrivals().await_hidden(picked(trained, members),
                                 gatherer_.sites_of(forwards_.number_of(u)));
  }
}

void RunningBackward::finish(Gradients gradients) {
  // As long as anything can fail, all of it can be undone.
  if (reduces_) reductions_.finish();
  for (const auto& unit : parameters_.units()) unit->flush();
  nan_records_.end_gradients();
  for (const auto& unit : parameters_.units()) {
    unit->end_backward(/*remember=*/hidden_ && gradients == Gradients::own);
  }
  nan_records_.end_backward(/*direct=*/context_.world == 1);
  if (reduces_) reductions_.count_finished();
  last_use_.remember();
  if (gradients == Gradients::own) {
    watch_->note_completed();
    phase_ = BackwardPhase::reached;
    boundary_.end_backward(reduces_);
  } else {
    phase_ = BackwardPhase::none;
    boundary_.end_others_backward();
  }
  if (!boundary_.local_open()) published_.publish();
}

void RunningBackward::take_part_in_others_backward(const Access& access) {
  if (context_.world == 1) return;
  gatherer_.post_sends_for_a_pass();
  try {
    begin_others(access);
    finish_others();
  } catch (...) {
    undo();
    throw;
  }
}

void RunningBackward::take_part_in_others_reduction(const Access& access) {
  try {
    if (!open()) begin_others(access);
    reductions_.start_next();
    if (reductions_.all_started()) finish_others();
  } catch (...) {
    undo();
    throw;
  }
}

void RunningBackward::begin_others(const Access& access) {
  begin(access, /*reduces=*/true);
  changed_before_ = finished_.changed();
}

void RunningBackward::finish_others() {
  finish(Gradients::of_others);
  // Perhaps no rank has run one.
  if (changed_before_ && published_.has_reduced_gradients()) finished_.note_changed_too_early();
}

void RunningBackward::undo() noexcept {
  try {
    // What other ranks gather of this one must not wait for the reductions that are started here.
    gatherer_.begin_serving();
    // Both streams may still write to what is undone here.
    context_.reducing.join();
    context_.gathering.join();
    if (open()) {
      if (comm_.way().queued && reduces_) complete_for_others();
      abort();
    }
    phase_ = BackwardPhase::none;
    gatherer_.reset_after_failure();
    last_use_.remember();
  } catch (const std::exception& error) {
    phase_ = BackwardPhase::none;
    not_undone_ = text_of(error);
  }
}

void RunningBackward::complete_for_others() noexcept {
  try {
    const at::NoGradGuard no_grad;
    reductions_.complete_for_others();
  } catch (const std::exception&) {
    // The error under way says more. The other ranks' watches report that they wait.
  }
}

void RunningBackward::abort() {
  nan_records_.abort_backward();
  reductions_.abort(begun_units_);
  published_.follow_memory();
  threw_ = true;
  if (open()) phase_ = BackwardPhase::reached;
  for (const ShardedParameter& parameter : parameters_) {
    // The failed backward left a gradient there that was not reduced.
    if (parameter.managed()) parameter.tensor.mutable_grad().reset();
  }
  if (!boundary_.local_open()) published_.publish();
}

}  // namespace zero_ext
