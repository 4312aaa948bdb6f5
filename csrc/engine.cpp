#include "engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <utility>

#include "check.h"
#include "farewell.h"
#include "launch.h"

namespace zero_ext {
namespace {

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

// Changes with every in-place write by a torch op. A write through a tensor subclass counts on the
// subclass alone, one through its local tensor on that alone.
int64_t version_of(const at::Tensor& view, const at::Tensor& local) {
  return (view.is_inference() ? 0 : view._version()) +
         (local.is_inference() ? 0 : local._version());
}

}  // namespace

Engine::Engine(EngineOptions options)
    : options_(std::move(options)),
      comm_(options_.reduce_group.empty()
                ? Comm()
                : Comm(options_.reduce_group, options_.gather_group, options_.device)),
      flags_(options_.device.is_cpu()
                 ? nullptr
                 : std::make_unique<DeviceFlags>(options_.device, comm_.rank())),
      context_{.compute = Runner(options_.device),
               .state = Runner(options_.offload ? c10::Device(c10::kCPU) : options_.device),
               .pinned = options_.pin_memory,
               .reducing = SideStream(options_.device),
               .gathering = SideStream(options_.device),
               .flags = flags_.get(),
               .rank = comm_.rank(),
               .world = comm_.world(),
               .policy = policy_for(options_.stage),
               .reduction = options_.reduction,
               .reduce_dtype = options_.reduce_dtype.value_or(at::kFloat),
               .reduce_in_gradient_dtype = !options_.reduce_dtype.has_value(),
               .memory = std::make_shared<MemoryCounter>(options_.limit_bytes),
               .offloaded = std::make_shared<MemoryCounter>()},
      pool_(context_.memory,
            {.gradients = context_.compute_place(), .received = context_.state_place()}),
      gatherer_(comm_, context_, options_.gather) {
  const std::chrono::milliseconds timeout(options_.timeout_ms);
  comm_.connect_neighbors(timeout, options_.cross_memory);
  comm_.watch_collectives(timeout);
  context_.spare =
      std::make_shared<SpareMemory>(context_.memory, Held::full, context_.compute_place());
}

std::shared_ptr<Engine> Engine::create(EngineOptions options, void (*destroy)(Engine*)) {
  std::shared_ptr<Engine> engine(new Engine(std::move(options)), destroy);
  engine->watch_ = std::make_shared<BackwardWatch>(engine);
  return engine;
}

void Engine::add_parameters(const std::vector<at::Tensor>& parameters,
                            const std::vector<std::string>& names) {
  const Access access(*this);
  for (size_t i = 0; i < parameters.size(); ++i) {
    // Frozen parameters are hooked as well, so that one which is thawed later is noticed.
    parameters_.push_back({.tensor = parameters[i], .name = names[i]});
    parameters_.back().node =
        hook_parameter(parameters[i], parameter_count() - 1, weak_from_this());
  }
}

Engine::~Engine() {
  say_farewell();
  // A view of our memory left in .grad would break the next backward of a parameter that outlives
  // us.
  for (Parameter& parameter : parameters_) {
    if (parameter.published && parameter.tensor.grad().is_same(parameter.published_view)) {
      parameter.tensor.mutable_grad().reset();
    }
  }
}

void Engine::say_farewell() noexcept {
  if (getpid() != process_) return;  // a forked child's copy: the connections are its parent's
  const Access access(*this);
  if (!context_.shards_parameters() || std::exchange(said_farewell_, true)) return;
  try {
    bid_farewell(comm_, gatherer_.leave_offers());
  } catch (const std::exception&) {
    // The connections are broken: nobody can take anything.
  }
}

int64_t Engine::add_unit(const std::vector<int64_t>& members, at::ScalarType dtype, UnitKind kind) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  const bool trainable = kind == UnitKind::trainable;
  auto& units = trainable ? units_ : frozen_units_;
  std::vector<SlotSpec> specs;
  std::vector<at::Tensor> values;
  std::set<int64_t> thawed;
  for (const int64_t i : members) {
    specs.push_back(slot_spec(parameters_[i].name, parameters_[i].tensor));
    values.push_back(parameters_[i].tensor.detach());
    if (parameters_[i].frozen_unit >= 0)
      thawed.insert(frozen_gathered_as_[parameters_[i].frozen_unit]);
  }
  gatherer_.hold({thawed.begin(), thawed.end()});
  const auto index = static_cast<int64_t>(units.size());
  TORCH_CHECK(index < kMaxUnits, where(rank()), "more than ", kMaxUnits,
              " units. Choose a larger bucket_mb.");
  const std::string name =
      members.size() == 1 ? specs.front().name : specs.front().name + " … " + specs.back().name;
  const bool flagged = trainable && flags_ != nullptr;
  const int64_t first_flag = flagged ? flags_->count() : 0;
  try {
    auto unit = std::make_unique<Unit>(context_, index, first_flag, name, std::move(specs), values,
                                       dtype, kind, comm_, options_.broadcast);
    if (flagged) flags_->add(members);
    units.push_back(std::move(unit));
  } catch (...) {
    gatherer_.drop({thawed.begin(), thawed.end()}, Writes::discard);
    throw;
  }
  const int64_t number = gatherer_.add_unit(units.back().get());
  (trainable ? gathered_as_ : frozen_gathered_as_).push_back(number);
  if (trainable) unit_parameters_.push_back(members);
  for (size_t slot = 0; slot < members.size(); ++slot) {
    Parameter& parameter = parameters_[members[slot]];
    (trainable ? parameter.unit : parameter.frozen_unit) = index;
    parameter.slot = static_cast<int64_t>(slot);
    parameter.tensor.set_data(units.back()->parameters().view(parameter.slot));
    if (parameter.tensor.scalar_type() != values[slot].scalar_type()) {
      parameter.node = hook_parameter(parameter.tensor, members[slot], weak_from_this());
    }
  }
  for (const int64_t old : thawed) gatherer_.add_to_sites_of(old, number);
  gatherer_.drop({thawed.begin(), thawed.end()}, Writes::discard);
  return number;
}

