#include "engine/engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

#include "core/errors.h"
#include "gather/shutdown_handshake.h"

namespace zero_ext {
namespace {

// For the last messages of an engine: more than ranks in the same step are apart, less than what a
// launcher gives ranks that it ends.
constexpr std::chrono::seconds kLastMessages(20);

const Policy& policy_for(int stage) {
  const Policy* policy = find_policy(stage);
  TORCH_CHECK_VALUE(policy != nullptr, "zero_ext has stages 0, 1, 2 and 3, not ", stage,
                    ". Stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the "
                    "parameters as well.");
  return *policy;
}

SlotSpec slot_spec(const std::string& name, const at::Tensor& parameter) {
  // A dense layout is kept as it is (channels_last, transposed), anything else becomes row-major.
  std::vector<int64_t> strides = parameter.strides().vec();
  if (!parameter.is_non_overlapping_and_dense()) {
    int64_t step = 1;
    for (int64_t d = parameter.dim() - 1; d >= 0; --d) {
      strides[d] = step;
      step *= std::max<int64_t>(parameter.size(d), 1);
    }
  }
  return {.name = name,
          .sizes = parameter.sizes().vec(),
          .strides = strides,
          .numel = parameter.numel()};
}

}  // namespace

Engine::Engine(EngineOptions options)
    : options_(std::move(options)),
      comm_(options_.reduce_group.empty() ? Comm(options_.global_ranks)
                                          : Comm({.reduce = options_.reduce_group,
                                                  .gather = options_.gather_group,
                                                  .within_reduce = options_.within_reduce_group,
                                                  .within_gather = options_.within_gather_group,
                                                  .across = options_.across_group},
                                                 options_.device, options_.global_ranks)),
      flags_(options_.device.is_cpu()
                 ? nullptr
                 : std::make_unique<DeviceFlags>(options_.device, comm_.rank())),
      context_{.compute = KernelTable(options_.device),
               .state = KernelTable(options_.offload ? c10::Device(c10::kCPU) : options_.device),
               .pinned = options_.pin_memory,
               .reducing = SideStream(options_.device),
               .gathering = SideStream(options_.device),
               .flags = flags_.get(),
               .rank = comm_.rank(),
               .world = comm_.world(),
               .shards = comm_.shards(),
               .global_rank = comm_.global_rank(),
               .global_ranks = options_.global_ranks,
               .policy = policy_for(options_.stage),
               .reduction = options_.reduction,
               .reduce_dtype = options_.reduce_dtype.value_or(at::kFloat),
               .reduce_in_gradient_dtype = !options_.reduce_dtype.has_value(),
               .memory = std::make_shared<MemoryCounter>(options_.limit_bytes),
               .offloaded = std::make_shared<MemoryCounter>()},
      parameters_(context_),
      published_(parameters_, flags_.get(), context_.global_rank),
      reductions_(comm_, context_, parameters_, finished_),
      agreement_(comm_, context_, parameters_, finished_),
      boundary_({.world = comm_.world(),
                 .sums_locally = policy().reduce == When::at_boundary && !context_.offloads(),
                 .accumulation_steps = options_.accumulation_steps,
                 .divide_factor = options_.divide_factor}),
      gatherer_(comm_, context_, options_.gather) {
  const std::chrono::milliseconds timeout(options_.timeout_ms);
  comm_.connect_local_peers(timeout, options_.shared_host_transport);
  comm_.watch_collectives(timeout);
  context_.spare =
      std::make_shared<SpareMemory>(context_.memory, Held::full, context_.compute_place());
}

std::shared_ptr<Engine> Engine::create(EngineOptions options, void (*destroy)(Engine*)) {
  std::shared_ptr<Engine> engine(new Engine(std::move(options)), destroy);
  engine->watch_ = std::make_shared<BackwardWatch>(engine, engine->global_rank(),
                                                   /*one_thread=*/engine->on_host());
  engine->parameters_.set_listener(engine);
  return engine;
}

void Engine::add_parameters(const std::vector<at::Tensor>& parameters,
                            const std::vector<std::string>& names) {
  const Access access(*this);
  for (size_t i = 0; i < parameters.size(); ++i) {
    published_.add();
    parameters_.add(parameters[i], names[i]);
  }
}

Engine::~Engine() {
  begin_shutdown();
  if (comm_.is_forked()) return;
  try {
    const Access access(*this);
    context_.reducing.join();
    context_.gathering.join();
    // What a backward that threw has begun may never end.
    comm_.finish(threw_ || open_ ? std::chrono::seconds(0) : kLastMessages);
  } catch (const std::exception&) {
    // The device is in an error.
  }
}

void Engine::begin_shutdown() noexcept {
  if (comm_.is_forked()) return;
  try {
    const Access access(*this);
    if (!context_.shards_parameters() || std::exchange(shutdown_begun_, true)) return;
    finish_shutdown_later(comm_, gatherer_.take_outstanding_sends());
  } catch (const std::exception&) {
    // The connections are broken, so that nobody can take anything, or the device is.
  }
}

int64_t Engine::add_unit(const std::vector<int64_t>& members, at::ScalarType dtype, UnitKind kind) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  const bool trainable = kind == UnitKind::trainable;
  std::vector<SlotSpec> specs;
  std::vector<at::Tensor> values;
  std::set<int64_t> unfrozen;
  for (const int64_t i : members) {
    specs.push_back(slot_spec(parameters_[i].name, parameters_[i].tensor));
    values.push_back(parameters_[i].tensor.detach());
    if (parameters_[i].frozen_unit >= 0)
      unfrozen.insert(frozen_gathered_as_[parameters_[i].frozen_unit]);
  }
  gatherer_.hold({unfrozen.begin(), unfrozen.end()});
  const auto& units = trainable ? parameters_.units() : parameters_.frozen_units();
  const auto index = static_cast<int64_t>(units.size());
  TORCH_CHECK(index < kMaxUnits, where(global_rank()), "more than ", kMaxUnits,
              " units. Choose a larger bucket_mb.");
  const std::string name =
      members.size() == 1 ? specs.front().name : specs.front().name + " … " + specs.back().name;
  const bool flagged = trainable && flags_ != nullptr;
  const int64_t first_flag = flagged ? flags_->count() : 0;
  std::unique_ptr<Unit> unit;
  try {
    unit = std::make_unique<Unit>(context_, index, first_flag, name, std::move(specs), values,
                                  dtype, kind, comm_, options_.broadcast);
    if (flagged) flags_->add(members);
  } catch (...) {
    gatherer_.drop({unfrozen.begin(), unfrozen.end()}, Writes::discard);
    throw;
  }
  parameters_.add_unit(std::move(unit), kind, members);
  const int64_t number = gatherer_.add_unit(units.back().get());
  (trainable ? gathered_as_ : frozen_gathered_as_).push_back(number);
  for (const int64_t old : unfrozen) gatherer_.add_to_sites_of(old, number);
  gatherer_.drop({unfrozen.begin(), unfrozen.end()}, Writes::discard);
  return number;
}

