#include "comm/gather_order.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "comm/local/shared_host_transport.h"
#include "core/errors.h"

namespace zero_ext {
namespace {

// A gather's number, and two ranks that differ there, in one word.
struct Difference {
  int64_t number;
  int64_t a;
  int64_t b;

  uint64_t packed() const {
    return static_cast<uint64_t>(number + 1) << 32 | static_cast<uint64_t>(a) << 16 |
           static_cast<uint64_t>(b);
  }
  static Difference of(uint64_t packed) {
    return {.number = static_cast<int64_t>(packed >> 32) - 1,
            .a = static_cast<int64_t>(packed >> 16 & 0xffff),
            .b = static_cast<int64_t>(packed & 0xffff)};
  }
};

}  // namespace

GatherOrder::GatherOrder(std::shared_ptr<SharedHostTransport> transport, Ranks ranks)
    : transport_(std::move(transport)), ranks_(std::move(ranks)) {}

int64_t GatherOrder::count() const { return transport_->gathers_of(ranks_.own).count(); }

void GatherOrder::enter(int64_t unit) {
  raise_if_ranks_differ();
  SharedGathers& own = transport_->gathers_of(ranks_.own);
  const int64_t n = own.count();
  const int64_t end = ranks_.first + ranks_.count;
  for (int64_t rank = ranks_.first; rank < end; ++rank) {
    const SharedGathers& theirs = transport_->gathers_of(rank);
    TORCH_CHECK(n - theirs.count() < SharedGathers::kKept, where(global_rank(ranks_.own)), "rank ",
                global_rank(rank), " has not come for the last ", SharedGathers::kKept,
                " gathers. Run the same forwards and backwards on every rank.");
  }
  // Shown before it is compared: of two ranks that differ at least one sees it.
  own.append(unit);
  transport_->ring_all();
  for (int64_t rank = ranks_.first; rank < end; ++rank) {
    const SharedGathers& theirs = transport_->gathers_of(rank);
    if (theirs.count() <= n || theirs[n] == unit) continue;
    const auto [a, b] = std::minmax(ranks_.own, rank);
    const Difference difference{.number = n, .a = a, .b = b};
    transport_->gathers_of(0).note_difference(difference.packed());
    raise_if_ranks_differ();
  }
}

void GatherOrder::show_reductions(int64_t started) {
  transport_->gathers_of(ranks_.own).show_reductions(started);
  transport_->ring_all();
}

GatherOrder::Shown GatherOrder::most_reductions() const {
  Shown most{.reductions = 0, .rank = 0};
  for (int64_t rank = 0; rank < transport_->world(); ++rank) {
    const int64_t theirs = transport_->gathers_of(rank).reductions();
    if (theirs > most.reductions && !transport_->has_come(rank)) most = {theirs, rank};
  }
  return most;
}

int64_t GatherOrder::next(int64_t end, bool met) const {
  const int64_t n = count();
  for (int64_t rank = ranks_.first; n < end && rank < ranks_.first + ranks_.count; ++rank) {
    const SharedGathers& theirs = transport_->gathers_of(rank);
    // In this order: what it entered before it came to the agreement.
    if (theirs.count() > n && (met || !transport_->has_come(rank))) return theirs[n];
  }
  return -1;
}

void GatherOrder::raise_if_ranks_differ() const {
  const uint64_t packed = transport_->gathers_of(0).difference();
  if (packed == 0) return;
  const Difference found = Difference::of(packed);
  const auto described = [&](int64_t rank) {
    return "rank " + std::to_string(global_rank(rank)) + " gathers unit '" +
           units_.at(transport_->gathers_of(rank)[found.number]) + "'";
  };
  TORCH_CHECK(false, where(global_rank(ranks_.own)), described(found.a), " where ",
              described(found.b),
              ". On this device every rank must enter the same units in the same order, see"
              " docs/uneven_batches.md.");
}

}  // namespace zero_ext
