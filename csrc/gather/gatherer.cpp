#include "gather/gatherer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "core/errors.h"

namespace zero_ext {
namespace {

// Posted sends beyond one per pass, for a rank that enters a unit more often than others, or repeats a
// pass alone. One that nobody takes is made once, and costs its bookkeeping.
constexpr int64_t kReserve = 8;
// Forwards without a step (generation, evaluation) after which the ranks tell what they took, so
// that taken offers do not pile up.
constexpr int64_t kPassesWithoutStep = 256;

bool contains(const std::vector<int64_t>& values, int64_t value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

}  // namespace

Gatherer::Gatherer(Comm& comm, const UnitContext& context, const BackwardPhase& backward,
                   GatherOptions options)
    : comm_(comm), context_(context), backward_(backward), options_(options) {}

int64_t Gatherer::add_unit(Unit* unit) {
  const bool releases = unit->parameters().comes_and_goes();
  entries_.push_back({.unit = unit,
                      .state = releases ? Residency::released : Residency::gathered,
                      .holds = {.permanent = !releases},
                      .due = kReserve,
                      .posted_sends = std::vector<std::deque<PostedSend>>(context_.world)});
  if (releases && sends_persist()) post_missing_sends(entries_.back());
  return unit_count() - 1;
}

int64_t Gatherer::add_hook_site(HookSite site) {
  for (const int64_t u : site.units) entries_[u].sites += site.root ? 0 : 1;
  sites_.push_back(std::move(site));
  return static_cast<int64_t>(sites_.size()) - 1;
}

void Gatherer::add_to_sites_of(int64_t unit, int64_t added) {
  for (HookSite& site : sites_) {
    if (contains(site.units, unit)) site.units.push_back(added);
  }
  entries_[added].sites = entries_[unit].sites;
}

// The verbs

void Gatherer::apply(int64_t unit, ResidencyEvent event, const ResidencyContext& context,
                     Writes writes) {
  Entry& entry = entries_[unit];
  const Transition next = transition(entry.state, entry.holds, event, context);
  switch (next.action) {
    case ResidencyAction::none:
      break;
    case ResidencyAction::start:
      start(entry);
      break;
    case ResidencyAction::gather:
      start(entry);
      entry.state = Residency::gathering;  // if the wait throws, that is what it is
      finish(entry);
      break;
    case ResidencyAction::wait:
      finish(entry);
      break;
    case ResidencyAction::release:
      if (entry.state == Residency::gathering) finish(entry);
      entry.unit->parameters().release(comm_, writes);
      entry.ahead = false;
      break;
    case ResidencyAction::error:
      TORCH_CHECK(event != ResidencyEvent::step, where(context_.global_rank, entry.unit->name()),
                  "step() inside a forward or a backward. Call it after both have returned.");
      TORCH_CHECK(false, where(context_.global_rank, entry.unit->name()),
                  "a forward was left that was never entered.");
  }
  entry.state = next.state;
  entry.holds = next.holds;
}

void Gatherer::start(Entry& entry) {
  name_errors([&] { return waiting_for(entry); },
              [&] { entry.unit->parameters().start_gather(comm_); });
  ++gathers_;
  if (sends_persist()) return;
  ++entry.taken;
  // Beyond what a pass needs, the other ranks are likely to do as this one does.
  if (++entry.taken_in_pass > 1) ++entry.due;
  post_missing_sends(entry);
}

void Gatherer::finish(Entry& entry) {
  entry.unit->parameters().finish_gather([&] { return waiting_for(entry); });
  last_gathered_ = entry.unit->name();
}

std::string Gatherer::waiting_for(const Entry& entry) const {
  return where(context_.global_rank, entry.unit->name()) +
         "waited for the other ranks' parts of its parameters (the last unit that was gathered: '" +
         last_gathered_ + "')";
}

// Forward

void Gatherer::enter_forward(int64_t site) {
  if (sites_[site].root && root_depth_++ == 0 && !in_backward()) {
    // A forward that threw may have left holds behind.
    for (int64_t u = 0; u < unit_count(); ++u) {
      if (entries_[u].holds.forward > 0) apply(u, ResidencyEvent::reset);
      if (entries_[u].holds.escaped) {
        apply(u, ResidencyEvent::backward_ended, {.graph_kept = true});
      }
    }
    begin_pass(kForward);
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
  const Phase phase = in_backward() ? kBackward : kForward;
  const HookSite& entered = sites_[site];
  release_deferred(entered);
  for (const int64_t u : entered.units) apply(u, ResidencyEvent::prefetch);  // all before any wait
  for (size_t n = 0; n < entered.units.size(); ++n) {
    const int64_t u = entered.units[n];
    try {
      apply(u, event);
    } catch (...) {
      if (event == ResidencyEvent::enter_forward) {
        for (size_t k = 0; k < n; ++k) apply(entered.units[k], ResidencyEvent::leave_forward);
      }
      throw;
    }
    entries_[u].ahead = false;
    std::vector<int64_t>& current = current_[phase];
    if (current.empty() || current.back() != u) current.push_back(u);
    const std::vector<int64_t>& order = order_[phase];
    const auto from = order.begin() + static_cast<int64_t>(position_[phase]);
    const auto found = std::find(from, order.end(), u);
    if (found != order.end()) position_[phase] = found - order.begin() + 1;
  }
  // The loss is where a step needs most memory, and a cast is not worth being early for.
  if (is_alone() && phase == kBackward && entered.root) return;
  prefetch(phase);
}

void Gatherer::release_deferred(const HookSite& entered) {
  for (const int64_t u : std::exchange(deferred_releases_, {})) {
    if (contains(entered.units, u)) continue;
    if (!entries_[u].holds.any() && !entries_[u].unit->expects_gradients()) {
      apply(u, ResidencyEvent::drop);
    }
  }
}

void Gatherer::prefetch(Phase phase) {
  if (comm_.has_only_local_peers() && !options_.prefetch_from_local_peers) return;
  int64_t ahead = 0;
  for (const Entry& entry : entries_) {
    if (entry.ahead) ahead += entry.unit->parameters().full_bytes();
  }
  const std::vector<int64_t>& order = order_[phase];
  for (size_t next = position_[phase]; next < order.size(); ++next) {
    Entry& entry = entries_[order[next]];
    if (entry.state != Residency::released) continue;
    ahead += entry.unit->parameters().full_bytes();
    if (ahead > options_.prefetch_bytes) return;
    apply(order[next], ResidencyEvent::prefetch);
    entry.ahead = true;
  }
}

bool Gatherer::is_kept_for_backward(int64_t unit) const {
  const bool last = order_[kForward].size() > 1 && order_[kForward].back() == unit;
  return !options_.reshard_after_forward || (last && !is_alone());
}

void Gatherer::leave_forward(int64_t site, const Left& left) {
  const HookSite& entered = sites_[site];
  for (const int64_t u : entered.units) {
    if (entries_[u].holds.forward == 0) continue;  // the entry failed, or a reset came between
    const bool backward_is_next =
        left.backward_may_follow && (in_backward() || entered.root || is_kept_for_backward(u));
    apply(u, ResidencyEvent::leave_forward,
          {.keep = backward_is_next || !entered.last,
           .escapes = contains(left.escaped, u),
           .expected = entries_[u].unit->expects_gradients()});
    if (!entered.last && !backward_is_next) deferred_releases_.push_back(u);
  }
  if (!entered.root || root_depth_ == 0 || --root_depth_ > 0 || in_backward()) return;
  end_pass(kForward);
  for (int64_t u = 0; u < unit_count(); ++u) {
    Entry& entry = entries_[u];
    if (entry.holds.any()) continue;
    const bool of_root = contains(entered.units, u);
    if (left.backward_may_follow && !entry.ahead && (of_root || is_kept_for_backward(u))) {
      entry.ahead = !of_root && entry.state != Residency::released;
    } else {
      apply(u, ResidencyEvent::backward_ended);
    }
  }
  if (!left.backward_may_follow) context_.spare->clear();
}

// Backward

void Gatherer::begin_backward() {
  if (order_[kBackward].empty()) {
    const std::vector<int64_t>& forward = order_[kForward];
    order_[kBackward].assign(forward.rbegin(), forward.rend());
  }
  begin_pass(kBackward);
}

void Gatherer::enter_backward(int64_t site) { enter(site, ResidencyEvent::enter_backward); }

void Gatherer::leave_backward(int64_t site, bool graph_kept) {
  for (const int64_t u : sites_[site].units) {
    Entry& entry = entries_[u];
    // Without gradients to wait for, a unit of several sites is left with the last of them.
    const bool more_sites = !sites_[site].first;
    apply(u, ResidencyEvent::leave_backward,
          {.expected = entry.unit->expects_gradients() || more_sites,
           .graph_kept = graph_kept,
           .may_retain = may_retain(u)});
    if (more_sites) deferred_releases_.push_back(u);
  }
}

void Gatherer::gradient_arrived(int64_t unit, bool graph_kept) {
  if (entries_[unit].holds.permanent) return;
  apply(unit, ResidencyEvent::gradient,
        {.expected = entries_[unit].unit->expects_gradients(),
         .graph_kept = graph_kept,
         .may_retain = may_retain(unit)});
}

bool Gatherer::may_retain(int64_t unit) const {
  if (options_.retained_bytes < 0 || entries_[unit].holds.graph) return true;
  int64_t retained = entries_[unit].unit->parameters().full_bytes();
  for (const Entry& entry : entries_) {
    if (entry.holds.graph) retained += entry.unit->parameters().full_bytes();
  }
  return retained <= options_.retained_bytes;
}

void Gatherer::end_backward(bool graph_kept) {
  deferred_releases_.clear();
  end_pass(kBackward);
  for (int64_t u = 0; u < unit_count(); ++u) {
    apply(u, ResidencyEvent::backward_ended,
          {.graph_kept = graph_kept, .may_retain = may_retain(u)});
  }
  if (root_depth_ == 0) context_.spare->clear();
}

void Gatherer::reset_after_failure() noexcept {
  deferred_releases_.clear();
  for (int64_t u = 0; u < unit_count(); ++u) {
    const bool in_forward = entries_[u].holds.forward > 0;
    try {
      apply(u, in_forward ? ResidencyEvent::backward_ended : ResidencyEvent::reset);
    } catch (const std::exception&) {
      // A peer is gone: the error that is on its way says so, and the next gather will.
    }
  }
  if (root_depth_ == 0) context_.spare->clear();
}

// The user's own holds

void Gatherer::hold(const std::vector<int64_t>& units) {
  for (const int64_t u : units) {
    apply(u, ResidencyEvent::hold);
    entries_[u].ahead = false;
  }
}

void Gatherer::drop(const std::vector<int64_t>& units, Writes writes) {
  for (const int64_t u : units) {
    Entry& entry = entries_[u];
    apply(u, ResidencyEvent::drop, {.expected = entry.unit->expects_gradients()}, writes);
    if (entry.state != Residency::gathered || entry.holds.permanent) continue;
    if (writes == Writes::discard) {  // something else holds it
      if (!sends_persist()) {
        ++entry.taken;
        ++entry.due;
        post_missing_sends(entry);
      }
      entry.unit->parameters().receive_ranges(comm_);
      finish(entry);
    }
  }
  if (!inside() && !in_backward()) context_.spare->trim();
}

// Steps and passes

void Gatherer::begin_step() {
  for (int64_t u = 0; u < unit_count(); ++u) {
    const Holds& holds = entries_[u].holds;
    if (holds.forward > 0 || holds.calls > 0) apply(u, ResidencyEvent::step);  // throws
  }
  for (int64_t u = 0; u < unit_count(); ++u) apply(u, ResidencyEvent::step);
  context_.spare->clear();
}

void Gatherer::wait_for_shards() {
  if (!context_.shards_parameters()) return;
  for (Entry& entry : entries_) entry.unit->parameters().refresh_mirror(comm_);
  if (!comm_.on_device()) tell_what_was_taken();
}

void Gatherer::begin_pass(Phase phase) {
  current_[phase].clear();
  position_[phase] = 0;
  if (!context_.shards_parameters() || comm_.on_device() || sends_persist()) return;
  if (++passes_ >= kPassesWithoutStep && phase == kForward) tell_what_was_taken();
  for (Entry& entry : entries_) {
    entry.taken_in_pass = 0;
    ++entry.due;
    post_missing_sends(entry);
  }
}

void Gatherer::post_sends_for_a_pass() {
  if (!context_.shards_parameters() || sends_persist()) return;
  for (Entry& entry : entries_) {
    entry.due += 2;
    post_missing_sends(entry);
  }
}

void Gatherer::end_pass(Phase phase) { order_[phase].swap(current_[phase]); }

void Gatherer::post_missing_sends(Entry& entry) {
  if (comm_.on_device()) return;
  const int64_t due = sends_persist() ? 1 : entry.due;
  for (int64_t peer = 0; peer < context_.world; ++peer) {
    if (peer == context_.rank || !context_.shares_replica_with(peer)) continue;
    std::deque<PostedSend>& posted_sends = entry.posted_sends[peer];
    try {
      while (static_cast<int64_t>(posted_sends.size()) < due) {
        posted_sends.push_back(entry.unit->parameters().post_send(comm_, peer));
      }
    } catch (const std::exception& error) {
      TORCH_CHECK(false, where(context_.global_rank, entry.unit->name()), "rank ",
                  comm_.global_rank(peer),
                  " cannot be offered this rank's part of the parameters (the last unit that was"
                  " gathered: '",
                  last_gathered_, "'): ", text_of(error));
    }
  }
}

Gatherer::OutstandingSends Gatherer::take_outstanding_sends() {
  OutstandingSends outstanding;
  for (Entry& entry : entries_) {
    for (auto& posted_sends : entry.posted_sends)
      outstanding.posted_sends.push_back(std::move(posted_sends));
    entry.posted_sends.clear();
  }
  if (!comm_.on_device()) comm_.begin_shutdown(outstanding.farewell);
  return outstanding;
}

void Gatherer::tell_what_was_taken() {
  const int64_t units = unit_count();
  at::Tensor taken = at::empty({units}, at::TensorOptions().dtype(at::kLong));
  for (int64_t u = 0; u < units; ++u) taken.mutable_data_ptr<int64_t>()[u] = entries_[u].taken;
  const at::Tensor all = comm_.all_gather(Comm::Agreement::shards, taken, [this] {
    return where(context_.global_rank) + "waited until all ranks had updated their shards";
  });
  const auto* by_rank = all.const_data_ptr<int64_t>();
  for (int64_t u = 0; u < units; ++u) {
    Entry& entry = entries_[u];
    for (int64_t peer = 0; peer < context_.world; ++peer) {
      std::deque<PostedSend>& posted_sends = entry.posted_sends[peer];
      const auto count = static_cast<size_t>(by_rank[peer * units + u]);
      for (size_t n = std::min(count, posted_sends.size()); n > 0; --n) posted_sends.pop_front();
    }
    entry.taken = 0;
    entry.due = kReserve;
  }
  passes_ = 0;
}

}  // namespace zero_ext
