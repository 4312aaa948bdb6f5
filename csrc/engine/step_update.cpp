#include "engine/step_update.h"

#include <algorithm>

#include "comm/current_call.h"
#include "core/errors.h"
#include "core/range.h"

namespace zero_ext {

StepUpdate::StepUpdate(EngineParts& parts, RunningBackward& backward,
                       const std::vector<int64_t>& indices, UpdateCounts& counts)
    : Facet(parts),
      access_(parts.lock),
      backward_(backward),
      counts_(counts),
      number_(counts.updates++),
      mine_(parameters_.size(), 0),
      u_(parameters_.unit_count()) {
  for (const int64_t i : indices) mine_[i] = 1;
  for (int64_t u = u_ - 1; u >= 0; --u) {
    Unit& unit = parameters_.unit(u);
    unit.parameters().begin_update();
    if (sends_changes(unit.parameters())) changes_of(unit).begin_update();
    if (HostCopies* copies = copies_of(unit.parameters())) copies->begin_update();
  }
}

bool StepUpdate::next_unit() {
  if (u_ < parameters_.unit_count()) end_unit();
  if (--u_ < 0) {
    finish();
    return false;
  }
  unit().parameters().await_update();
  updated_.clear();
  for (int64_t slot = 0; slot < unit().layout().size(); ++slot) {
    const int64_t i = members()[slot];
    if (mine_[i] != 0 && !unit().sums().fresh(slot)) updated_.push_back(i);
  }
  return true;
}

std::vector<Run> StepUpdate::runs(const std::function<bool(int64_t, int64_t)>& same) const {
  Unit& unit = this->unit();
  const std::vector<int64_t>& members = this->members();
  return unit.layout().runs(
      [&](int64_t slot) { return mine_[members[slot]] != 0 && !unit.sums().fresh(slot); },
      [&](int64_t a, int64_t b) { return same(members[a], members[b]); });
}

void StepUpdate::end_unit() {
  for (const int64_t i : updated_) {
    // An old graph that saved the parameter must not run on its new values unnoticed.
    parameters_[i].tensor.unsafeGetTensorImpl()->bump_version();
  }
  UnitParameters& unit = this->unit().parameters();
  if (!updated_.empty()) unit.end_update();
  HostCopies* const copies = copies_of(unit);
  const bool resident = context_.shards_parameters() && !unit.comes_and_goes();
  if (context_.policy.gather != When::after_step && !resident && copies == nullptr) return;
  // After a backward that threw on this rank alone, the other ranks have gradients that this one
  // lacks. On a device no rank knows that yet.
  const bool others_changed =
      backward_.threw(access_) && !context_.state.on_host() &&
      std::any_of(members().begin(), members().end(), [&](int64_t i) { return mine_[i] != 0; });
  if (updated_.empty() && !others_changed) return;
  const Range range("gather", this->unit().name());
  const uint16_t* const marks = sends_changes(unit) ? changes_of(this->unit()).marks() : nullptr;
  Comm& comm = this->unit().ranks().comm;
  const int64_t tag = number_ * kMaxUnits + u_;
  counts_.bytes_to_hosts +=
      copies != nullptr ? copies->send(comm, tag, shard_of(unit).tensor(), marks, gathering_)
                        : unit.gather(comm, tag, gathering_, marks);
  ++counts_.gathers;
}

void StepUpdate::for_each_copy(const std::function<void(HostCopies&, bool)>& visit) {
  for (const auto& unit : parameters_.units()) {
    const UnitParameters& parameters = unit->parameters();
    if (HostCopies* copies = copies_of(parameters)) visit(*copies, shard_of(parameters).lent());
  }
}

void StepUpdate::finish() {
  const Range range("gather", [] { return "updated parameters"; });
  backward_.forget_failure(access_);
  const CallScope call(Comm::name_of(Comm::Agreement::step));
  gathering_.wait(
      [this] { return where(context_.global_rank) + "step() waited for updated parameters"; });
  for_each_copy([](HostCopies& copies, bool lent) { copies.end_update(lent); });
  try {
    gatherer_.wait_for_shards();
  } catch (...) {  // some rank may lack what was sent
    for_each_copy([](HostCopies& copies, bool) { copies.part_changed(); });
    throw;
  }
  for (const auto& unit : parameters_.units()) changes_of(*unit).end_update();
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& parameter = parameters_[i];
    if (!parameter.managed() || mine_[i] == 0) continue;
    Unit& unit = parameters_.unit(parameter.unit);
    if (!unit.sums().fresh(parameter.slot)) written_of(unit.parameters()).accept(parameter.slot);
  }
  last_use_.remember();
}

}  // namespace zero_ext
