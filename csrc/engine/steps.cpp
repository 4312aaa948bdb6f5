#include "engine/steps.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <bit>
#include <string>

#include "core/errors.h"

namespace zero_ext {

void Steps::push_no_sync() {
  const Access access(lock_);
  boundary_.push_no_sync();
}

void Steps::pop_no_sync() {
  const Access access(lock_);
  boundary_.pop_no_sync();
}

void Steps::set_divide_factor(double factor) {
  const Access access(lock_);
  TORCH_CHECK_VALUE(factor > 0, "the gradient divide factor must be positive, not ", factor);
  boundary_.set_divide_factor(factor);
}

void Steps::set_loss_scale(double scale) {
  const Access access(lock_);
  backward_.check_none(access, "setting the loss scale");
  boundary_.set_loss_scale(scale);
}

// Unfreezing

void Steps::meet_for_unfreezing(const std::vector<int64_t>& unfrozen) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  if (unfrozen.empty()) return;
  const std::string& first = parameters_[unfrozen.front()].name;
  TORCH_CHECK(!backward_.is_open(access), where(context_.global_rank), "parameter '", first,
              "' requires a gradient since this backward has begun. Set requires_grad after"
              " loss.backward() has returned.");
  if (context_.world == 1) return;
  const bool unasked =
      reductions_.sees_others() ? reductions_.next_is_unannounced() : finished_.none_since_step();
  if (unasked) backward_.take_part_in_others_backward(access);
  uint64_t names = 0;
  for (const int64_t i : unfrozen) names += c10::get_hash(i, std::string("unfrozen"));
  const Arrival own = agreement_.arrival(boundary_progress(), static_cast<int64_t>(names));
  const auto what = [&] {
    return where(context_.global_rank) + "'" + first +
           "' was frozen when it came in and requires a gradient now. To shard it this rank waited"
           " for the others, which must change requires_grad in the same places";
  };
  const Serving::Met met = serving_.meet(access, Comm::Agreement::unfreezing, own, what);
  if (met.values_differ) rejections_.reject_uneven_unfreezing(unfrozen);
}

// The step

StepVerdict Steps::prepare(const std::vector<int64_t>& indices, const StepQuestions& questions,
                           int64_t* last_backward) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none_on_this_thread(access, "step()");
  parameters_.check("step()");
  backward_.check_usable(access, "step()");
  StepVerdict verdict{.unfrozen = unfrozen_among(parameters_)};
  if (!verdict.unfrozen.empty()) return verdict;
  // No rank's shard changes before all ranks are here: until then they may be gathering from it.
  const bool asks = must_ask(questions);
  const int64_t values = asks || hosts_meet() ? written_values() : 0;
  const bool idle = had_no_backward(indices, *last_backward);
  come_to_step(access, Comm::Agreement::step, asks && serves(questions), idle, values);
  last_use_.follow();
  published_.adopt_changes(indices, "step()");
  gatherer_.begin_step();
  if (asks) {
    StepQuestions asked = questions;
    asked.settings ^= std::bit_cast<int64_t>(boundary_.divide_factor());
    asked.written = published_.written_by_hand(indices);
    if (context_.subset >= 0) {
      asked.of_subset = published_.written_in_subset(indices) ^ written_values(/*of_subset=*/true);
    }
    asked.values = hosts_meet() ? 0 : values;
    asked.averaged_over = boundary_.divide();
    asked.micro_batches = [this] { return boundary_progress(); };
    verdict = agreement_.ask(Comm::Agreement::step, indices, asked,
                             [&] { return serving_.serve(access); });
    if (verdict.settings_differ) return verdict;
    reject_other_meshes("step()", verdict);
    check_complete("step()", verdict);
    if (verdict.subset_differs) rejections_.reject_subset(Comm::Agreement::step);
    if (verdict.values_differ) rejections_.reject_values(Comm::Agreement::step);
    if (verdict.written_differ) rejections_.reject_written(Comm::Agreement::step, indices);
    if (context_.world > 1 && !reductions_.knows_order()) learn_reduction_order(access);
  } else {
    reject_changed_too_early("step()", finished_.changed_too_early() ? context_.global_rank : -1);
    reductions_.note_step_without_messages();
  }
  // Not earlier: the user may mend what raised an error, and repeat the step.
  *last_backward = stepped_ = verdict.backwards = backward_.count();
  for (const int64_t i : indices) {
    if (parameters_[i].managed()) parameters_.repair_storage(i, Writes::keep);
  }
  if (asks) accept_written(parameters_);
  // With offload the hosts alone have met: devices may still be gathering.
  const bool devices_meet = comm_.way().gathers == Gathers::pulled && context_.offloads();
  if (verdict.nonfinite || devices_meet) gatherer_.wait_for_shards();
  boundary_.end_step();
  finished_.end_step();
  comm_.note_backwards(0);
  comm_.forget_collectives();
  published_.accept_written(indices);
  const bool on_host = context_.compute.on_host();
  if (!on_host && !backward_.sees_forwards(access)) parameters_.follow_stream();
  if (questions.foreign) prepare_foreign_update(indices, &verdict);
  return verdict;
}