void Engine::replace_parameter(int64_t i, const at::Tensor& tensor) {
  const Access access(*this);
  parameters_[i].tensor = tensor;
  parameters_[i].node = hook_parameter(tensor, i, weak_from_this());
}

void Engine::set_published(int64_t i, const at::Tensor& view, const at::Tensor& local) {
  const Access access(*this);
  parameters_[i].published_view = view;
  parameters_[i].published_local = local;
  parameters_[i].published_version = version_of(view, local);
}

at::Tensor Engine::parameter_slice(int64_t i) {
  const Access access(*this);
  return home_of(i).parameters().shard_slice(parameters_[i].slot);
}

// The boundary

void Engine::push_no_sync() {
  const Access access(*this);
  ++no_sync_depth_;
  // Decided here and not by the backwards inside, of which a rank may run none.
  const bool sums_locally = policy().reduce == When::at_boundary && !context_.offloads();
  if (world() > 1 && sums_locally) set_local_next(true);
}

void Engine::pop_no_sync() {
  const Access access(*this);
  --no_sync_depth_;
}

void Engine::set_accumulation_steps(int64_t steps) {
  const Access access(*this);
  options_.accumulation_steps = steps;
}

void Engine::set_divide_factor(double factor) {
  const Access access(*this);
  TORCH_CHECK_VALUE(factor > 0, "the gradient divide factor must be positive, not ", factor);
  options_.divide_factor = factor;
}

bool Engine::at_boundary() const {
  return no_sync_depth_ == 0 && (since_boundary_ + 1) % options_.accumulation_steps == 0;
}

void Engine::set_loss_scale(double scale) {
  const Access access(*this);
  TORCH_CHECK(!open_, where(rank()), "the loss scale cannot change inside a backward.");
  loss_scale_ = scale;
  if (!local_next_) local_loss_scale_ = scale;
}

void Engine::set_local_next(bool next) {
  local_next_ = next;
  if (!next) local_loss_scale_ = loss_scale_;
}

void Engine::set_scales(Sink sink) {
  const double divide =
      options_.divide_factor > 0 ? options_.divide_factor : static_cast<double>(world());
  const bool local = sink == Sink::local;
  reduce_scale_ = static_cast<float>(1.0 / (divide * (local ? local_loss_scale_ : loss_scale_)));
  accumulate_scale_ = local ? static_cast<float>(local_loss_scale_ / loss_scale_) : reduce_scale_;
}

// One backward

void Engine::before_gradient(int64_t i) {
  const Access access(*this);
  if (!managed(i)) return;
  watch_->enter();
  gatherer_.begin_backward();
  if (!open_) begin_backward(next_backward_reduces());
}

