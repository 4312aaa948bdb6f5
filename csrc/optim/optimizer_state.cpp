#include "optim/optimizer_state.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/range.h"
#include "device/kernel_table.h"

namespace zero_ext {
namespace {

using Segments = std::vector<kernels::UpdateSegment>;

static_assert(kBlockNumel == kernels::kBlockElements);

int64_t round_up_to_blocks(int64_t numel) {
  return (numel + kBlockNumel - 1) / kBlockNumel * kBlockNumel;
}

// Where the slots of a part lie in it.
struct Places {
  int64_t values = 0;  // elements
  int64_t codes = 0;
};

// As in the unit's range, without the slots that are not `held`. Writes to begins[slots].
Places places_in_range(const RankLayout& layout, const std::vector<uint8_t>& held,
                       std::vector<int64_t>* begins) {
  int64_t holes = 0;
  for (int64_t i = 0; i < layout.size(); ++i) {
    const Piece* piece = layout.own_piece(i);
    if (piece == nullptr) continue;
    if (held[i] != 0) {
      (*begins)[i] = piece->range_begin - holes;
    } else {
      holes += piece->numel + piece->gap_numel;
    }
  }
  return {.values = layout.range_numel() - holes};
}

// Slots in blocks begin at whole blocks among the codes, others are values.
Places places_in_blocks(const RankLayout& layout, const std::vector<uint8_t>& held,
                        std::vector<int64_t>* begins) {
  Places places;
  for (int64_t i = 0; i < layout.size(); ++i) {
    const Piece* piece = layout.own_piece(i);
    if (piece == nullptr || held[i] == 0) continue;
    const int64_t numel = piece->numel + piece->gap_numel;
    if (layout.slot(i).in_blocks()) {
      (*begins)[i] = places.codes;
      places.codes += round_up_to_blocks(numel);
    } else {
      (*begins)[i] = places.values;
      places.values += numel;
    }
  }
  return places;
}

// [states] buffers of zeros, or none where they would be empty.
std::vector<FlatBuffer> zeros(const UnitContext& context, const std::vector<at::ScalarType>& dtypes,
                              int64_t numel) {
  std::vector<FlatBuffer> buffers;
  if (numel == 0) return buffers;
  for (const at::ScalarType dtype : dtypes) {
    buffers.push_back(context.state_buffer(Held::optimizer_state, dtype, numel));
    buffers.back().fill_zero();
  }
  return buffers;
}

}  // namespace

OptimizerState::OptimizerState(std::shared_ptr<Engine> engine, int64_t states,
                               kernels::Moments moments)
    : engine_(std::move(engine)),
      states_(states),
      moments_(moments),
      last_backward_(engine_->backward().count()) {}

void OptimizerState::assign(const std::vector<int64_t>& parameters,
                            const std::vector<int64_t>& groups) {
  for (const int64_t i : parameters) allocate_for(i);
  std::map<int64_t, std::vector<int64_t>> slots_of_units;
  for (const int64_t i : parameters) {
    const ShardedParameter& parameter = engine_->parameters()[i];
    if (parameter.unit >= 0) slots_of_units[parameter.unit].push_back(parameter.slot);
  }
  for (const auto& [u, slots] : slots_of_units) allocate_part(u, slots);
  for (const int64_t i : parameters) engine_->steps().add_stepper(i);
  for (const int64_t i : indices_) engine_->steps().remove_stepper(i);
  indices_ = parameters;
  for (size_t k = 0; k < parameters.size(); ++k) group_of_[parameters[k]] = groups.at(k);
}

std::vector<int64_t> OptimizerState::zero_grad(ZeroGrad mode) {
  std::vector<int64_t> unfrozen = engine_->unfrozen();
  if (unfrozen.empty()) engine_->steps().zero_grad(indices_, mode);
  return unfrozen;
}

void OptimizerState::allocate_for(int64_t i) {
  engine_->parameters()[i];  // raises before anything changes
  if (i >= static_cast<int64_t>(group_of_.size())) {
    group_of_.resize(i + 1, -1);
    steps_.resize(i + 1);
    presumed_.resize(i + 1, 0);
    versions_.resize(i + 1, 0);
  }
  if (!steps_[i].defined()) {
    const auto options = at::TensorOptions().device(engine_->context().state.device());
    steps_[i] = at::zeros({}, options.dtype(at::kFloat));
    versions_[i] = steps_[i]._version();
  }
}

void OptimizerState::allocate_part(int64_t u, const std::vector<int64_t>& slots) {
  if (static_cast<int64_t>(buffers_.size()) <= u) buffers_.resize(u + 1);
  UnitStates& states = buffers_[u];
  const RankLayout& layout = engine_->parameters().unit(u).layout();
  states.part_of.resize(layout.size(), -1);
  states.begins.resize(layout.size(), 0);
  std::vector<uint8_t> held(layout.size(), 0);
  for (const int64_t slot : slots) held[slot] = states.part_of[slot] < 0 ? 1 : 0;
  if (std::count(held.begin(), held.end(), 1) == 0) return;
  const UnitContext& context = engine_->context();
  std::vector<int64_t> begins = states.begins;
  StatePart part;
  if (moments_ == kernels::Moments::int8) {
    const Places places = places_in_blocks(layout, held, &begins);
    part.values = zeros(context, {at::kFloat, at::kFloat}, places.values);
    part.codes = zeros(context, {at::kChar, at::kByte}, places.codes);
    part.scales = zeros(context, {at::kFloat, at::kFloat}, places.codes / kBlockNumel);
  } else {
    const auto dtype = moments_ == kernels::Moments::bf16 ? at::kBFloat16 : at::kFloat;
    const Places places = places_in_range(layout, held, &begins);
    part.values = zeros(context, std::vector(states_, dtype), places.values);
  }
  states.parts.push_back(std::move(part));
  states.begins = std::move(begins);
  for (int64_t slot = 0; slot < layout.size(); ++slot) {
    if (held[slot] != 0) states.part_of[slot] = std::ssize(states.parts) - 1;
  }
}

const StatePart& OptimizerState::part_of(int64_t i) const {
  const ShardedParameter& parameter = engine_->parameters()[i];
  const UnitStates& states = buffers_.at(parameter.unit);
  return states.parts.at(states.part_of.at(parameter.slot));
}

bool OptimizerState::in_blocks(int64_t i) const {
  const ShardedParameter& parameter = engine_->parameters()[i];
  return moments_ == kernels::Moments::int8 &&
         engine_->parameters().unit(parameter.unit).layout().slot(parameter.slot).in_blocks();
}

at::Tensor OptimizerState::slice(int64_t k, int64_t i) const {
  const RankLayout& layout = engine_->parameters().trainable_home_of(i).layout();
  const ShardedParameter& parameter = engine_->parameters()[i];
  const StatePart& part = part_of(i);
  const Piece* piece = layout.own_piece(parameter.slot);
  const int64_t begin = buffers_.at(parameter.unit).begins.at(parameter.slot);
  if (in_blocks(i)) {
    if (piece == nullptr) return nothing_of(part.codes, k, k == 0 ? at::kChar : at::kByte);
    return part.codes.at(k).slice(begin, piece->numel);
  }
  if (piece == nullptr) {
    const auto dtype = moments_ == kernels::Moments::bf16 ? at::kBFloat16 : at::kFloat;
    return nothing_of(part.values, k, dtype);
  }
  return part.values.at(k).slice(begin, piece->numel);
}

std::optional<at::Tensor> OptimizerState::scales(int64_t k, int64_t i) const {
  if (!in_blocks(i)) return std::nullopt;
  const RankLayout& layout = engine_->parameters().trainable_home_of(i).layout();
  const ShardedParameter& parameter = engine_->parameters()[i];
  const Piece* piece = layout.own_piece(parameter.slot);
  const std::vector<FlatBuffer>& buffers = part_of(i).scales;
  if (piece == nullptr) return nothing_of(buffers, k, at::kFloat);
  return buffers.at(k).slice(buffers_.at(parameter.unit).begins.at(parameter.slot) / kBlockNumel,
                             round_up_to_blocks(piece->numel) / kBlockNumel);
}

// What a rank shows of a parameter of which it holds nothing.
at::Tensor OptimizerState::nothing_of(const std::vector<FlatBuffer>& buffers, int64_t k,
                                      at::ScalarType dtype) const {
  if (!buffers.empty()) return buffers.at(k).slice(0, 0);
  const auto options = at::TensorOptions().device(engine_->context().state.device());
  return at::empty({0}, options.dtype(dtype));
}

void* OptimizerState::state_data(int64_t k, int64_t i) const {
  const StatePart& part = part_of(i);
  return (in_blocks(i) ? part.codes : part.values).at(k).at(0);
}

template <typename Body>
void OptimizerState::apply(const Body& body, const std::vector<uint8_t>& counted_groups) {
  at::Tensor increment;
  if (counts_on_device()) {
    look_at_steps_in_flight();
    read_written_counts();
    increment = step_increment();  // before anything changes: it needs memory
  } else {
    for (const int64_t i : indices_) {
      presumed_[i] = static_cast<int64_t>(*steps_[i].const_data_ptr<float>());
    }
  }
  const std::vector<uint64_t> histories = histories_in_flight();
  // Parameters of one kind are updated by one call.
  const auto kind_of = [&](int64_t i) {
    const uint64_t history = histories.empty() ? 0 : histories[i];
    return std::tuple(group_of_[i], presumed_[i], history, in_blocks(i), &part_of(i));
  };
  std::vector<int64_t> counted;
  engine_->changes().forget_unused();
  {
    StepUpdate update = engine_->steps().begin_update(indices_);
    while (update.next_unit()) {
      const Range range("update", update.unit().name());
      std::map<decltype(kind_of(0)), std::vector<Run>> kinds;
      for (const Run& run :
           update.runs([&](int64_t a, int64_t b) { return kind_of(a) == kind_of(b); })) {
        kinds[kind_of(update.first_parameter(run))].push_back(run);
      }
      for (const auto& [kind, runs] : kinds) {
        Segments segments;
        for (const Run& run : runs) {
          const int64_t states = buffers_[update.unit_index()].begins[run.first_slot];
          segments.push_back({.begin = run.begin, .states = states, .numel = run.numel});
        }
        const int64_t i = update.first_parameter(runs.front());
        body(update.unit(), segments, i, presumed_[i] + 1);
      }
      for (const int64_t i : update.updated()) {
        if (!counted_groups.empty() && counted_groups.at(group_of_[i]) == 0) continue;
        if (counts_on_device()) {
          counted.push_back(i);
        } else {
          *steps_[i].mutable_data_ptr<float>() += 1;
        }
      }
    }
  }
  if (!counted.empty()) count_on_device(counted, increment);
}

void OptimizerState::look_at_steps_in_flight() {
  while (!in_flight_.empty()) {
    InFlight& oldest = in_flight_.front();
    if (!oldest.verdict->known.query()) {
      if (std::ssize(in_flight_) < kStepsInFlight) return;
      oldest.verdict->wait();
    }
    if (oldest.verdict->was_skipped()) {
      for (const int64_t i : oldest.updated) --presumed_[i];
    }
    in_flight_.pop_front();
  }
}

std::vector<uint64_t> OptimizerState::histories_in_flight() const {
  if (in_flight_.empty()) return {};
  std::vector<uint64_t> histories(steps_.size(), 0);
  for (size_t k = 0; k < in_flight_.size(); ++k) {
    for (const int64_t i : in_flight_[k].updated) histories[i] |= uint64_t{1} << k;
  }
  return histories;
}

void OptimizerState::read_written_counts() {
  std::vector<int64_t> written;
  std::vector<at::Tensor> counts;
  for (const int64_t i : indices_) {
    if (steps_[i]._version() == versions_[i]) continue;
    written.push_back(i);
    counts.push_back(steps_[i]);
  }
  if (written.empty()) return;
  const at::Tensor values = at::stack(counts).cpu();  // one wait for all
  const auto* value = values.const_data_ptr<float>();
  for (const int64_t i : written) {
    presumed_[i] = static_cast<int64_t>(*value++);
    versions_[i] = steps_[i]._version();
    for (InFlight& step : in_flight_) std::erase(step.updated, i);
  }
}

at::Tensor OptimizerState::step_increment() const {
  if (indices_.empty()) return {};
  const at::Tensor one = at::ones({}, steps_[indices_[0]].options());
  return verdict_.on_device == nullptr ? one : one.sub(verdict_.on_device->skip.reshape({}));
}

void OptimizerState::count_on_device(const std::vector<int64_t>& updated,
                                     const at::Tensor& increment) {
  std::vector<at::Tensor> counts;
  for (const int64_t i : updated) counts.push_back(steps_[i]);
  at::_foreach_add_(counts, increment);
  for (const int64_t i : updated) {
    ++presumed_[i];
    versions_[i] = steps_[i]._version();
  }
  if (verdict_.on_device != nullptr) in_flight_.push_back({verdict_.on_device, updated});
}

kernels::OnDevice OptimizerState::on_device(int64_t i) const {
  if (!counts_on_device()) return {};
  const DeviceVerdict& verdict = *verdict_.on_device;
  return {
      .skip = verdict.skip.const_data_ptr<int32_t>(),
      .steps_done = steps_[i].const_data_ptr<float>(),
      .grad_factor = verdict.factor.defined() ? verdict.factor.const_data_ptr<float>() : nullptr};
}

void OptimizerState::apply_adam(const std::vector<AdamGroup>& groups) {
  const KernelTable& table = engine_->context().state;
  apply([&](Unit& unit, const Segments& segments, int64_t i, int64_t step) {
    const AdamGroup& group = groups.at(group_of_[i]);
    const bool in_codes = in_blocks(i);
    const StatePart& part = part_of(i);
    const auto scales = [&](int64_t k) {
      return in_codes ? static_cast<float*>(part.scales.at(k).at(0)) : nullptr;
    };
    const bool in_fp32 = moments_ == kernels::Moments::int8 && !in_codes;
    check(table->adam(
              {.master = unit.parameters().master_data(),
               .param = unit.parameters().stepped(),
               .param_dtype = dtype_of(unit.dtype()),
               .grad = unit.sums().data(),
               .moments = in_fp32 ? kernels::Moments::f32 : moments_,
               .exp_avg = state_data(0, i),
               .exp_avg_sq = state_data(1, i),
               .exp_avg_scale = scales(0),
               .exp_avg_sq_scale = scales(1),
               .max_exp_avg_sq = group.amsgrad ? static_cast<float*>(state_data(2, i)) : nullptr,
               .segments = segments.data(),
               .count = std::ssize(segments),
               .lr = group.lr,
               .beta1 = group.beta1,
               .beta2 = group.beta2,
               .eps = group.eps,
               .weight_decay = group.weight_decay,
               .step = step,
               .grad_scale = verdict_.factor,
               .maximize = group.maximize,
               .decoupled = group.decoupled,
               .changed = changes_of(unit).marks(),
               .on_device = on_device(i)},
              table.launch()),
          "adam");
  });
}

void OptimizerState::apply_sgd(const std::vector<SgdGroup>& groups) {
  const KernelTable& table = engine_->context().state;
  std::vector<uint8_t> counted;
  for (const SgdGroup& group : groups) counted.push_back(group.momentum != 0 ? 1 : 0);
  const auto update = [&](Unit& unit, const Segments& segments, int64_t i, int64_t step) {
    const SgdGroup& group = groups.at(group_of_[i]);
    check(table->sgd({.master = unit.parameters().master_data(),
                      .param = unit.parameters().stepped(),
                      .param_dtype = dtype_of(unit.dtype()),
                      .grad = unit.sums().data(),
                      .momentum_buffer =
                          group.momentum != 0 ? static_cast<float*>(state_data(0, i)) : nullptr,
                      .segments = segments.data(),
                      .count = std::ssize(segments),
                      .lr = group.lr,
                      .momentum = group.momentum,
                      .dampening = group.dampening,
                      .weight_decay = group.weight_decay,
                      .nesterov = group.nesterov,
                      .first = step == 1,
                      .grad_scale = verdict_.factor,
                      .maximize = group.maximize,
                      .changed = changes_of(unit).marks(),
                      .on_device = on_device(i)},
                     table.launch()),
          "sgd");
  };
  apply(update, counted);
}

void OptimizerState::apply_masters() {
  const KernelTable& table = engine_->context().state;
  apply([&](Unit& unit, const Segments& segments, int64_t /*i*/, int64_t /*step*/) {
    auto* const params = static_cast<char*>(unit.parameters().stepped());
    if (params == nullptr) return;
    changes_of(unit).mark_written();
    const kernels::DType dtype = dtype_of(unit.dtype());
    for (const kernels::UpdateSegment& segment : segments) {
      check(table->cast(unit.parameters().master_data() + segment.begin, kernels::DType::f32,
                        params + segment.begin * kernels::element_bytes(dtype), dtype,
                        segment.numel, table.launch()),
            "cast");
    }
  });
}

void OptimizerState::set_offloaded(bool offloaded) {
  const auto set = [&](std::vector<FlatBuffer>& buffers) {
    for (FlatBuffer& buffer : buffers) {
      if (offloaded) {
        buffer.offload(engine_->context().offloaded, kStatesOffloaded);
      } else {
        buffer.reload();
      }
    }
  };
  for (UnitStates& states : buffers_) {
    for (StatePart& part : states.parts) {
      set(part.values);
      set(part.codes);
      set(part.scales);
    }
  }
}

}  // namespace zero_ext