void Engine::replace_parameter(int64_t i, const at::Tensor& tensor) {
  const Access access(*this);
  parameters_.replace(i, tensor);
}

void Engine::make_published(int64_t i) {
  const Access access(*this);
  published_.make_view(i);
}

at::Tensor Engine::parameter_slice(int64_t i) {
  const Access access(*this);
  return parameters_.shard_slice(i);
}

// The boundary

void Engine::push_no_sync() {
  const Access access(*this);
  boundary_.push_no_sync();
}

void Engine::pop_no_sync() {
  const Access access(*this);
  boundary_.pop_no_sync();
}

void Engine::set_accumulation_steps(int64_t steps) {
  const Access access(*this);
  boundary_.set_accumulation_steps(steps);
}

void Engine::set_divide_factor(double factor) {
  const Access access(*this);
  TORCH_CHECK_VALUE(factor > 0, "the gradient divide factor must be positive, not ", factor);
  boundary_.set_divide_factor(factor);
}

void Engine::set_loss_scale(double scale) {
  const Access access(*this);
  TORCH_CHECK(!open_, where(global_rank()), "the loss scale cannot change inside a backward.");
  boundary_.set_loss_scale(scale);
}

// Forwards of released modules

int64_t Engine::add_hook_site(HookSite site) {
  const Access access(*this);
  return gatherer_.add_hook_site(std::move(site));
}

std::shared_ptr<Call> Engine::enter_forward(int64_t site,
                                            const std::optional<std::vector<at::Tensor>>& inputs) {
  auto call = inputs ? Call::begin(weak_from_this(), site, *inputs) : nullptr;
  const Access access(*this);
  gatherer_.enter_forward(site);
  return call;
}