void Engine::call_entered(const std::shared_ptr<Call>& call) {
  const Access access(*this);
  const int task = current_task();
  for (const OpenCall& open : open_calls_) {
    if (open.call == call && open.task == task) return;
  }
  watch_->enter();
  gatherer_.begin_backward();
  // Which gradients will come must be known before the first unit is left. autograd.grad() over
  // inputs brings none, and is no backward of ours.
  if (!open_ && std::exchange(last_task_, task) != task && backward_reaches_us()) {
    begin_backward(next_backward_reduces());
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

void Engine::leave_call(size_t index) {
  const std::shared_ptr<Call> call = std::move(open_calls_[index].call);
  open_calls_.erase(open_calls_.begin() + static_cast<int64_t>(index));
  gatherer_.leave_backward(call->site(), graph_is_kept());
}

// Forwards of released modules

int64_t Engine::add_site(Site site) {
  const Access access(*this);
  return gatherer_.add_site(std::move(site));
}

void Engine::enter_forward(int64_t site) {
  const Access access(*this);
  gatherer_.enter_forward(site);
}

void Engine::leave_forward(int64_t site, const std::vector<at::Tensor>& outputs,
                           bool backward_may_follow) {
  const Access access(*this);
  Gatherer::Left left{.backward_may_follow = backward_may_follow};
  for (const int64_t u : gatherer_.units_of(site)) {
    const bool escapes = std::any_of(outputs.begin(), outputs.end(), [&](const at::Tensor& output) {
      return gatherer_.unit(u).parameters().owns_storage_of(output);
    });
    if (escapes) left.escaped.push_back(u);
  }
  gatherer_.leave_forward(site, left);
}

std::shared_ptr<Call> Engine::begin_call(int64_t site) {
  return std::make_shared<Call>(weak_from_this(), site);
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
    for (int64_t i = 0; i < parameter_count(); ++i) repair_storage(i, writes);
  }
  gatherer_.drop(all_gathered(), writes);
}

bool Engine::releases() const {
  const auto may_release = [this](const std::unique_ptr<Unit>& unit) {
    return context_.casts_masters(unit->dtype());  // a frozen one when it is thawed
  };
  return context_.shards_parameters() || std::any_of(units_.begin(), units_.end(), may_release) ||
         std::any_of(frozen_units_.begin(), frozen_units_.end(), may_release);
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
  for (int64_t u = 0; u < unit_count(); ++u) {
    if (!units_[u]->parameters().comes_and_goes()) continue;
    gatherer_.hold({gathered_as_[u]});
    units_[u]->parameters().drop_master();  // which is twice the memory that the next one needs
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

void Engine::begin_backward(bool reduces) {
  check_parameters("backward");
  check_usable("backward");
  std::vector<int64_t> all(parameters_.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  take_over_grads(all, "backward");
  withdraw();

  reduces_ = reduces;
  if (reduces && !at_boundary()) ++reduced_in_no_sync_;
  const bool local = !reduces || local_next_;
  const bool direct = world() == 1 && !context_.offloads();
  const Sink sink = direct ? Sink::direct : local ? Sink::local : Sink::bucket;
  set_scales(sink);
  if (flags_ != nullptr) flags_->begin_backward();
  bool missing = false;
  for (int64_t u = 0; u < unit_count(); ++u) {
    std::vector<uint8_t> expected;
    for (const int64_t i : unit_parameters_[u]) {
      expected.push_back(will_run(parameters_[i].node) ? 1 : 0);
      missing = missing || (expected.back() == 0 && parameters_[i].tensor.requires_grad());
    }
    units_[u]->begin_backward(sink, reduces, expected);
  }
  deferred_ = watch_->may_hold_surprises(missing);
  ++backwards_;
  if (reduces) ++rounds_;
  turn_ = 0;
  open_ = true;
}

void Engine::set_offloaded(const std::set<std::string>& states) {
  const Access access(*this);
  TORCH_CHECK(!open_, where(rank()), "states cannot be offloaded or reloaded inside a backward.");
  const at::NoGradGuard no_grad;
  const bool none_back =
      std::includes(states.begin(), states.end(), offloaded_.begin(), offloaded_.end());
  offloaded_.insert(states.begin(), states.end());  // where memory runs out half-way, too
  for (const auto* units : {&units_, &frozen_units_}) {
    for (const auto& unit : *units) {
      if (!none_back) unit->unstow();
      unit->stow(states);
    }
  }
  context_.spare->trim();
  offloaded_ = states;
}

std::set<std::string> Engine::offloaded() {
  const Access access(*this);
  return offloaded_;
}

void Engine::check_usable(const char* verb) {
  TORCH_CHECK(offloaded_.empty(), where(rank()), verb, ": ", c10::Join(", ", offloaded_),
              " of this model are offloaded. Call zero_ext.reload_states() first.");
}

void Engine::check_parameters(const char* verb) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (parameter.unit < 0) continue;
    const Unit& unit = *units_[parameter.unit];
    TORCH_CHECK(parameter.tensor.scalar_type() == unit.dtype() &&
                    parameter.tensor.device() == options_.device &&
                    parameter.tensor.numel() == unit.layout().slot(parameter.slot).spec.numel,
                where(rank(), unit.name()), verb, ": parameter '", parameter.name, "' is ",
                parameter.tensor.scalar_type(), " ", parameter.tensor.sizes(), " on ",
                parameter.tensor.device(), ", it was ", unit.dtype(), " ",
                at::IntArrayRef(unit.layout().slot(parameter.slot).spec.sizes), " on ",
                options_.device,
                " when it was sharded. Move or cast the model before sharding it.");
  }
  const std::vector<int64_t> replaced = repair_hooks();
  if (replaced.empty()) return;
  const Parameter& first = parameters_[replaced.front()];
  TORCH_CHECK(false, where(rank(), units_[first.unit]->name()), verb,
              ": autograd replaced the gradient node of ", replaced.size(),
              " parameter(s), the first is '", first.name,
              "', because dtype or device was changed in between; this backward's gradients of "
              "them were not seen. The nodes are hooked again: call zero_grad() and repeat forward "
              "and backward.");
}

void Engine::before_forward() {
  const Access access(*this);
  // A gradient beside the published ones may be of a backward that was not seen: the next one
  // refuses it.
  const bool unseen = std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) {
    return p.unit >= 0 && !p.published && p.tensor.grad().defined();
  });
  if (!open_ && !unseen) repair_hooks();
}