int64_t Steps::written_values(bool of_subset) {
  if (context_.world == 1) return 0;
  uint64_t sum = 0;
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].is_expert != of_subset) continue;
    note_writes(parameters_, i);
    const int64_t digest = written(parameters_, i);
    if (digest != 0) sum += c10::get_hash(i, digest);
  }
  return static_cast<int64_t>(sum);
}

void Steps::check_complete(const char* verb) const {
  const int64_t steps = boundary_.accumulation_steps();
  const int64_t missing = boundary_.missing();
  TORCH_CHECK(missing == 0, where(context_.global_rank), verb, " after ", steps - missing, " of ",
              steps, " backwards of accumulation_steps=", steps, ". Run ", missing,
              " more first. If the last window is shorter, use no_sync() in place of"
              " accumulation_steps: docs/howto.md#accumulate-gradients.");
  TORCH_CHECK(!boundary_.local_open(), where(context_.global_rank), verb, ": ",
              boundary_.unreduced(),
              " backward(s) inside no_sync() were never reduced. Run the last backward before a"
              " step outside no_sync().");
}

void Steps::learn_reduction_order(const Access& access) {
  const int64_t units = parameters_.unit_count();
  at::Tensor order = at::full({units + 1}, -1, at::kLong);
  const std::vector<int64_t> completed = reductions_.completed();
  auto* mine = order.mutable_data_ptr<int64_t>();
  std::copy(completed.begin(), completed.end(), mine);
  mine[units] = backward_.watch(access).saw_inner_backwards() ? 1 : 0;
  // All take rank 0's order. Among ranks of one host an error here can be repeated, as after any
  // agreement.
  order = comm_.all_gather(Comm::Agreement::reduction_order, order, [this] {
    return where(context_.global_rank) + "step() waited for the order of rank " +
           std::to_string(comm_.global_rank(0)) + "'s reductions";
  });
  const auto* first = order.const_data_ptr<int64_t>();
  if (units == 0 || *first < 0) return;  // rank 0 had no gradient in this step
  reductions_.set_order({first, first + units}, first[units] != 0);
}

void Steps::reject_changed_too_early(const char* verb, int64_t rank) const {
  TORCH_CHECK(
      rank < 0, where(context_.global_rank), verb, " on gradients that rank ", rank,
      " changed, as torch's clip_grad_norm_ does, before later backwards of other ranks. Use"
      " max_grad_norm or optimizer.clip_grad_norm_(), which wait for those. To go on, call"
      " zero_grad(set_to_none=True) on every rank and repeat the step's backwards.");
}

void Steps::reject_other_meshes(const char* verb, const StepVerdict& verdict) const {
  TORCH_CHECK(!verdict.meshes_differ, where(context_.global_rank), verb,
              ": ranks on another dimension of the mesh reject it, or have other settings (lr, "
              "max_grad_norm, …). Nothing was changed here. Mend what their errors say, give every"
              " rank the same settings, and repeat ",
              verb, ".");
}

void Steps::check_complete(const char* verb, const StepVerdict& verdict) const {
  reject_changed_too_early(verb, verdict.changed_too_early);
  if (verdict.incomplete < 0) return;
  check_complete(verb);
  TORCH_CHECK(
      false, where(context_.global_rank), verb, " after backwards of rank ", verdict.incomplete,
      " that were not reduced, or too few of accumulation_steps=", boundary_.accumulation_steps(),
      " on every rank. Run the last backward of a step outside no_sync() on some rank.");
}