void Engine::leave_forward(int64_t site, const std::shared_ptr<Call>& call,
                           const std::vector<at::Tensor>& outputs, bool threw) {
  if (call != nullptr) call->end(outputs);
  const Access access(*this);
  Gatherer::Left left{.backward_may_follow = call != nullptr && !threw};
  for (const int64_t u : gatherer_.units_of(site)) {
    const bool escapes = std::any_of(outputs.begin(), outputs.end(), [&](const at::Tensor& output) {
      return gatherer_.unit(u).parameters().owns_storage_of(output);
    });
    if (escapes) left.escaped.push_back(u);
  }
  gatherer_.leave_forward(site, left);
}

std::vector<int64_t> Engine::all_gathered() const {
  std::vector<int64_t> all(gatherer_.unit_count());
  for (size_t u = 0; u < all.size(); ++u) all[u] = static_cast<int64_t>(u);
  return all;
}

void Engine::unshard() {
  const Access access(*this);
  gatherer_.hold(all_gathered());
}

void Engine::reshard(Writes writes) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  if (releases()) {
    for (int64_t i = 0; i < parameters_.size(); ++i) parameters_.repair_storage(i, writes);
  }
  gatherer_.drop(all_gathered(), writes);
}

bool Engine::releases() const {
  const auto may_release = [this](const std::unique_ptr<Unit>& unit) {
    return context_.casts_masters(unit->dtype());  // a frozen one when it is unfrozen
  };
  const auto any = [&](const std::vector<std::unique_ptr<Unit>>& units) {
    return std::any_of(units.begin(), units.end(), may_release);
  };
  return context_.shards_parameters() || any(parameters_.units()) ||
         any(parameters_.frozen_units());
}

bool Engine::held_by_user() const {
  const Access access(*this);
  for (int64_t u = 0; u < gatherer_.unit_count(); ++u) {
    if (gatherer_.holds(u).user) return true;
  }
  return false;
}

void Engine::wait_for_shards() {
  const Access access(*this);
  gatherer_.wait_for_shards();
}

void Engine::give_parameters_back() {
  const Access access(*this);
  for (int64_t u = 0; u < parameters_.unit_count(); ++u) {
    UnitParameters& unit = parameters_.unit(u).parameters();
    if (!unit.comes_and_goes()) continue;
    gatherer_.hold({gathered_as_[u]});
    unit.drop_master();  // which is twice the memory that the next one needs
  }
}

std::vector<std::string> Engine::gathered_units() const {
  const Access access(*this);
  std::vector<std::string> names;
  for (int64_t u = 0; u < gatherer_.unit_count(); ++u) {
    if (gatherer_.state(u) != Residency::released) names.push_back(gatherer_.unit(u).name());
  }
  return names;
}

void Engine::set_offloaded(const std::set<std::string>& states) {
  const Access access(*this);
  TORCH_CHECK(!open_, where(global_rank()),
              "states cannot be offloaded or reloaded inside a backward.");
  const at::NoGradGuard no_grad;
  const bool none_back =
      std::includes(states.begin(), states.end(), offloaded_.begin(), offloaded_.end());
  offloaded_.insert(states.begin(), states.end());  // where memory runs out half-way, too
  const auto follow = c10::make_scope_exit([this] { published_.follow_memory(); });
  for (const auto* units : {&parameters_.units(), &parameters_.frozen_units()}) {
    for (const auto& unit : *units) {
      if (!none_back) unit->reload();
      unit->offload(states);
    }
  }
  context_.spare->trim();
  offloaded_ = states;
}

std::set<std::string> Engine::offloaded() {
  const Access access(*this);
  return offloaded_;
}

void Engine::check_usable(const char* verb) const {
  TORCH_CHECK(not_undone_.empty(), where(global_rank()), verb,
              ": an earlier backward threw and could not be undone, so that the gradients are"
              " unknown. Go on from a checkpoint in a new process. The error was: ",
              not_undone_);
  TORCH_CHECK(offloaded_.empty(), offloaded_message(verb));
}

void Engine::check_parameters_are_here(const char* verb) const {
  const bool here = offloaded_.count("full") == 0 && offloaded_.count("master") == 0;
  TORCH_CHECK(here, offloaded_message(verb));
}

std::string Engine::offloaded_message(const char* verb) const {
  return c10::str(where(global_rank()), verb, ": ", c10::Join(", ", offloaded_),
                  " of this model are offloaded. Call zero_ext.reload_states() first.");
}

