#include "engine/forwards.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

namespace zero_ext {

int64_t Forwards::add_hook_site(HookSite site) {
  const Access access(lock_);
  return gatherer_.add_hook_site(std::move(site));
}

int64_t Forwards::add_inner_site(const std::vector<int64_t>& sites) {
  const Access access(lock_);
  return gatherer_.add_inner_site(sites);
}

bool Forwards::is_recomputed(int64_t site) const {
  const Access access(lock_);
  return gatherer_.is_recomputed(site);
}

void Forwards::watch_unit(int64_t u, bool frozen, ResidencyTable::Watcher watcher) {
  const Access access(lock_);
  gatherer_.watch((frozen ? frozen_gathered_as_ : gathered_as_).at(u), std::move(watcher));
}

std::shared_ptr<Call> Forwards::enter(int64_t site,
                                      const std::optional<std::vector<at::Tensor>>& inputs) {
  auto call = inputs.has_value() ? Call::begin(listener_, site, *inputs) : nullptr;
  const Access access(lock_);
  gatherer_.enter_forward(site);
  return call;
}

void Forwards::leave(int64_t site, const std::shared_ptr<Call>& call,
                     const std::vector<at::Tensor>& outputs, bool threw) {
  if (call != nullptr) call->end(outputs);
  const Access access(lock_);
  Gatherer::Left left{.backward_may_follow = call != nullptr && !threw};
  for (const int64_t number : gatherer_.units_of(site)) {
    const UnitParameters& unit = gatherer_.unit(number).parameters();
    const bool escapes = std::any_of(outputs.begin(), outputs.end(), [&](const at::Tensor& output) {
      return unit.owns_storage_of(output);
    });
    if (escapes) left.escaped.push_back(number);
  }
  gatherer_.leave_forward(site, left);
}

std::vector<int64_t> Forwards::all_units() const {
  std::vector<int64_t> all(gatherer_.unit_count());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<int64_t> Forwards::units_of(std::optional<int64_t> site) const {
  return site.has_value() ? gatherer_.units_of(*site) : all_units();
}

void Forwards::unshard(std::optional<int64_t> site) {
  const Access access(lock_);
  gatherer_.hold(units_of(site));
}

void Forwards::start_gathers(int64_t site) {
  const Access access(lock_);
  gatherer_.start(gatherer_.units_of(site));
}

void Forwards::set_reshard_after_forward(int64_t site, bool reshards) {
  const Access access(lock_);
  gatherer_.set_reshard_after_forward(gatherer_.units_of(site), reshards);
}

void Forwards::set_reshard_after_backward(int64_t site, bool reshards) {
  const Access access(lock_);
  gatherer_.set_reshard_after_backward(gatherer_.units_of(site), reshards);
}

void Forwards::reshard(Writes writes, std::optional<int64_t> site) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  if (releases()) {
    for (int64_t i = 0; i < parameters_.size(); ++i) parameters_.repair_storage(i, writes);
  }
  gatherer_.drop(units_of(site), writes);
}

void Forwards::release_kept() {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  gatherer_.release_kept();
}

bool Forwards::held_by_user() const {
  const Access access(lock_);
  const std::vector<int64_t> all = all_units();
  const auto held = [this](int64_t number) { return gatherer_.holds(number).user; };
  return !all.empty() && std::all_of(all.begin(), all.end(), held);
}

std::vector<std::string> Forwards::gathered_units() const {
  const Access access(lock_);
  std::vector<std::string> names;
  for (const int64_t number : all_units()) {
    if (gatherer_.state(number) == Residency::released) continue;
    names.push_back(gatherer_.unit(number).name());
  }
  return names;
}

bool Forwards::releases() const {
  const auto may_release = [this](const std::unique_ptr<Unit>& unit) {
    return context_.casts_masters(unit->dtype());  // a frozen one when it is unfrozen
  };
  const auto any = [&](const std::vector<std::unique_ptr<Unit>>& units) {
    return std::any_of(units.begin(), units.end(), may_release);
  };
  return context_.shards_parameters() || context_.parameters_on_host || any(parameters_.units()) ||
         any(parameters_.frozen_units());
}

void Forwards::wait_for_shards() {
  const Access access(lock_);
  gatherer_.wait_for_shards();
}

void Forwards::give_parameters_back() {
  const Access access(lock_);
  for (int64_t u = 0; u < parameters_.unit_count(); ++u) {
    UnitParameters& unit = parameters_.unit(u).parameters();
    if (!unit.comes_and_goes()) continue;
    gatherer_.hold({gathered_as_[u]});
    unit.drop_master();  // it is twice the memory that the next unit needs
  }
  gatherer_.hold(frozen_gathered_as_);
}

std::vector<int64_t> Forwards::frozen_units_of(const Access& /*access*/,
                                               const std::vector<int64_t>& members) const {
  std::set<int64_t> numbers;
  for (const int64_t i : members) {
    const int64_t u = parameters_[i].frozen_unit;
    if (u >= 0) numbers.insert(frozen_gathered_as_[u]);
  }
  return {numbers.begin(), numbers.end()};
}

int64_t Forwards::add_unit(const Access& /*access*/, UnitKind kind,
                           const std::vector<int64_t>& unfrozen) {
  const bool trainable = kind != UnitKind::frozen;
  const auto& units = trainable ? parameters_.units() : parameters_.frozen_units();
  const int64_t number = gatherer_.add_unit(units.back().get());
  (trainable ? gathered_as_ : frozen_gathered_as_).push_back(number);
  for (const int64_t old : unfrozen) gatherer_.add_to_sites_of(old, number);
  return number;
}

std::optional<int64_t> Forwards::unit_of(int64_t number) const {
  const auto found = std::find(gathered_as_.begin(), gathered_as_.end(), number);
  if (found == gathered_as_.end()) return std::nullopt;  // of frozen parameters
  return found - gathered_as_.begin();
}

}  // namespace zero_ext