MicroBatches Steps::boundary_progress() const {
  if (finished_.changed_too_early()) return MicroBatches::changed_too_early;
  if (boundary_.local_open()) return MicroBatches::unreduced;
  if (boundary_.missing() > 0) return MicroBatches::too_few;
  return boundary_.micro_batch() > 0 ? MicroBatches::complete : MicroBatches::none;
}

bool Steps::must_ask(const StepQuestions& questions) const {
  return questions.nonfinite || questions.norm() || questions.divide_by.has_value() ||
         context_.shards_parameters() || !context_.state.on_host() ||
         (context_.policy.gather == When::after_step && comm_.crosses_hosts());
}

bool Steps::serves(const StepQuestions& questions) const {
  return agreement_.sends(questions) && reductions_.sees_others();
}

void Steps::come_to_step(const Access& access, Comm::Agreement about, bool serves, bool idle,
                         int64_t values) {
  if (hosts_meet()) {
    const Arrival own = agreement_.arrival(boundary_progress(), values);
    const Serving::Met met = serving_.meet(access, about, own);
    check_complete(Comm::name_of(about), StepVerdict{.incomplete = met.incomplete});
    if (met.values_differ) rejections_.reject_values(about);
    return;
  }
  // Where it is not known what other ranks run, all must run the same, except that a rank without a
  // backward takes part in one.
  const bool unasked = serves ? reductions_.next_is_unannounced() : idle;
  if (!serves || unasked || !context_.state.on_host()) check_complete(Comm::name_of(about));
  if (unasked) backward_.take_part_in_others_backward(access);
}

bool Steps::hosts_meet() const { return comm_.way().queued && comm_.way().one_host; }

bool Steps::had_no_backward(const std::vector<int64_t>& indices, int64_t last_backward) const {
  if (backward_.count() == last_backward) return true;
  // The last one was for another optimizer's step, unless it reached these as well.
  return backward_.count() == stepped_ &&
         std::all_of(indices.begin(), indices.end(), [this](int64_t i) {
           return !parameters_[i].managed() || parameters_.sums_of(i).fresh(parameters_[i].slot);
         });
}

void Steps::settle(StepVerdict& verdict) const {
  if (verdict.on_device == nullptr) return;
  const Access access(lock_);
  agreement_.settle(verdict);
}

void Steps::prepare_foreign_update(const std::vector<int64_t>& indices, StepVerdict* verdict) {
  if (verdict->on_device != nullptr) agreement_.settle(*verdict);
  if (verdict->nonfinite) return;
  for (const auto& unit : parameters_.units()) {
    changes_of(*unit).mark_written();
    unit->parameters().adopt_writes();
  }
  scale_gradients(indices, *verdict);
}

// Clipping

at::Tensor Steps::clip(const std::vector<int64_t>& indices, double max_norm,
                       int64_t last_backward) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none(access, "clip_grad_norm_()");
  StepQuestions norm{.nonfinite = false,
                     .max_norm = max_norm,
                     .settings = std::bit_cast<int64_t>(max_norm),
                     .micro_batches = [this] { return boundary_progress(); }};
  come_to_step(access, Comm::Agreement::clip, serves(norm),
               had_no_backward(indices, last_backward));
  last_use_.follow();
  published_.adopt_changes(indices, "clip_grad_norm_");
  norm.written = published_.written_by_hand(indices);
  norm.of_subset = published_.written_in_subset(indices);
  const StepVerdict verdict =
      agreement_.ask(Comm::Agreement::clip, indices, norm, [&] { return serving_.serve(access); });
  TORCH_CHECK(!verdict.settings_differ, where(context_.global_rank),
              "clip_grad_norm_(): max_norm is ", max_norm,
              " here and something else on another rank. Pass the same on every rank.");
  reject_other_meshes("clip_grad_norm_()", verdict);
  check_complete("clip_grad_norm_()", verdict);
  if (verdict.subset_differs) rejections_.reject_subset(Comm::Agreement::clip);
  if (verdict.written_differ) rejections_.reject_written(Comm::Agreement::clip, indices);
  scale_gradients(indices, verdict);
  return verdict.on_device != nullptr ? verdict.on_device->norm
                                      : at::scalar_tensor(verdict.norm, at::kFloat);
}