void Engine::before_forward() {
  if (on_host()) watch_->look_for_unheard_failure();  // else it may be another thread's
  const Access access(*this);
  if (open_) return;
  // A gradient beside the published ones may be of a backward that was not seen: the next one
  // refuses it.
  if (!published_.has_foreign()) parameters_.repair_hooks();
  if (!on_host()) parameters_.follow_stream();
  sees_forwards_ = true;
}

void Engine::write_gradient(int64_t i, const at::Tensor& grad) {
  const Access access(*this);
  published_.write(i, grad);
}

void Engine::Access::enter_device(const Engine& engine, Failures failures) {
  device_.reset_device(engine.options_.device);
  if (failures == Failures::are_told) {
    if (engine.backward_stream_.has_value()) stream_.reset_stream(*engine.backward_stream_);
  } else if (current_task() != -1) {
    engine.backward_stream_ = current_stream(engine.options_.device);
  }
}

void Engine::follow_last_use() const {
  if (!last_use_.has_value()) return;
  const c10::Stream stream = current_stream(options_.device);
  if (last_use_->stream() != stream) last_use_->block(stream);
}

void Engine::remember_use() {
  if (!on_host()) last_use_.emplace(current_stream(options_.device));
}

// The step

std::vector<int64_t> Engine::unfrozen() const {
  const Access access(*this);
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].managed() && parameters_[i].tensor.requires_grad()) indices.push_back(i);
  }
  return indices;
}

StepVerdict Engine::prepare_step(const std::vector<int64_t>& indices,
                                 const StepQuestions& questions, int64_t* last_backward) {
  watch_->look_for_unheard_failure();
  const Access access(*this);
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!open_ && !backward_reaches_us(), where(global_rank()),
              "step() inside a backward. Call it after loss.backward() has returned.");
  parameters_.check("step()");
  check_usable("step()");
  TORCH_CHECK(!boundary_.local_open(), where(global_rank()), "step(): ", boundary_.unreduced(),
              " backward(s) inside no_sync() (or before the boundary of accumulation_steps=",
              boundary_.accumulation_steps(),
              ") were never reduced. Run the last backward before a step outside no_sync().");
  if (had_no_backward(indices, *last_backward)) take_part_in_others_backward();
  follow_last_use();
  published_.take_over(indices, "step()");
  gatherer_.begin_step();
  // Nobody's shard changes before all ranks are here: until then they may be gathering from it.
  StepVerdict verdict;
  if (questions.nonfinite || questions.norm() || context_.shards_parameters() ||
      !context_.state.on_host()) {
    verdict = agreement_.ask(Comm::Agreement::step, indices, questions);
    if (verdict.settings_differ) return verdict;
    if (world() > 1 && !reductions_.knows_order()) learn_reduction_order();
  }
  // Not before: what refuses may be mended, and the step repeated.
  *last_backward = stepped_ = backwards_;
  for (const int64_t i : indices) {
    if (parameters_[i].managed()) parameters_.repair_storage(i, Writes::keep);
  }
  if (verdict.nonfinite) gatherer_.wait_for_shards();
  boundary_.end_step();
  finished_.clear();
  if (!on_host() && !sees_forwards_) parameters_.follow_stream();
  return verdict;
}

void Engine::learn_reduction_order() {
  const int64_t units = parameters_.unit_count();
  at::Tensor order = at::full({units + 1}, -1, at::kLong);
  const std::vector<int64_t> completed = reductions_.completed();
  auto* mine = order.mutable_data_ptr<int64_t>();
  std::copy(completed.begin(), completed.end(), mine);
  mine[units] = watch_->saw_inner_backwards() ? 1 : 0;
  // Rank 0's count. Among ranks of one host an error here can be repeated, as after any agreement.
  order = comm_.all_gather(Comm::Agreement::reduction_order, order, [this] {
    return where(global_rank()) + "step() waited for the order of rank " +
           std::to_string(comm_.global_rank(0)) + "'s reductions";
  });
  const auto* first = order.const_data_ptr<int64_t>();
  if (units == 0 || *first < 0) return;  // rank 0 had no gradient in this step
  reductions_.set_order({first, first + units}, first[units] != 0);
}

bool Engine::had_no_backward(const std::vector<int64_t>& indices, int64_t last_backward) const {
  if (backwards_ == last_backward) return true;
  // The last one was for another optimizer's step, unless it reached these as well.
  return backwards_ == stepped_ && std::all_of(indices.begin(), indices.end(), [this](int64_t i) {
           return !parameters_[i].managed() || parameters_.sums_of(i).fresh(parameters_[i].slot);
         });
}