std::vector<int64_t> Engine::repair_hooks() {
  std::vector<int64_t> replaced;
  for (int64_t i = 0; i < parameter_count(); ++i) {
    Parameter& parameter = parameters_[i];
    if (parameter.unit < 0 ||
        torch::autograd::impl::try_get_grad_accumulator(parameter.tensor).get() ==
            parameter.node.get()) {
      continue;
    }
    parameter.node = hook_parameter(parameter.tensor, i, weak_from_this());
    replaced.push_back(i);
  }
  return replaced;
}

void Engine::take_over_grads(const std::vector<int64_t>& indices, const char* verb) {
  for (const int64_t i : indices) {
    Parameter& parameter = parameters_[i];
    if (parameter.unit < 0) continue;
    const at::Tensor& grad = parameter.tensor.grad();
    const int64_t version = version_of(parameter.published_view, parameter.published_local);
    if (parameter.published && version != parameter.published_version) {
      sums_of(parameter).suspect_nonfinite(parameter.slot);
    }
    parameter.published_version = version;
    if (parameter.published && !grad.defined()) {
      clear_gradient(parameter);
    } else if (grad.defined() && !(parameter.published && grad.is_same(parameter.published_view))) {
      TORCH_CHECK(grad.sizes() == parameter.tensor.sizes(),
                  where(rank(), units_[parameter.unit]->name()), verb, ": .grad of parameter '",
                  parameter.name, "' was set to a tensor of shape ", grad.sizes(),
                  ", the parameter has ", parameter.tensor.sizes(), ".");
      write_gradient(parameter, grad);
    }
  }
}

void Engine::write_gradient(int64_t i, const at::Tensor& grad) {
  const Access access(*this);
  write_gradient(parameters_[i], grad);
}

void Engine::write_gradient(Parameter& parameter, const at::Tensor& grad) {
  const at::NoGradGuard no_grad;
  Unit& unit = *units_[parameter.unit];
  if (grad.unsafeGetTensorImpl()->is_python_dispatch()) {
    TORCH_CHECK(local_reader_, "zero_ext: no reader for tensor subclasses is set");
    unit.sums().write(parameter.slot, local_reader_(grad));
  } else {
    unit.sums().write(parameter.slot, unit.layout().own_part(parameter.slot, grad, at::kFloat));
  }
  parameter.tensor.mutable_grad() = parameter.published_view;
  parameter.published = true;
}

void Engine::withdraw() {
  for (Parameter& parameter : parameters_) {
    if (!parameter.published) continue;
    parameter.tensor.mutable_grad().reset();
    parameter.published = false;
  }
}

void Engine::publish() {
  for (Parameter& parameter : parameters_) {
    if (parameter.unit < 0 || sums_of(parameter).fresh(parameter.slot)) continue;
    parameter.tensor.mutable_grad() = parameter.published_view;
    parameter.published = true;
  }
}

void Engine::clear_gradient(Parameter& parameter) {
  sums_of(parameter).clear(parameter.slot);
  if (parameter.published) parameter.tensor.mutable_grad().reset();
  parameter.published = false;
  parameter.nonfinite_micro_batch = -1;
  if (flags_ != nullptr) flags_->clear(units_[parameter.unit]->flag(parameter.slot));
}

void Engine::after_gradient(int64_t i) {
  const Access access(*this);
  if (!managed(i) || !open_) return;
  const at::NoGradGuard no_grad;
  Parameter& parameter = parameters_[i];
  Unit& unit = *units_[parameter.unit];
  const at::Tensor grad = std::move(parameter.tensor.mutable_grad());
  parameter.tensor.mutable_grad() = at::Tensor();
  if (unit.reduced()) watch_->expect_inner_backwards();
  TORCH_CHECK(!unit.reduced(), where(rank(), unit.name()), "a gradient of '", parameter.name,
              "' arrived after its unit was"
              " reduced: an inner backward (reentrant checkpointing) that this model did not run "
              "before. Nothing is lost:"
              " repeat this forward and backward.");
  if (unit.needs_bucket()) lend_bucket(unit);
  const bool finite = unit.accumulate(parameter.slot, grad, accumulate_scale_);
  if (!finite) saw_nonfinite(parameter);
  if (reduces_ && !deferred_) start_ready_reductions();
  comm_.make_progress();
  gatherer_.gradient_arrived(gathered_as_[parameter.unit], graph_is_kept());
}

void Engine::saw_nonfinite(Parameter& parameter) const {
  if (parameter.nonfinite_micro_batch < 0) parameter.nonfinite_micro_batch = micro_batch_;
}

void Engine::lend_bucket(Unit& unit) {
  std::unique_ptr<Bucket> bucket = pool_.try_acquire();
  while (bucket == nullptr && !in_flight_.empty()) {
    finish_oldest_reduction();
    bucket = pool_.try_acquire();
  }
  if (bucket == nullptr) {
    bucket = pool_.acquire_extra();
    ++extra_buckets_;
  }
  unit.lend_bucket(std::move(bucket));
}

