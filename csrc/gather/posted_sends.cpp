#include "gather/posted_sends.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "comm/current_call.h"
#include "core/errors.h"

namespace zero_ext {
namespace {

// Posted sends beyond one per pass, for a rank that enters a unit more often than others, or repeats
// a pass alone. One that no rank takes is posted once, and costs its bookkeeping.
constexpr int64_t kReserve = 8;
// After so many forwards without a step (generation, evaluation) the ranks exchange what they took,
// so that sends that were taken do not pile up.
constexpr int64_t kPassesWithoutStep = 256;

}  // namespace

PostedSends::PostedSends(Comm& comm, const UnitContext& context) : comm_(comm), context_(context) {}

void PostedSends::add(const Unit* unit) {
  const std::vector<std::deque<PostedSend>> none(unit->ranks().comm.world());
  entries_.push_back(
      {.unit = unit, .due = kReserve, .parts = {.sends = none}, .states = {.sends = none}});
  // Of parameters that were unfrozen: another rank may gather them before this rank begins a pass.
  const bool late = posted_any_ && post_per_pass();
  if (persist() || late) post_missing(entries_.back());
  if (comm_.way().gathers == Gathers::pulled) meet_devices();  // its parts are there
}

void PostedSends::begin_pass(Pass pass) {
  if (!post_per_pass()) return;
  if (++passes_ >= kPassesWithoutStep && pass == Pass::forward) exchange_taken();
  for (Entry& entry : entries_) {
    entry.taken_in_pass = 0;
    ++entry.due;
    post_missing(entry);
  }
}

void PostedSends::post_for_a_pass() {
  if (!post_per_pass()) return;
  for (Entry& entry : entries_) {
    entry.due += 2;
    post_missing(entry);
  }
}

void PostedSends::count_gather(int64_t unit) {
  if (!post_per_pass()) return;
  Entry& entry = entries_[unit];
  // Beyond what a pass needs, the other ranks are likely to do as this one does.
  if (++entry.taken_in_pass > 1) ++entry.due;
  post_missing(entry);
}

void PostedSends::count_repeated_gather(int64_t unit) {
  if (!post_per_pass()) return;
  ++entries_[unit].due;
  post_missing(entries_[unit]);
}

void PostedSends::count_taken(int64_t unit) {
  if (!post_per_pass()) return;
  Entry& entry = entries_[unit];
  const HostCopies* copies = copies_of(entry.unit->parameters());
  if (copies != nullptr) ++entry.states.taken;
  if (copies != nullptr && !copies->reads_owners()) return;
  ++entry.parts.taken;
  ++between_hosts_;
}

std::string PostedSends::last_gathered() const {
  return " (the last unit that was gathered: '" + last_gathered_ + "')";
}

void PostedSends::post_missing(Entry& entry) {
  if (!entry.unit->parameters().comes_and_goes()) return;
  posted_any_ = true;
  Comm& comm = entry.unit->ranks().comm;
  for (int64_t peer = 0; peer < comm.world(); ++peer) {
    if (peer == comm.rank() || !entry.unit->ranks().context.shares_replica_with(peer)) continue;
    try {
      post_missing(entry, peer);
    } catch (const std::exception& error) {
      TORCH_CHECK(false, where(context_.global_rank, entry.unit->name()),
                  "this rank's part of the parameters cannot be sent to rank ",
                  comm.global_rank(peer), last_gathered(), ": ", text_of(error));
    }
  }
}

void PostedSends::post_missing(Entry& entry, int64_t peer) {
  Comm& comm = entry.unit->ranks().comm;
  const UnitParameters& parameters = entry.unit->parameters();
  const HostCopies* copies = copies_of(parameters);
  const bool here = comm.reads(peer);
  if (copies != nullptr && entry.copies.empty()) entry.copies = copies->post_copies(comm);
  std::deque<PostedSend>& parts = entry.parts.sends[peer];
  while (std::ssize(parts) < (here ? 1 : entry.due)) {
    parts.push_back(parameters.post_send(comm, peer));
  }
  if (copies == nullptr || here) return;
  std::deque<PostedSend>& states = entry.states.sends[peer];
  while (std::ssize(states) < entry.due) states.push_back(copies->post_state(comm, peer));
}

void PostedSends::wait_for_shards() {
  if (!context_.shards_parameters()) return;
  if (comm_.way().gathers == Gathers::pulled) return meet_devices();
  if (comm_.way().gathers != Gathers::collective) exchange_taken();
}

void PostedSends::meet_devices() {
  {
    const SideStream::Scope beside(context_.gathering);  // reads of gathers that nobody waited for
    comm_.peer_memory()->meet();
  }
  context_.gathering.join();
}

void PostedSends::exchange_taken() {
  const auto units = static_cast<int64_t>(entries_.size());
  const at::Tensor taken = at::empty({2 * units}, at::TensorOptions().dtype(at::kLong));
  for (int64_t u = 0; u < units; ++u) {
    taken.mutable_data_ptr<int64_t>()[2 * u] = entries_[u].parts.taken;
    taken.mutable_data_ptr<int64_t>()[2 * u + 1] = entries_[u].states.taken;
  }
  const at::Tensor all = comm_.all_gather(Comm::Agreement::shards, taken, [this] {
    return where(context_.global_rank) + current_call() +
           " waited until all ranks had updated their shards";
  });
  const auto* by_rank = all.const_data_ptr<int64_t>();
  for (int64_t u = 0; u < units; ++u) {
    Entry& entry = entries_[u];
    const Unit::Ranks& ranks = entry.unit->ranks();
    for (int64_t peer = 0; peer < ranks.comm.world(); ++peer) {
      if (ranks.comm.reads(peer)) continue;
      const int64_t* const counts = by_rank + (ranks.place(peer) * units + u) * 2;
      const auto forget = [&](Posted& posted, int64_t count) {
        std::deque<PostedSend>& sends = posted.sends[peer];
        for (int64_t n = std::min(count, std::ssize(sends)); n > 0; --n) sends.pop_front();
      };
      forget(entry.parts, counts[0]);
      forget(entry.states, counts[1]);
    }
    entry.parts.taken = entry.states.taken = 0;
    entry.due = kReserve;
  }
  passes_ = 0;
}

OutstandingSends PostedSends::take_outstanding() {
  OutstandingSends outstanding;
  for (Entry& entry : entries_) {
    for (Posted* posted : {&entry.parts, &entry.states}) {
      for (auto& sends : posted->sends) outstanding.posted.push_back(std::move(sends));
      posted->sends.clear();
    }
    outstanding.posted.emplace_back(entry.copies.begin(), entry.copies.end());
  }
  // Also where nothing is posted: others may still take the notices of backwards.
  if (persist() || comm_.way().gathers == Gathers::posted)
    comm_.begin_shutdown(outstanding.handshake);
  return outstanding;
}

}  // namespace zero_ext