void Engine::settle(StepVerdict& verdict) const {
  if (verdict.on_device == nullptr) return;
  const Access access(*this);
  agreement_.settle(verdict);
}

void Engine::apply_step(const Update& update) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  std::vector<uint8_t> mine(parameters_.size(), 0);
  for (const int64_t i : update.indices) mine[i] = 1;
  Pending gathering;
  const int64_t units = parameters_.unit_count();
  const int64_t step = steps_++;  // also where an update throws: no later one has its messages
  for (int64_t u = units - 1; u >= 0; --u) parameters_.unit(u).parameters().begin_update();
  for (int64_t u = units - 1; u >= 0; --u) {
    Unit& unit = parameters_.unit(u);
    unit.parameters().await_update();
    const std::vector<int64_t>& members = parameters_.members(u);
    const auto used = [&](int64_t slot) {
      return mine[members[slot]] != 0 && !unit.sums().fresh(slot);
    };
    const auto same = [&](int64_t a, int64_t b) { return update.same(members[a], members[b]); };
    for (const Run& run : unit.layout().runs(used, same))
      update.apply(u, unit, run, members[run.first_slot]);
    bool any = false;
    for (int64_t slot = 0; slot < unit.layout().size(); ++slot) {
      if (!used(slot)) continue;
      any = true;
      // An old graph that saved the parameter must not run on its new values unnoticed.
      parameters_[members[slot]].tensor.unsafeGetTensorImpl()->bump_version();
      update.applied(members[slot]);
    }
    if (any) unit.parameters().end_update();
    // After a backward that threw here alone, the other ranks have gradients that this one lacks.
    // On a device nobody knows yet.
    const bool others_changed =
        threw_ && !context_.state.on_host() &&
        std::any_of(members.begin(), members.end(), [&](int64_t i) { return mine[i] != 0; });
    if (policy().gather != When::after_step || !(any || others_changed)) continue;
    unit.parameters().gather(comm_, step * kMaxUnits + u, gathering);
    ++gathers_;
  }
  threw_ = false;
  gathering.wait([this] { return where(global_rank()) + "step() waited for updated parameters"; });
  gatherer_.wait_for_shards();
  remember_use();
}

void Engine::adopt_writes() {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  for (const auto& unit : parameters_.units()) unit->parameters().adopt_writes();
}

at::Tensor Engine::current_master(int64_t i) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!open_, where(global_rank()), "a parameter's state was asked for inside a backward.");
  check_parameters_are_here("a parameter was read");
  const ShardedParameter& parameter = parameters_[i];
  Unit& unit = parameters_.home_of(i);
  // Nothing is written here: other ranks may still be gathering from this one's shard, and what is
  // in full may yet be forgotten.
  const at::Tensor written =
      parameters_.lies_elsewhere(i)
          ? unit.layout().own_part(parameter.slot, parameter.tensor, unit.dtype())
          : unit.parameters().present_slice(parameter.slot);
  return unit.parameters().master_with(parameter.slot, written);
}

void Engine::write_parameter(int64_t i, const at::Tensor& value) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!open_, where(global_rank()), "a parameter was set inside a backward.");
  check_parameters_are_here("a parameter was set");
  const ShardedParameter& parameter = parameters_[i];
  Unit& unit = parameters_.home_of(i);
  gatherer_.wait_for_shards();  // which may have been gathering the old value
  parameters_.repair_storage(i, Writes::discard);
  unit.parameters().adopt(parameter.slot, value);
  if (parameter.managed()) {
    unit.parameters()
        .master_slice(parameter.slot)
        .copy_(unit.layout().own_part(parameter.slot, value, at::kFloat));
  }
  parameter.tensor.unsafeGetTensorImpl()->bump_version();
  gatherer_.wait_for_shards();  // before anybody gathers the new one
}