void Engine::start_ready_reductions() {
  for (; turn_ < unit_count() && units_[turn_]->complete(); ++turn_) {
    Unit& unit = *units_[turn_];
    if (unit.needs_bucket_to_reduce()) lend_bucket(unit);
    unit.start_reduce(comm_, rounds_);
    in_flight_.push_back(turn_);
    ++reductions_;
  }
}

void Engine::finish_oldest_reduction() {
  Unit& unit = *units_[in_flight_.front()];
  if (std::unique_ptr<Bucket> bucket = unit.finish_reduce(reduce_scale_))
    pool_.give_back(std::move(bucket));
  in_flight_.pop_front();
  // Every rank has sent its part of this one, and is in no earlier backward any more.
  if (!orphans_.empty()) drop_orphans();
}

void Engine::drop_orphans() {
  // A device may still have to run what they began, before the reduction that this stream has
  // waited for.
  const SideStream::Scope beside(context_.reducing);
  for (Unit::Orphan& orphan : orphans_) {
    orphan.pending.abandon();
    orphan.bucket->mark_used();
  }
  orphans_.clear();
}

void Engine::finish_backward() {
  if (reduces_) {
    for (int64_t u = turn_; u < unit_count(); ++u) units_[u]->expect_no_more();
    start_ready_reductions();
    while (!in_flight_.empty()) finish_oldest_reduction();
    context_.reducing.join();
  }
  for (int64_t u = 0; u < unit_count(); ++u) {
    units_[u]->end_backward();
    for (const int64_t slot : units_[u]->nonfinite_arrived())
      saw_nonfinite(parameters_[unit_parameters_[u][slot]]);
  }
  if (flags_ != nullptr && context_.state.on_host()) {
    for (const int64_t k : flags_->take_arrivals())
      saw_nonfinite(parameters_[flags_->parameter_of(k)]);
  } else if (flags_ != nullptr) {
    flags_->end_backward(micro_batch_, /*direct=*/world() == 1);
  }
  open_ = false;
  local_open_ = world() > 1 && !reduces_;
  set_local_next(local_open_);
  if (!local_open_) publish();
  ++micro_batch_;
  since_boundary_ = at_boundary() ? 0 : since_boundary_ + 1;
}

void Engine::backward_ended() {
  const Access access(*this);
  last_task_ = -1;
  open_calls_.clear();
  try {
    const at::NoGradGuard no_grad;
    if (open_) finish_backward();
    gatherer_.end_backward(graph_is_kept());
  } catch (...) {
    if (open_) abort_backward();
    gatherer_.reset_after_failure();
    throw;
  }
}

void Engine::backward_failed() noexcept {
  const Access access(*this, Access::Failures::are_told);
  last_task_ = -1;
  open_calls_.clear();
  if (open_) abort_backward();
  gatherer_.reset_after_failure();
}

void Engine::abort_backward() noexcept {
  if (flags_ != nullptr) flags_->abort_backward();
  context_.reducing.join();
  const size_t orphans_before = orphans_.size();
  for (const auto& unit : units_) {
    if (std::unique_ptr<Bucket> bucket = unit->abort_backward(orphans_)) {
      pool_.give_back(std::move(bucket));
    }
  }
  for (size_t o = orphans_before; o < orphans_.size(); ++o) pool_.forget();
  in_flight_.clear();
  open_ = false;
  for (Parameter& parameter : parameters_) {
    if (parameter.nonfinite_micro_batch == micro_batch_) parameter.nonfinite_micro_batch = -1;
    // What the failed backward left there is a gradient that was not reduced.
    if (parameter.unit >= 0) parameter.tensor.mutable_grad().reset();
  }
  if (!local_open_) publish();
}

// The step

std::vector<int64_t> Engine::thawed() const {
  const Access access(*this);
  std::vector<int64_t> indices;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].unit < 0 && parameters_[i].tensor.requires_grad())
      indices.push_back(static_cast<int64_t>(i));
  }
  return indices;
}

StepVerdict Engine::prepare_step(const std::vector<int64_t>& indices,
                                 const StepQuestions& questions, int64_t* last_backward) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!open_ && !backward_reaches_us(), where(rank()),
              "step() inside a backward. Call it after loss.backward() has returned.");
  check_parameters("step()");
  check_usable("step()");
  TORCH_CHECK(!local_open_, where(rank()), "step(): ", micro_batch_,
              " backward(s) inside no_sync() (or before the boundary of"
              " accumulation_steps=",
              options_.accumulation_steps,
              ") were never reduced. Run the last backward before a step"
              " outside no_sync().");
  if (world() > 1 && backwards_ == *last_backward) {
    // No parameter was reached on this rank. Others may have reached some, and they wait for this
    // rank's answer.
    gatherer_.offer_a_pass();
    begin_backward(/*reduces=*/true);
    finish_backward();
  }
  *last_backward = backwards_;
  take_over_grads(indices, "step()");
  gatherer_.begin_step();
  // Nobody's shard changes before all ranks are here: until then they may be gathering from it.
  StepVerdict verdict;
  if (!context_.state.on_host()) {
    verdict = agree_on_device(indices, questions, "step()");
  } else if (questions.nonfinite || questions.norm() || context_.shards_parameters()) {
    verdict = agree_on_gradients(indices, questions, "step()");
  }
  for (const int64_t i : indices) {
    if (managed(i)) repair_storage(i, Writes::keep);
  }
  if (verdict.nonfinite) gatherer_.wait_for_shards();
  micro_batch_ = 0;
  since_boundary_ = 0;
  return verdict;
}

