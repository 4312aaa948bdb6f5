#include "engine/values.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

namespace zero_ext {

at::Tensor Values::parameter_slice(int64_t i) const {
  const Access access(lock_);
  return parameters_.shard_slice(i);
}

at::Tensor Values::current_master(int64_t i) const {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none(access, "reading a parameter's state");
  offloaded_.check_parameters_are_here("a parameter was read");
  const ShardedParameter& parameter = parameters_[i];
  Unit& unit = parameters_.home_of(i);
  // Nothing is written here: other ranks may still be gathering from this rank's shard, and the
  // user's writes may yet be discarded.
  const at::Tensor written =
      parameters_.lies_elsewhere(i)
          ? unit.layout().own_part(parameter.slot, parameter.tensor, unit.dtype())
          : unit.parameters().present_slice(parameter.slot);
  return unit.parameters().master_with(parameter.slot, written);
}

void Values::write_parameter(int64_t i, const at::Tensor& value) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none(access, "setting a parameter");
  offloaded_.check_parameters_are_here("a parameter was set");
  const ShardedParameter& parameter = parameters_[i];
  Unit& unit = parameters_.home_of(i);
  gatherer_.wait_for_shards();  // other ranks may be gathering the old value
  parameters_.repair_storage(i, Writes::discard);
  unit.parameters().adopt(parameter.slot, value);
  if (parameter.managed()) {
    unit.parameters()
        .master_slice(parameter.slot)
        .copy_(unit.layout().own_part(parameter.slot, value, at::kFloat));
  }
  parameter.tensor.unsafeGetTensorImpl()->bump_version();
  gatherer_.wait_for_shards();  // before any rank gathers the new value
}

void Values::write_gradient(int64_t i, const at::Tensor& grad) {
  const Access access(lock_);
  published_.write(i, grad);
}

void Values::make_published(int64_t i) {
  const Access access(lock_);
  published_.make_view(i);
}

void Values::set_view_maker(PublishedGradients::ViewMaker maker) {
  const Access access(lock_);
  published_.set_view_maker(std::move(maker));
}

void Values::set_local_reader(PublishedGradients::LocalReader reader) {
  const Access access(lock_);
  published_.set_local_reader(std::move(reader));
}

void Values::set_offloaded(const std::set<std::string>& names) {
  const Access access(lock_);
  backward_.check_none(access, "offloading or reloading states");
  const at::NoGradGuard no_grad;
  const std::set<std::string>& old = offloaded_.names();
  const bool none_back = std::includes(names.begin(), names.end(), old.begin(), old.end());
  offloaded_.add(names);  // also where memory runs out half-way
  const auto follow = c10::make_scope_exit([this] { published_.follow_memory(); });
  for (const auto* units : {&parameters_.units(), &parameters_.frozen_units()}) {
    for (const auto& unit : *units) {
      if (!none_back) unit->reload();
      unit->offload(names);
    }
  }
  context_.spare->trim();
  offloaded_.become(names);
}

std::set<std::string> Values::offloaded() const {
  const Access access(lock_);
  return offloaded_.names();
}

}  // namespace zero_ext