void Steps::meet_for_clipping(Comm::Agreement about, const std::vector<int64_t>& indices) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  const char* verb = Comm::name_of(about);
  backward_.check_none(access, verb);
  StepQuestions none{.nonfinite = false, .max_norm = std::nullopt, .meets = true};
  none.micro_batches = [this] { return boundary_progress(); };
  come_to_step(access, about, serves(none), had_no_backward(indices, kUnknown));
  last_use_.follow();
  published_.adopt_changes(indices, verb);
  if (comm_.way().queued) return;
  const auto serve = [&] { return serving_.serve(access); };
  check_complete(verb, agreement_.ask(about, indices, none, serve));
}

void Steps::scale_gradients(const std::vector<int64_t>& indices, const StepVerdict& verdict) {
  at::Tensor factor;
  if (verdict.on_device != nullptr) {
    factor = verdict.on_device->factor;
  } else if (verdict.factor != 1) {
    factor = at::scalar_tensor(verdict.factor, at::kFloat);
  }
  if (!factor.defined()) return;
  parameters_.for_each_summed_run(
      indices, [&](GradientSums& sums, const Run& run) { sums.range(run).mul_(factor); });
  last_use_.remember();
}

// Zeroing

void Steps::zero_grad(const std::vector<int64_t>& indices, ZeroGrad mode) {
  const Access access(lock_);
  backward_.check_none(access, "zero_grad()");
  const at::NoGradGuard no_grad;
  if (mode == ZeroGrad::to_zero) {
    if (offloaded_.contain("grad")) backward_.check_usable(access, "zero_grad()");
    published_.adopt_changes(indices, "zero_grad()");
  }
  for (const int64_t i : indices) zero_one(i, mode);
  finished_.forget_changes();
  for (const auto& unit : parameters_.units()) unit->sums().drop_idle();
  // Several optimizers zero their own parameters each.
  if (zeroed_after_ != backward_.attempts()) zeroed_.clear();
  zeroed_after_ = backward_.attempts();
  zeroed_.resize(parameters_.size(), 0);
  for (const int64_t i : indices) zeroed_[i] = 1;
  // A step that is given up (by a GradScaler, say) is over as well. Local sums that nobody steps
  // are given up by zeroing them alone; whether there are any differs between ranks.
  if (zeroed_all(Whose::every)) {
    boundary_.give_up_step();
  } else if (zeroed_all(Whose::stepped)) {
    boundary_.end_step();
  }
  if (!published_.has_reduced_gradients()) {
    finished_.clear();
    finished_.forget_lost();
    comm_.forget_collectives();
    backward_.forget_failure(access);
  }
}

void Steps::zero_one(int64_t i, ZeroGrad mode) {
  ShardedParameter& parameter = parameters_[i];
  if (!parameter.managed()) {
    parameter.tensor.mutable_grad().reset();
    return;
  }
  GradientSums& sums = parameters_.sums_of(i);
  const bool keep = mode == ZeroGrad::to_zero && !sums.fresh(parameter.slot);
  parameter.tensor.mutable_grad().reset();
  if (!keep) {
    published_.clear(i);
    return;
  }
  published_.forget(i);
  sums.zero(parameter.slot);
  if (!boundary_.local_open()) published_.show(i);  // else None until the sums are reduced
}

bool Steps::zeroed_all(Whose whose) const {
  const std::lock_guard lock(steppers_mutex_);
  bool any = false;
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    const bool stepped = i < std::ssize(steppers_) && steppers_[i] > 0;
    if (!parameters_[i].managed() || (whose == Whose::stepped && !stepped)) continue;
    if (zeroed_[i] == 0) return false;
    any = true;
  }
  return any;
}

void Steps::add_stepper(int64_t i) {
  const std::lock_guard lock(steppers_mutex_);
  if (i >= std::ssize(steppers_)) steppers_.resize(i + 1, 0);
  ++steppers_[i];
}

void Steps::remove_stepper(int64_t i) {
  const std::lock_guard lock(steppers_mutex_);
  --steppers_[i];
}

}  // namespace zero_ext