bool Engine::backward_reaches_us() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const Parameter& parameter) { return will_run(parameter.node); });
}

bool Engine::lies_elsewhere(int64_t i) const {
  const Parameter& parameter = parameters_[i];
  if ((!managed(i) && parameter.frozen_unit < 0) || parameter.tensor.numel() == 0) return false;
  const Unit& unit = home_of(i);
  const Slot& slot = unit.layout().slot(parameter.slot);
  // Another size or dtype is refused by name, by the next backward or step.
  if (parameter.tensor.numel() != slot.spec.numel ||
      parameter.tensor.scalar_type() != unit.dtype()) {
    return false;
  }
  return !unit.parameters().owns_storage_of(parameter.tensor) ||
         parameter.tensor.storage_offset() != slot.offset ||
         parameter.tensor.strides() != at::IntArrayRef(slot.spec.strides) ||
         parameter.tensor.sizes() != at::IntArrayRef(slot.spec.sizes);
}

void Engine::repair_storage(int64_t i, Writes writes) {
  if (!lies_elsewhere(i)) return;
  Parameter& parameter = parameters_[i];
  Unit& unit = home_of(i);
  if (writes == Writes::keep) {
    unit.parameters().adopt(parameter.slot, parameter.tensor.detach());
  }
  parameter.tensor.set_data(unit.parameters().view(parameter.slot));
}

StepVerdict Engine::agree_on_gradients(const std::vector<int64_t>& indices,
                                       const StepQuestions& questions, const char* verb) {
  int64_t first = sighting::kNone;
  int64_t finite = 1;
  for (const int64_t i : indices) {
    const Parameter& parameter = parameters_[i];
    if (parameter.unit < 0 || !questions.nonfinite) continue;
    const bool now = sums_of(parameter).still_nonfinite(parameter.slot);
    if (now) finite = 0;
    if (!now && parameter.nonfinite_micro_batch < 0) continue;
    const int64_t micro_batch = parameter.nonfinite_micro_batch < 0
                                    ? sighting::kUnknownMicroBatch
                                    : parameter.nonfinite_micro_batch;
    first = std::min(first, sighting::of(micro_batch, rank(), i));
  }
  // One message for both questions; a second one would cost more than the norm.
  kernels::SquareSum sum{};
  if (questions.norm()) add_own_squares(indices, &sum);
  const int64_t length = 2 + (questions.norm() ? kernels::kSquareSumLength : 0);
  at::Tensor values = at::empty({length}, at::TensorOptions().dtype(at::kLong));
  auto* value = values.mutable_data_ptr<int64_t>();
  value[0] = finite;
  value[1] = first;
  std::copy_n(sum.begin(), length - 2, value + 2);
  const at::Tensor all = comm_.all_gather(
      values, [&] { return where(rank()) + verb + " waited for the other ranks' " + verb; });
  if (policy().optimizer == Sharding::sharded) sum = {};
  for (int64_t r = 0; r < world(); ++r) {
    const int64_t* answer = all.const_data_ptr<int64_t>() + r * length;
    finite = std::min(finite, answer[0]);
    first = std::min(first, answer[1]);
    if (policy().optimizer == Sharding::replicated) continue;
    for (int64_t k = 2; k < length; ++k) sum[k - 2] += answer[k];
  }
  StepVerdict verdict{.nonfinite = finite == 0};
  if (questions.norm())
    verdict.factor = kernels::clipping_factor(sum, *questions.max_norm, &verdict.norm);
  if (verdict.nonfinite && first != sighting::kNone) describe(first, verdict);
  return verdict;
}

void Engine::describe(int64_t first, StepVerdict& verdict) const {
  verdict.rank = sighting::rank(first);
  verdict.parameter = parameters_[sighting::parameter(first)].name;
  const int64_t micro_batch = sighting::micro_batch(first);
  verdict.micro_batch = micro_batch == sighting::kUnknownMicroBatch ? -1 : micro_batch;
}