at::Tensor Engine::clip_gradients(const std::vector<int64_t>& indices, double max_norm,
                                  int64_t last_backward) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!open_ && !boundary_.local_open(), where(global_rank()),
              "the gradients are not complete: the norm was asked for inside a backward or"
              " before the backward that reduces. Ask between the last backward and step().");
  if (had_no_backward(indices, last_backward)) take_part_in_others_backward();
  follow_last_use();
  published_.take_over(indices, "clip_grad_norm_");
  const StepQuestions norm{
      .nonfinite = false, .max_norm = max_norm, .settings = std::bit_cast<int64_t>(max_norm)};
  const StepVerdict verdict = agreement_.ask(Comm::Agreement::clip, indices, norm);
  TORCH_CHECK(!verdict.settings_differ, where(global_rank()), "clip_grad_norm_(): max_norm is ",
              max_norm, " here and something else on another rank. Pass the same on every rank.");
  if (verdict.on_device != nullptr) {
    scale_runs(indices, verdict.on_device->factor);
    return verdict.on_device->norm;
  }
  if (verdict.factor != 1) scale_runs(indices, at::scalar_tensor(verdict.factor, at::kFloat));
  return at::scalar_tensor(verdict.norm, at::kFloat);
}

void Engine::scale_gradients(const std::vector<int64_t>& indices, const at::Tensor& factor) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  scale_runs(indices, factor);
}

void Engine::scale_runs(const std::vector<int64_t>& indices, const at::Tensor& factor) {
  parameters_.for_each_summed_run(
      indices, [&](GradientSums& sums, const Run& run) { sums.range(run).mul_(factor); });
  remember_use();
}

void Engine::zero_grad(const std::vector<int64_t>& indices, ZeroGrad mode) {
  watch_->look_for_unheard_failure();
  const Access access(*this);
  TORCH_CHECK(!open_, where(global_rank()),
              "zero_grad() inside a backward. Call it after loss.backward() has returned.");
  const at::NoGradGuard no_grad;
  if (mode == ZeroGrad::to_zero) {
    if (offloaded_.count("grad") > 0) check_usable("zero_grad()");
    published_.take_over(indices, "zero_grad()");
  }
  for (const int64_t i : indices) {
    ShardedParameter& parameter = parameters_[i];
    if (!parameter.managed()) {
      parameter.tensor.mutable_grad().reset();
      continue;
    }
    GradientSums& sums = parameters_.sums_of(i);
    const bool keep = mode == ZeroGrad::to_zero && !sums.fresh(parameter.slot);
    parameter.tensor.mutable_grad().reset();
    if (keep) {
      published_.forget(i);
    } else {
      published_.clear(i);
      continue;
    }
    sums.zero(parameter.slot);
    if (!boundary_.local_open()) published_.show(i);  // else None until the sums are reduced
  }
  for (const auto& unit : parameters_.units()) unit->sums().drop_idle();
  // Several optimizers zero their own parameters each.
  zeroed_.resize(parameters_.size(), 0);
  for (const int64_t i : indices) zeroed_[i] = 1;
  // A step that is given up (by a GradScaler, say) is over as well. Local sums that nobody steps
  // are given up by zeroing them alone; whether there are any differs between ranks.
  if (zeroed_all(Whose::every)) {
    boundary_.give_up_step();
  } else if (zeroed_all(Whose::stepped)) {
    boundary_.end_step();
  }
  if (!has_reduced_sums()) {
    finished_.clear();
    threw_ = false;
  }
}

bool Engine::zeroed_all(Whose whose) const {
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

void Engine::add_stepper(int64_t i) {
  const std::lock_guard lock(steppers_mutex_);
  if (i >= std::ssize(steppers_)) steppers_.resize(i + 1, 0);
  ++steppers_[i];
}

void Engine::remove_stepper(int64_t i) {
  const std::lock_guard lock(steppers_mutex_);
  --steppers_[i];
}

bool Engine::has_reduced_sums() const {
  return std::any_of(parameters_.units().begin(), parameters_.units().end(),
                     [](const auto& unit) { return unit->sums().has_reduced(); });
}

std::map<std::string, int64_t> Engine::stats() {
  const Access access(*this);
  std::map<std::string, int64_t> stats{{"backwards", backwards_},
                                       {"reductions", reductions_.started()},
                                       {"gathers", gathers_ + gatherer_.gathers()},
                                       {"steps", steps_},
                                       {"units", parameters_.unit_count()},
                                       {"neighbors", comm_.local_peers()},
                                       {"reduced_in_no_sync", reduced_in_no_sync_}};
  for (size_t held = 0; held < kHeldNames.size(); ++held) {
    stats["bytes_" + std::string(kHeldNames[held])] =
        context_.memory->bytes(static_cast<Held>(held));
  }
  stats["bytes_offloaded"] = context_.offloaded->total();
  stats["bytes_held"] = context_.memory->total();
  stats["bytes_peak"] = context_.memory->peak();
  return stats;
}

}  // namespace zero_ext
