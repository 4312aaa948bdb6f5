#include "engine/values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/errors.h"

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
  const UnitParameters& unit = parameters_.home_of(i).parameters();
  const at::Tensor written = written_part(i);
  const at::Tensor master =
      at::empty_like(written, written.options().dtype(at::kFloat).device(context_.state.device()));
  unit.copy_master(parameters_[i].slot, written, master);
  return master;
}

at::Tensor Values::written_part(int64_t i) const {
  const ShardedParameter& parameter = parameters_[i];
  Unit& unit = parameters_.home_of(i);
  // Nothing is written here: other ranks may still be gathering from this rank's shard, and the
  // user's writes may yet be discarded.
  return parameters_.lies_elsewhere(i)
             ? unit.layout().own_part(parameter.slot, parameter.local, unit.dtype())
             : unit.parameters().present_slice(parameter.slot);
}

void Values::copy_own_part(int64_t i, bool master, const at::Tensor& into) const {
  const UnitParameters& unit = parameters_.home_of(i).parameters();
  const int64_t slot = parameters_[i].slot;
  const at::Tensor written = written_part(i);
  if (master) {
    unit.copy_master(slot, written, into);
  } else {
    into.copy_(written);
  }
}

bool Values::gather_whole(const Whole& whole, bool wanted) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none(access, "gathering whole parameters");
  offloaded_.check_parameters_are_here("whole parameters were gathered");
  gatherer_.serve_all(Comm::Agreement::whole_parameters);
  const auto what = [&] {
    return where(context_.global_rank) + "iter_full_params() waited for the other ranks at '" +
           parameters_[whole.indices.front()].name + "'";
  };
  const std::vector<int64_t> mine{wanted ? 1 : 0, whole.indices.front(), std::ssize(whole.indices),
                                  static_cast<int64_t>(whole.into.front().scalar_type())};
  const at::Tensor all =
      comm_.all_gather(Comm::Agreement::whole_parameters, at::tensor(mine), what).cpu();
  std::vector<bool> wanting;
  for (int64_t r = 0; r < context_.world; ++r) {
    const auto* theirs = all.const_data_ptr<int64_t>() + r * std::ssize(mine);
    TORCH_CHECK(std::equal(mine.begin() + 1, mine.end(), theirs + 1), where(context_.global_rank),
                "iter_full_params() is at '", parameters_[whole.indices.front()].name,
                "' here and elsewhere on rank ", context_.global_ranks[r],
                ". Pass every rank the same bucket_mb and dtype.");
    wanting.push_back(theirs[0] != 0);
  }
  if (std::none_of(wanting.begin(), wanting.end(), [](bool wants) { return wants; })) return false;
  Pending pending;
  for (size_t k = 0; k < whole.indices.size(); ++k) {
    const int64_t i = whole.indices[k];
    const RankLayout& layout = parameters_.home_of(i).layout();
    const int64_t slot = parameters_[i].slot;
    const std::vector<int64_t> bounds = layout.bounds(slot);
    if (const Piece* own = layout.own_piece(slot)) {
      copy_own_part(i, whole.masters, whole.into[k].narrow(0, own->slot_begin, own->numel));
    }
    const Unit::Ranks& ranks = parameters_.home_of(i).ranks();
    std::vector<bool> of_unit;
    for (int64_t r = 0; r < ranks.comm.world(); ++r) of_unit.push_back(wanting[ranks.place(r)]);
    ranks.comm.gather_parts(whole.into[k], bounds, of_unit, pending);
  }
  pending.wait(what);
  return true;
}

void Values::read_whole(const Whole& whole) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none(access, "gathering whole parameters");
  offloaded_.check_parameters_are_here("whole parameters were gathered");
  Pending pending;
  for (size_t k = 0; k < whole.indices.size(); ++k) {
    const int64_t i = whole.indices[k];
    Unit& unit = parameters_.home_of(i);
    if (unit.layout().ranges() == 1) {
      copy_own_part(i, whole.masters, whole.into[k]);
    } else {
      unit.parameters().read_slot(unit.ranks().comm, parameters_[i].slot, whole.into[k], pending);
    }
  }
  pending.wait([&] {
    return where(context_.global_rank) + "iter_full_params() waited for the other ranks at '" +
           parameters_[whole.indices.front()].name + "'";
  });
}

void Values::write_parameter(int64_t i, const at::Tensor& value) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none(access, "setting a parameter");
  offloaded_.check_parameters_are_here("a parameter was set");
  const ShardedParameter& parameter = parameters_[i];
  Unit& unit = parameters_.home_of(i);
  gatherer_.serve_all(Comm::Agreement::shards);
  gatherer_.wait_for_shards();  // other ranks may be gathering the old value
  parameters_.repair_storage(i, Writes::discard);
  unit.parameters().adopt(parameter.slot, value);
  if (parameter.managed()) {
    changes_of(unit).mark_slot(parameter.slot);
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

void Values::keep_local_gradients() {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none(access, "local_gradients()");
  std::vector<int64_t> all(parameters_.size());
  std::iota(all.begin(), all.end(), 0);
  published_.keep_local(all);
}

std::map<int64_t, at::Tensor> Values::take_local_gradients() {
  const Access access(lock_);
  backward_.check_none(access, "local_gradients()");
  const at::NoGradGuard no_grad;
  std::map<int64_t, at::Tensor> taken = published_.take_local();
  if (!boundary_.local_open()) published_.publish();
  return taken;
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