StepVerdict Engine::agree_on_device(const std::vector<int64_t>& indices,
                                    const StepQuestions& questions, const char* verb) {
  const auto options = at::TensorOptions().device(options_.device);
  std::vector<int64_t> flags;
  for (const int64_t i : indices) {
    if (managed(i) && questions.nonfinite)
      flags.push_back(units_[parameters_[i].unit]->flag(parameters_[i].slot));
  }
  if (questions.nonfinite) search_suspects(indices);
  at::Tensor squares =
      at::zeros({questions.norm() ? kernels::kSquareSumLength : 0}, options.dtype(at::kLong));
  if (questions.norm()) {
    add_own_squares(indices,
                    reinterpret_cast<kernels::SquareSum*>(squares.mutable_data_ptr<int64_t>()));
  }
  at::Tensor all = at::cat({flags_->verdict(flags), squares}).unsqueeze(0);
  const bool replicated = policy().optimizer == Sharding::replicated;
  if (world() > 1 && !(replicated && !questions.nonfinite)) {  // else a rank may ask alone
    all = comm_.all_gather(
        all[0], [&] { return where(rank()) + verb + " waited for the other ranks' " + verb; });
  }
  auto verdict = std::make_shared<DeviceVerdict>();
  verdict->skip = all.select(1, 0).min().eq(0).to(at::kInt).reshape({1});
  const at::Tensor first = all.select(1, 1).min().reshape({1});
  if (questions.norm()) {
    squares = replicated ? squares : all.slice(1, 2).sum(0).contiguous();
    verdict->norm = at::empty({}, options.dtype(at::kFloat));
    verdict->factor = at::empty({1}, options.dtype(at::kFloat));
    check(context_.state->clip_factor(
              reinterpret_cast<const kernels::SquareSum*>(squares.const_data_ptr<int64_t>()),
              *questions.max_norm, verdict->norm.mutable_data_ptr<float>(),
              verdict->factor.mutable_data_ptr<float>(), context_.state.launch()),
          "clip_factor");
  }
  const at::Tensor told = at::where(verdict->skip.ne(0), first, at::Scalar(sighting::kNone));
  verdict->sighting = at::empty({1}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  verdict->sighting.copy_(told, /*non_blocking=*/true);
  verdict->told = c10::Event(options_.device.type());
  verdict->told.record(current_stream(options_.device));
  return {.on_device = std::move(verdict)};
}

void Engine::search_suspects(const std::vector<int64_t>& indices) {
  std::vector<int64_t> suspects;
  int64_t scratch_bytes = 0;
  for (const int64_t i : indices) {
    if (!managed(i) || !sums_of(parameters_[i]).suspected(parameters_[i].slot)) continue;
    suspects.push_back(i);
    scratch_bytes = std::max(scratch_bytes,
                             kernels::sum_of_squares_scratch_bytes(parameters_[i].tensor.numel()));
  }
  if (suspects.empty()) return;
  const auto options = at::TensorOptions().device(options_.device);
  const at::Tensor scratch = at::empty({scratch_bytes}, options.dtype(at::kByte));
  const at::Tensor squares =
      at::zeros({static_cast<int64_t>(suspects.size())}, options.dtype(at::kDouble));
  auto* result = squares.mutable_data_ptr<double>();
  std::vector<int64_t> flags;
  for (const int64_t i : suspects) {
    Unit& unit = *units_[parameters_[i].unit];
    unit.sums().sum_squares_of(parameters_[i].slot, result++, scratch);
    unit.sums().forget_suspicion(parameters_[i].slot);
    flags.push_back(unit.flag(parameters_[i].slot));
  }
  flags_->replace_sums(flags, squares);
}

bool Engine::is_settled(const StepVerdict& verdict) {
  return verdict.on_device == nullptr || verdict.on_device->told.query();
}

void Engine::settle(StepVerdict& verdict) const {
  if (verdict.on_device == nullptr) return;
  const Access access(*this);
  if (!is_settled(verdict)) verdict.on_device->told.synchronize();
  const int64_t first = *verdict.on_device->sighting.const_data_ptr<int64_t>();
  verdict.nonfinite = first != sighting::kNone;
  if (verdict.nonfinite) describe(first, verdict);
}

void Engine::apply_step(const Update& update) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  std::vector<uint8_t> mine(parameters_.size(), 0);
  for (const int64_t i : update.indices) mine[i] = 1;
  Pending gathering;
  for (int64_t u = unit_count() - 1; u >= 0; --u) units_[u]->parameters().begin_update();
  for (int64_t u = unit_count() - 1; u >= 0; --u) {
    Unit& unit = *units_[u];
    unit.parameters().await_update();
    const std::vector<int64_t>& members = unit_parameters_[u];
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
    if (!any || policy().gather != When::after_step) continue;
    unit.parameters().gather(comm_, steps_ * kMaxUnits + u, gathering);
    ++gathers_;
  }
  ++steps_;
  gathering.wait([this] { return where(rank()) + "step() waited for updated parameters"; });
  gatherer_.wait_for_shards();
}

void Engine::adopt_writes() {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  for (const auto& unit : units_) unit->parameters().adopt_writes();
}

at::Tensor Engine::current_master(int64_t i) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!open_, where(rank()), "a parameter's state was asked for inside a backward.");
  const Parameter& parameter = parameters_[i];
  Unit& unit = home_of(i);
  // Nothing is written here: other ranks may still be gathering from this one's shard, and what is
  // in full may yet be forgotten.
  const at::Tensor written =
      lies_elsewhere(i) ? unit.layout().own_part(parameter.slot, parameter.tensor, unit.dtype())
                        : unit.parameters().present_slice(parameter.slot);
  return unit.parameters().master_with(parameter.slot, written);
}

