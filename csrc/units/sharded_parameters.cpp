#include "units/sharded_parameters.h"

#include <utility>

#include "core/errors.h"
#include "core/torch_internals.h"
#include "device/streams.h"

namespace zero_ext {

void ShardedParameters::add(const at::Tensor& tensor, std::string name) {
  all_.push_back({.tensor = tensor, .local = tensor, .name = std::move(name)});
  // Frozen parameters are hooked as well, so that one which is unfrozen later is noticed.
  all_.back().node = hook(size() - 1);
}

void ShardedParameters::replace(int64_t i, const at::Tensor& tensor) {
  all_.at(i).tensor = all_.at(i).local = tensor;
  all_[i].node = hook(i);
}

int64_t ShardedParameters::add_unit(std::unique_ptr<Unit> unit, UnitKind kind,
                                    const std::vector<int64_t>& members) {
  const bool trainable = kind != UnitKind::frozen;
  auto& units = trainable ? units_ : frozen_units_;
  const auto number = static_cast<int64_t>(units.size());
  units.push_back(std::move(unit));
  if (trainable) members_.push_back(members);
  for (size_t slot = 0; slot < members.size(); ++slot) {
    ShardedParameter& parameter = all_[members[slot]];
    if (parameter.frozen_unit >= 0) {
      written_of(home_of(members[slot]).parameters()).watch(parameter.slot, {}, {});
    }
    (trainable ? parameter.unit : parameter.frozen_unit) = number;
    parameter.slot = static_cast<int64_t>(slot);
    parameter.local.set_data(units.back()->parameters().view(parameter.slot));
    if (context_.world > 1) {
      written_of(units.back()->parameters())
          .watch(parameter.slot, parameter.tensor, parameter.local);
    }
    // A new node for another dtype, which a parameter in no unit may have got earlier.
    if (!is_node_of(parameter.node, parameter.tensor)) parameter.node = hook(members[slot]);
  }
  return number;
}

Unit& ShardedParameters::home_of(int64_t i) const {
  const ShardedParameter& parameter = all_.at(i);
  TORCH_CHECK_VALUE(parameter.has_home(), where(context_.global_rank), "parameter '",
                    parameter.name,
                    "' is frozen and in no unit: it has no part of its own on each rank. Read the"
                    " parameter itself.");
  return parameter.managed() ? *units_[parameter.unit] : *frozen_units_[parameter.frozen_unit];
}

Unit& ShardedParameters::trainable_home_of(int64_t i) const {
  const ShardedParameter& parameter = all_.at(i);
  TORCH_CHECK_VALUE(parameter.managed(), where(context_.global_rank), "parameter '", parameter.name,
                    "' is frozen: it has no gradient. Set requires_grad and repeat the backward.");
  return *units_[parameter.unit];
}

void ShardedParameters::for_each_summed_run(
    const std::vector<int64_t>& indices,
    const std::function<void(GradientSums&, const Run&)>& apply) const {
  std::vector<uint8_t> mine(all_.size(), 0);
  for (const int64_t i : indices) mine.at(i) = 1;
  for (int64_t u = 0; u < unit_count(); ++u) {
    GradientSums& sums = units_[u]->sums();
    const auto used = [&](int64_t slot) {
      return mine[members_[u][slot]] != 0 && !sums.fresh(slot);
    };
    const auto same = [](int64_t, int64_t) { return true; };
    for (const Run& run : units_[u]->layout().runs(used, same)) apply(sums, run);
  }
}

std::vector<int64_t> unfrozen_among(const ShardedParameters& parameters) {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < parameters.size(); ++i) {
    const ShardedParameter& parameter = parameters[i];
    if (!parameter.managed() && parameter.tensor.requires_grad()) indices.push_back(i);
  }
  return indices;
}

void note_writes(ShardedParameters& parameters, int64_t i) {
  const ShardedParameter& parameter = parameters[i];
  if (!parameter.has_home()) return;
  written_of(parameters.home_of(i).parameters()).note(parameter.slot, parameters.lies_elsewhere(i));
}

int64_t written(const ShardedParameters& parameters, int64_t i) {
  const ShardedParameter& parameter = parameters[i];
  if (!parameter.has_home()) return 0;
  return written_of(parameters.home_of(i).parameters()).digest(parameter.slot);
}

