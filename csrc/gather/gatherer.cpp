#include "gather/gatherer.h"

#include <ATen/ops/full.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "core/errors.h"

namespace zero_ext {
namespace {

bool contains(const std::vector<int64_t>& values, int64_t value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

}  // namespace

Gatherer::Gatherer(Comm& comm, const UnitContext& context, const BackwardPhase& backward,
                   GatherOptions options)
    : comm_(comm),
      context_(context),
      backward_(backward),
      options_(options),
      sends_(comm, context),
      table_(comm, context, sends_, options.retained_bytes) {}

int64_t Gatherer::add_unit(Unit* unit) {
  site_counts_.push_back(0);
  reshards_.emplace_back();
  return table_.add(unit);
}

int64_t Gatherer::add_hook_site(HookSite site) {
  for (const int64_t u : site.units) site_counts_.at(u) += site.root || site.inner ? 0 : 1;
  sites_.push_back(std::move(site));
  return static_cast<int64_t>(sites_.size()) - 1;
}

int64_t Gatherer::add_inner_site(const std::vector<int64_t>& sites) {
  // What the next call in the same unit reads stays gathered until then.
  HookSite inner{.units = {}, .first = false, .last = false, .inner = true};
  for (const int64_t site : sites) {
    for (const int64_t u : units_of(site)) {
      if (!contains(inner.units, u)) inner.units.push_back(u);
    }
  }
  return add_hook_site(std::move(inner));
}

bool Gatherer::is_recomputed(int64_t site) const {
  const std::vector<int64_t>& units = units_of(site);
  return std::all_of(units.begin(), units.end(),
                     [this](int64_t u) { return table_.holds(u).calls > 0; });
}

void Gatherer::add_to_sites_of(int64_t unit, int64_t added) {
  for (HookSite& site : sites_) {
    if (contains(site.units, unit)) site.units.push_back(added);
  }
  site_counts_[added] = site_counts_[unit];
  reshards_[added] = reshards_[unit];
}

void Gatherer::begin_pass(Pass pass) {
  order_.begin(pass);
  sends_.begin_pass(pass);
}

// Forward

void Gatherer::enter_forward(int64_t site) {
  if (sites_.at(site).root && root_depth_++ == 0 && !in_backward()) {
    // A forward that threw may have left holds.
    for (int64_t u = 0; u < table_.size(); ++u) {
      if (table_.holds(u).forward > 0) table_.apply(u, ResidencyEvent::reset);
      if (table_.holds(u).escaped) {
        table_.apply(u, ResidencyEvent::backward_ended, {.graph_kept = true});
      }
    }
    begin_pass(Pass::forward);
  }
  try {
    enter(site, ResidencyEvent::enter_forward);
  } catch (...) {
    if (sites_[site].root) --root_depth_;
    throw;
  }
}

void Gatherer::enter(int64_t site, ResidencyEvent event) {
  // A forward inside a backward recomputes: it belongs to the backward's order.
  const Pass pass = in_backward() ? Pass::backward : Pass::forward;
  const HookSite& entered = sites_[site];
  release_deferred(entered);
  // All are started before any is waited for.
  for (const int64_t u : entered.units) table_.apply(u, ResidencyEvent::prefetch);
  for (size_t n = 0; n < entered.units.size(); ++n) {
    const int64_t u = entered.units[n];
    try {
      table_.apply(u, event);
    } catch (...) {
      if (event == ResidencyEvent::enter_forward) {
        for (size_t k = 0; k < n; ++k)
          table_.apply(entered.units[k], ResidencyEvent::leave_forward);
      }
      throw;
    }
    order_.enter(pass, u);
  }
  // The loss is where a step needs most memory, and a cast need not be early.
  if (only_casts() && pass == Pass::backward && entered.root) return;
  prefetch(pass);
}

void Gatherer::release_deferred(const HookSite& entered) {
  for (const int64_t u : std::exchange(deferred_releases_, {})) {
    if (contains(entered.units, u) || (in_backward() && is_kept_after_backward(u))) continue;
    if (!table_.holds(u).any() && !table_.unit(u).expects_gradients()) {
      table_.apply(u, ResidencyEvent::drop);
    }
  }
}

void Gatherer::prefetch(Pass pass) {
  if (comm_.way().gathers == Gathers::persistent && !options_.prefetch_from_local_peers) return;
  int64_t ahead = table_.ahead_bytes();
  for (const int64_t u : order_.upcoming(pass)) {
    if (table_.state(u) != Residency::released) continue;
    ahead += table_.unit(u).full_bytes();
    if (ahead > options_.prefetch_bytes) return;
    table_.apply(u, ResidencyEvent::prefetch);
    table_.set_ahead(u, true);
  }
}

bool Gatherer::is_kept_for_backward(int64_t unit) const {
  return !reshards_[unit].after_forward || (order_.ends_forward(unit) && !only_casts());
}

void Gatherer::leave_forward(int64_t site, const Left& left) {
  const HookSite& entered = sites_[site];
  for (const int64_t u : entered.units) {
    if (table_.holds(u).forward == 0) continue;  // the entry failed, or there was a reset since
    const bool backward_is_next =
        left.backward_may_follow && (in_backward() || entered.root || is_kept_for_backward(u));
    table_.apply(u, ResidencyEvent::leave_forward,
                 {.keep = backward_is_next || !entered.last,
                  .escapes = contains(left.escaped, u),
                  .expected = table_.unit(u).expects_gradients()});
    if (!entered.last && !backward_is_next) deferred_releases_.push_back(u);
  }
  if (!entered.root || root_depth_ == 0 || --root_depth_ > 0 || in_backward()) return;
  end_root_forward(entered, left.backward_may_follow);
}

void Gatherer::end_root_forward(const HookSite& root, bool backward_may_follow) {
  order_.end(Pass::forward);
  for (int64_t u = 0; u < table_.size(); ++u) {
    if (table_.holds(u).any()) continue;
    const bool of_root = contains(root.units, u);
    if (backward_may_follow && !table_.is_ahead(u) && (of_root || is_kept_for_backward(u))) {
      table_.set_ahead(u, !of_root && table_.state(u) != Residency::released);
    } else {
      table_.apply(u, ResidencyEvent::backward_ended);
    }
  }
  if (!backward_may_follow) context_.spare->clear();
}

// Backward

void Gatherer::begin_backward() { begin_pass(Pass::backward); }

void Gatherer::leave_backward(int64_t site, bool graph_kept) {
  for (const int64_t u : sites_[site].units) {
    // Without gradients to wait for, a unit of several sites is left with the last of them.
    const bool more_sites = !sites_[site].first;
    const bool stays = more_sites || is_kept_after_backward(u);
    table_.apply(u, ResidencyEvent::leave_backward,
                 {.expected = table_.unit(u).expects_gradients() || stays,
                  .graph_kept = graph_kept,
                  .may_retain = table_.may_retain(u)});
    if (more_sites) deferred_releases_.push_back(u);
  }
}

void Gatherer::gradient_arrived(int64_t unit, bool graph_kept) {
  if (table_.holds(unit).permanent) return;
  const bool stays = is_kept_after_backward(unit);
  table_.apply(unit, ResidencyEvent::gradient,
               {.expected = table_.unit(unit).expects_gradients() || stays,
                .graph_kept = graph_kept,
                .may_retain = table_.may_retain(unit)});
}

void Gatherer::end_backward(bool graph_kept) {
  deferred_releases_.clear();
  order_.end(Pass::backward);
  for (int64_t u = 0; u < table_.size(); ++u) {
    table_.apply(u, ResidencyEvent::backward_ended,
                 {.keep = is_kept_after_backward(u),
                  .graph_kept = graph_kept,
                  .may_retain = table_.may_retain(u)});
  }
  if (root_depth_ == 0) context_.spare->clear();
}

void Gatherer::reset_after_failure() noexcept {
  deferred_releases_.clear();
  for (int64_t u = 0; u < table_.size(); ++u) {
    const bool in_forward = table_.holds(u).forward > 0;
    try {
      table_.apply(u, in_forward ? ResidencyEvent::backward_ended : ResidencyEvent::reset);
    } catch (const std::exception&) {
      // A peer has ended. The error under way names it, and so will that of the next gather.
    }
  }
  if (root_depth_ == 0) context_.spare->clear();
}

// The user's own holds

void Gatherer::set_reshard_after_forward(const std::vector<int64_t>& units, bool reshards) {
  for (const int64_t u : units) reshards_.at(u).after_forward = reshards;
}

void Gatherer::set_reshard_after_backward(const std::vector<int64_t>& units, bool reshards) {
  for (const int64_t u : units) reshards_.at(u).after_backward = reshards;
}

void Gatherer::start(const std::vector<int64_t>& units) {
  for (const int64_t u : units) table_.apply(u, ResidencyEvent::prefetch);
}

void Gatherer::hold(const std::vector<int64_t>& units) {
  for (const int64_t u : units) table_.apply(u, ResidencyEvent::hold);
}

void Gatherer::drop(const std::vector<int64_t>& units, Writes writes) {
  for (const int64_t u : units) {
    table_.apply(u, ResidencyEvent::drop, {.expected = table_.unit(u).expects_gradients()}, writes);
    // Where something else holds the unit, discarded writes are replaced.
    const bool stays = table_.state(u) == Residency::gathered && !table_.holds(u).permanent;
    if (stays && writes == Writes::discard) table_.gather_again(u);
  }
  if (!is_inside()) context_.spare->trim();
}

void Gatherer::release_kept() {
  if (is_inside() || comm_.way().gathers == Gathers::collective) return;
  const Holds of_graph{.graph = true};
  for (int64_t u = 0; u < table_.size(); ++u) {
    if (table_.holds(u) == of_graph) table_.apply(u, ResidencyEvent::reset);
  }
}

// Steps

void Gatherer::begin_serving() {
  if (comm_.gather_order() != nullptr && !serving_since_.has_value())
    serving_since_.emplace(current_stream(context_.compute.device()));
}

bool Gatherer::serve() {
  if (comm_.gather_order() == nullptr) return false;
  bool any = false;
  for (int64_t u = comm_.gather_order()->next(); u >= 0; u = comm_.gather_order()->next()) {
    serve(u);
    any = true;
  }
  return any;
}

void Gatherer::serve_until(int64_t end) {
  if (comm_.gather_order() == nullptr) return;
  for (int64_t u; (u = comm_.gather_order()->next(end)) >= 0;) serve(u);
}

void Gatherer::serve_all(Comm::Agreement about) {
  if (comm_.gather_order() == nullptr) return;
  begin_serving();
  const auto end = c10::make_scope_exit([this] { end_serving(); });
  const std::string verb = Comm::name_of(about);
  const at::Tensor of_all = comm_.all_gather(
      about, at::full({1}, entered(), at::kLong),
      [&] { return where(context_.global_rank) + verb + " waited for the other ranks' " + verb; },
      [this] { return serve(); });
  const at::Tensor of_replica = of_all.narrow(0, context_.first_of_replica(), context_.shards);
  serve_until(of_replica.max().item<int64_t>());
}

int64_t Gatherer::entered() const {
  return comm_.gather_order() == nullptr ? 0 : comm_.gather_order()->count();
}

void Gatherer::begin_step() {
  for (int64_t u = 0; u < table_.size(); ++u) {
    const Holds& holds = table_.holds(u);
    if (holds.forward > 0 || holds.calls > 0) table_.apply(u, ResidencyEvent::step);  // throws
  }
  for (int64_t u = 0; u < table_.size(); ++u) table_.apply(u, ResidencyEvent::step);
  context_.spare->clear();
}

void Gatherer::wait_for_shards() {
  if (!context_.shards_parameters()) return;
  for (int64_t u = 0; u < table_.size(); ++u) table_.unit(u).parameters().refresh_mirror(comm_);
  sends_.wait_for_shards();
}

}  // namespace zero_ext