void Engine::write_parameter(int64_t i, const at::Tensor& value) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!open_, where(rank()), "a parameter was set inside a backward.");
  const Parameter& parameter = parameters_[i];
  Unit& unit = home_of(i);
  gatherer_.wait_for_shards();  // which may have been gathering the old value
  repair_storage(i, Writes::discard);
  unit.parameters().adopt(parameter.slot, value);
  if (managed(i)) {
    unit.parameters()
        .master_slice(parameter.slot)
        .copy_(unit.layout().own_part(parameter.slot, value, at::kFloat));
  }
  parameter.tensor.unsafeGetTensorImpl()->bump_version();
  gatherer_.wait_for_shards();  // before anybody gathers the new one
}

void Engine::add_own_squares(const std::vector<int64_t>& indices, kernels::SquareSum* sum) const {
  for (const int64_t i : indices) {
    const Parameter& parameter = parameters_[i];
    if (parameter.unit < 0 || sums_of(parameter).fresh(parameter.slot)) continue;
    sums_of(parameter).add_squares(parameter.slot, sum);
  }
}

at::Tensor Engine::clip_gradients(const std::vector<int64_t>& indices, double max_norm) {
  const Access access(*this);
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!open_ && !local_open_, where(rank()),
              "the gradients are not complete: the norm was asked for inside a backward or"
              " before the backward that reduces. Ask between the last backward and step().");
  take_over_grads(indices, "clip_grad_norm_");
  const StepQuestions norm{.nonfinite = false, .max_norm = max_norm};
  if (!context_.state.on_host()) {
    const StepVerdict verdict = agree_on_device(indices, norm, "clip_grad_norm_()");
    scale_runs(indices, verdict.on_device->factor);
    return verdict.on_device->norm;
  }
  StepVerdict verdict;
  if (policy().optimizer == Sharding::replicated) {  // a rank may ask alone
    kernels::SquareSum own{};
    add_own_squares(indices, &own);
    verdict.factor = kernels::clipping_factor(own, max_norm, &verdict.norm);
  } else {
    verdict = agree_on_gradients(indices, norm, "clip_grad_norm_()");
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
  std::vector<uint8_t> mine(parameters_.size(), 0);
  for (const int64_t i : indices) mine[i] = 1;
  for (int64_t u = 0; u < unit_count(); ++u) {
    Unit& unit = *units_[u];
    const auto used = [&](int64_t slot) {
      return mine[unit_parameters_[u][slot]] != 0 && !unit.sums().fresh(slot);
    };
    for (const Run& run : unit.layout().runs(used, [](int64_t, int64_t) { return true; })) {
      unit.sums().range(run).mul_(factor);
    }
  }
}

void Engine::zero_grad(const std::vector<int64_t>& indices, ZeroGrad mode) {
  const Access access(*this);
  TORCH_CHECK(!open_, where(rank()),
              "zero_grad() inside a backward. Call it after loss.backward() has returned.");
  const at::NoGradGuard no_grad;
  if (mode == ZeroGrad::to_zero) {
    if (offloaded_.count("grad") > 0) check_usable("zero_grad()");
    take_over_grads(indices, "zero_grad()");
  }
  for (const int64_t i : indices) {
    Parameter& parameter = parameters_[i];
    if (parameter.unit < 0) {
      parameter.tensor.mutable_grad().reset();
      continue;
    }
    const bool keep = mode == ZeroGrad::to_zero && !sums_of(parameter).fresh(parameter.slot);
    clear_gradient(parameter);
    parameter.tensor.mutable_grad().reset();
    if (!keep) continue;
    sums_of(parameter).zero(parameter.slot);
    if (local_open_) continue;  // .grad is None until the sums are reduced
    parameter.tensor.mutable_grad() = parameter.published_view;
    parameter.published = true;
  }
  for (const auto& unit : units_) unit->sums().drop_idle();
  // A step that is given up (by a GradScaler, say) is over as well.
  const auto is_managed = [&](int64_t i) { return managed(i); };
  const int64_t zeroed = std::count_if(indices.begin(), indices.end(), is_managed);
  const int64_t all = std::count_if(parameters_.begin(), parameters_.end(),
                                    [](const Parameter& p) { return p.unit >= 0; });
  if (mode == ZeroGrad::to_none && zeroed == all) {
    micro_batch_ = 0;
    since_boundary_ = 0;
    local_open_ = false;
    set_local_next(no_sync_depth_ > 0 && local_next_);
  }
}

std::map<std::string, int64_t> Engine::stats() {
  const Access access(*this);
  std::map<std::string, int64_t> stats{{"backwards", backwards_},
                                       {"reductions", reductions_},
                                       {"gathers", gathers_ + gatherer_.gathers()},
                                       {"steps", steps_},
                                       {"units", unit_count()},
                                       {"neighbors", comm_.neighbors()},
                                       {"reduced_in_no_sync", reduced_in_no_sync_},
                                       {"extra_buckets", extra_buckets_}};
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