void accept_written(ShardedParameters& parameters) {
  for (const auto* units : {&parameters.units(), &parameters.frozen_units()}) {
    for (const auto& unit : *units) written_of(unit->parameters()).accept_written();
  }
}

void check_kinds(const ShardedParameters& parameters, const UnitContext& context, const char* verb,
                 bool trains) {
  const c10::Device device = context.compute.device();
  for (const ShardedParameter& parameter : parameters) {
    if (!parameter.managed()) continue;
    const Unit& unit = parameters.unit(parameter.unit);
    const SlotSpec& spec = unit.layout().slot(parameter.slot).spec;
    TORCH_CHECK(parameter.local.numel() == spec.numel, where(context.global_rank, unit.name()),
                verb, ": parameter '", parameter.name, "' was resized to ", parameter.local.sizes(),
                ", it was ", at::IntArrayRef(spec.sizes),
                " when it was sharded. Resize it before sharding.");
    if (!trains) continue;
    TORCH_CHECK(!reduced_by_ddp(parameter.node, /*own_hooks=*/1), where(context.global_rank), verb,
                ": DistributedDataParallel (or replicate) was put around parameters that are"
                " sharded, among them '",
                parameter.name,
                "'. Use the module without it: its backward reduces the gradients.");
    TORCH_CHECK(
        parameter.tensor.scalar_type() == unit.dtype() && parameter.tensor.device() == device,
        where(context.global_rank, unit.name()), verb, ": parameter '", parameter.name, "' is ",
        parameter.tensor.scalar_type(), " ", parameter.tensor.sizes(), " on ",
        parameter.tensor.device(), ", it was ", unit.dtype(), " ", at::IntArrayRef(spec.sizes),
        " on ", device, " when it was sharded. Move or cast the model before sharding it.");
  }
}

void ShardedParameters::check(const char* verb) {
  check_kinds(*this, context_, verb, /*trains=*/true);
  const std::vector<int64_t> replaced = repair_hooks();
  if (replaced.empty()) return;
  const ShardedParameter& first = all_[replaced.front()];
  TORCH_CHECK(false, where(context_.global_rank, units_[first.unit]->name()), verb,
              ": autograd replaced the gradient node of ", replaced.size(),
              " parameter(s), the first is '", first.name,
              "', because dtype or device was changed in between; this backward's gradients of "
              "them were not seen. The nodes are hooked again: call zero_grad() and repeat forward "
              "and backward.");
}

std::vector<int64_t> ShardedParameters::repair_hooks() {
  std::vector<int64_t> replaced;
  for (int64_t i = 0; i < size(); ++i) {
    ShardedParameter& parameter = all_[i];
    if (!parameter.managed() || is_node_of(parameter.node, parameter.tensor)) continue;
    parameter.node = hook(i);
    replaced.push_back(i);
  }
  return replaced;
}

void ShardedParameters::follow_stream() {
  const c10::Stream stream = current_stream(context_.compute.device());
  for (const ShardedParameter& parameter : all_) {
    if (parameter.tensor.requires_grad()) {
      move_to_stream(parameter.node, parameter.tensor, stream);
    }
  }
}

bool ShardedParameters::lies_elsewhere(int64_t i) const {
  const ShardedParameter& parameter = all_[i];
  if (!parameter.has_home() || parameter.local.numel() == 0) {
    return false;
  }
  const Unit& unit = home_of(i);
  const Slot& slot = unit.layout().slot(parameter.slot);
  // Another size or dtype is refused by name, by the next backward or step.
  if (parameter.local.numel() != slot.spec.numel || parameter.local.scalar_type() != unit.dtype()) {
    return false;
  }
  return !unit.parameters().owns_storage_of(parameter.local) ||
         parameter.local.storage_offset() != slot.offset ||
         parameter.local.strides() != at::IntArrayRef(slot.spec.strides) ||
         parameter.local.sizes() != at::IntArrayRef(slot.spec.sizes);
}

void ShardedParameters::repair_storage(int64_t i, Writes writes) {
  if (!lies_elsewhere(i)) return;
  ShardedParameter& parameter = all_[i];
  UnitParameters& home = home_of(i).parameters();
  if (writes == Writes::keep) note_writes(*this, i);
  if (writes == Writes::keep) home.adopt(parameter.slot, parameter.local.detach());
  parameter.local.set_data(home.view(parameter.slot));
}

}  // namespace zero_ext
