#include "gather/residency_table.h"

#include "comm/current_call.h"
#include "core/errors.h"
#include "core/range.h"

namespace zero_ext {
namespace {

bool is_use(ResidencyEvent event) {
  return event == ResidencyEvent::enter_forward || event == ResidencyEvent::enter_backward ||
         event == ResidencyEvent::hold;
}

}  // namespace

ResidencyTable::ResidencyTable(Comm& comm, const UnitContext& context, PostedSends& sends,
                               int64_t retained_bytes)
    : comm_(comm), context_(context), sends_(sends), retained_bytes_(retained_bytes) {}

int64_t ResidencyTable::add(Unit* unit) {
  const bool releases = unit->parameters().comes_and_goes();
  entries_.push_back({.unit = unit,
                      .state = releases ? Residency::released : Residency::gathered,
                      .holds = {.permanent = !releases}});
  sends_.add(unit);
  if (comm_.gather_order() != nullptr) comm_.gather_order()->add_unit(unit->name());
  return size() - 1;
}

void ResidencyTable::apply(int64_t u, ResidencyEvent event, const ResidencyContext& context,
                           Writes writes) {
  Entry& entry = entries_[u];
  const Transition next = transition(entry.state, entry.holds, event, context);
  switch (next.action) {
    case ResidencyAction::none:
      break;
    case ResidencyAction::start:
      start(u);
      break;
    case ResidencyAction::gather:
      start(u);
      entry.state = Residency::gathering;  // and stays so if the wait throws
      finish(entry);
      break;
    case ResidencyAction::wait:
      finish(entry);
      break;
    case ResidencyAction::release:
      if (entry.state == Residency::gathering) finish(entry);
      release(entry, writes);
      break;
    case ResidencyAction::error:
      TORCH_CHECK(event != ResidencyEvent::step, where(context_.global_rank, entry.unit->name()),
                  "step() inside a forward or a backward. Call it after both have returned.");
      TORCH_CHECK(false, where(context_.global_rank, entry.unit->name()),
                  "a forward was left that was never entered.");
  }
  tell_watcher(entry, next.state, next.holds);
  if (is_use(event)) entry.ahead = false;
  entry.state = next.state;
  entry.holds = next.holds;
}

void ResidencyTable::start(int64_t u) {
  const Entry& entry = entries_[u];
  const Range range("gather", entry.unit->name());
  sends_.count_gather(u);
  const auto what = [&] { return waiting_for(entry); };
  name_errors(what,
              [&] { entry.unit->parameters().start_gather(entry.unit->ranks().comm, u, what); });
  ++gathers_;
  sends_.count_taken(u);
}

void ResidencyTable::serve(int64_t u, const StreamEvent& since) {
  const Entry& entry = entries_[u];
  entry.unit->parameters().serve_gather(entry.unit->ranks().comm, u, since,
                                        [&] { return waiting_for(entry); });
}

void ResidencyTable::finish(Entry& entry) {
  const Range range("gather", entry.unit->name());
  entry.unit->parameters().finish_gather([&] { return waiting_for(entry); });
  sends_.gather_finished(*entry.unit);
}

void ResidencyTable::tell_watcher(Entry& entry, Residency state, const Holds& holds) {
  const bool in_memory = state == Residency::gathered;
  const bool in_use = holds.forward > 0 || holds.calls > 0;
  if (!entry.watcher || (in_memory == entry.in_memory && in_use == entry.in_use)) return;
  entry.watcher(in_memory, in_use);
  entry.in_memory = in_memory;
  entry.in_use = in_use;
}

void ResidencyTable::release(Entry& entry, Writes writes) {
  const Range range("release", entry.unit->name());
  entry.unit->parameters().release(entry.unit->ranks().comm, writes);
  entry.ahead = false;
}

void ResidencyTable::gather_again(int64_t u) {
  Entry& entry = entries_[u];
  sends_.count_repeated_gather(u);
  entry.unit->parameters().start_gather(entry.unit->ranks().comm, u,
                                        [&] { return waiting_for(entry); });
  sends_.count_taken(u);
  finish(entry);
  if (!entry.watcher) return;
  tell_watcher(entry, Residency::released, {});
  tell_watcher(entry, entry.state, entry.holds);
}

std::string ResidencyTable::waiting_for(const Entry& entry) const {
  const std::string& call = current_call();
  return where(context_.global_rank, entry.unit->name()) + call + (call.empty() ? "" : " ") +
         "waited for the other ranks' parts of its parameters" + sends_.last_gathered();
}

int64_t ResidencyTable::ahead_bytes() const {
  int64_t bytes = 0;
  for (const Entry& entry : entries_) {
    if (entry.ahead) bytes += entry.unit->full_bytes();
  }
  return bytes;
}

bool ResidencyTable::may_retain(int64_t u) const {
  if (retained_bytes_ < 0 || entries_[u].holds.graph) return true;
  int64_t retained = entries_[u].unit->full_bytes();
  for (const Entry& entry : entries_) {
    if (entry.holds.graph) retained += entry.unit->full_bytes();
  }
  return retained <= retained_bytes_;
}

}  // namespace zero_ext
