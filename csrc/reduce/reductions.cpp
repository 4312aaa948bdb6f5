#include "reduce/reductions.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include "core/errors.h"

namespace zero_ext {
namespace {

// A unit whose message is that much smaller than the largest comes last at first.
constexpr int64_t kSmall = 64;
constexpr size_t kNever = std::numeric_limits<size_t>::max();
// Units that fill a bucket: those of the next turns.
constexpr size_t kAtOnce = BucketPool::kSize;

}  // namespace

void Reductions::begin(float scale, bool hidden) {
  scale_ = scale;
  finished_.set_epoch(comm_.next_epoch(Comm::Kind::reduction, finished_.epoch()));
  // Collectives have no numbers: which ones belong together their order alone says.
  const bool numbered = context_.reduction == Reduction::exchange && !comm_.on_device();
  backward_ = numbered ? finished_.epoch() : started_;
  in_epoch_ = true;
  sent_all_ = false;
  next_ = 0;
  const auto units = static_cast<size_t>(parameters_.unit_count());
  completed_ = 0;
  completed_at_.assign(units, kNever);
  forget_contributions();
  largest_bytes_ = 0;
  for (const auto& unit : parameters_.units()) {
    largest_bytes_ = std::max(largest_bytes_, unit->message_bytes());
  }
  if (order_.size() != units) {
    knows_order_ = false;
    order_.resize(units);
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_partition(order_.begin(), order_.end(),
                          [this](int64_t u) { return !is_small(parameters_.unit(u)); });
  }
  reduces_late_ = can_reduce_late();
  any_late_ = false;
  early_ = units;
  if (hidden) early_ = reduces_late_ && units > 0 ? units - 1 : 0;
}

bool Reductions::can_reduce_late() const {
  if (!comm_.on_device()) return true;
  if (context_.shards_parameters()) return false;
  const bool answers_soon = !knows_order_ || learned_hidden_;
  return answers_soon && capture_id(current_stream(context_.compute.device())) == 0;
}

bool Reductions::is_small(const Unit& unit) const {
  return unit.message_bytes() * kSmall <= largest_bytes_;
}

void Reductions::prepare(int64_t u) {
  Unit& unit = parameters_.unit(u);
  // On a device gradients are held until their unit is complete anyway, for one launch.
  if (!unit.needs_bucket() || !context_.compute.on_host()) return;
  for (size_t t = next_; t < std::min(next_ + kAtOnce, early_); ++t) {
    if (order_[t] == u) lend_bucket(unit);
  }
}

void Reductions::arrived(int64_t u) {
  const Unit& unit = parameters_.unit(u);
  if (unit.arrivals().complete() && completed_at_[u] == kNever) completed_at_[u] = completed_++;
  any_late_ = any_late_ || unit.arrivals().late();
  start_ready();
}

std::vector<int64_t> Reductions::completed() const {
  // Units may have come since: then the next backward tells.
  const bool all = std::ssize(order_) == parameters_.unit_count();
  if (!all || completed_ == 0) return {};
  std::vector<int64_t> units = order_;
  std::stable_sort(units.begin(), units.end(),
                   [this](int64_t a, int64_t b) { return completed_at_[a] < completed_at_[b]; });
  return units;
}

void Reductions::set_order(std::vector<int64_t> order, bool hidden) {
  order_ = std::move(order);
  learned_hidden_ = hidden;
  knows_order_ = true;
}

void Reductions::lend_bucket(Unit& unit) {
  std::unique_ptr<Bucket> bucket = pool_.try_acquire();
  while (bucket == nullptr && !in_flight_.empty()) {
    finish_oldest();
    bucket = pool_.try_acquire();
  }
  TORCH_INTERNAL_ASSERT(bucket != nullptr);
  unit.lend_bucket(std::move(bucket));
}

void Reductions::start_ready() {
  for (; next_ < early_ && parameters_.unit(order_[next_]).arrivals().complete(); ++next_) {
    start(order_[next_]);
  }
  // At once: whoever throws from now on has sent all that the other ranks wait for.
  const bool all_started = next_ == order_.size() && !order_.empty();
  if (all_started && counts_users() && !counts_.defined()) start_counting();
  sent_all_ = all_started;
}

void Reductions::start(int64_t u) {
  Unit& unit = parameters_.unit(u);
  if (unit.needs_bucket_to_reduce()) lend_bucket(unit);
  name_errors([&] { return unit.waiting(); },
              [&] { unit.start_reduce(comm_, finished_.epoch(), any_late_); });
  if (counts_users()) {
    counted_units_.push_back(u);
    for (int64_t i = 0; i < unit.layout().size(); ++i) {
      contributed_.push_back(unit.contributes(i) ? 1 : 0);
      contributes_all_ = contributes_all_ && unit.contributes(i);
    }
  }
  in_flight_.push_back(u);
  ++started_;
}

void Reductions::finish_oldest() {
  Unit& unit = parameters_.unit(in_flight_.front());
  if (std::unique_ptr<Bucket> bucket = unit.finish_reduce(scale_)) {
    pool_.give_back(std::move(bucket));
  }
  in_flight_.pop_front();
  any_late_ = any_late_ || unit.more_to_come();
  // Every rank has sent its part of this one, and is in no earlier backward any more.
  if (!abandoned_.empty()) drop_abandoned();
}

void Reductions::drop_abandoned() {
  // A device may still have to run what they began, before the reduction that this stream has
  // waited for.
  const SideStream::Scope beside(context_.reducing);
  for (Unit::AbandonedReduction& reduction : abandoned_) {
    reduction.pending.abandon();
    if (reduction.bucket != nullptr) reduction.bucket->mark_used();
  }
  abandoned_.clear();
}

void Reductions::finish() {
  early_ = order_.size();
  for (size_t t = next_; t < order_.size(); ++t) parameters_.unit(order_[t]).arrivals().close();
  start_ready();
  finish_started();
  if (reduces_late_ && any_late_) reduce_late();
  context_.reducing.join();
  // Its messages were all here, but it will not add them up.
  const int64_t gone = comm_.who_abandoned(Comm::Kind::reduction, finished_.epoch());
  TORCH_CHECK(gone < 0, where(context_.global_rank), "rank ", comm_.global_rank(gone),
              " has given up waiting for this rank in backward ", finished_.epoch(),
              ". Repeat the backward on every rank.");
  pool_.discard();
}

void Reductions::finish_started() {
  while (!in_flight_.empty()) finish_oldest();
  if (counts_.defined()) finish_counting();
}

void Reductions::reduce_late() {
  const int64_t units = parameters_.unit_count();
  at::Tensor late = at::zeros({units}, at::kLong);
  auto* mine = late.mutable_data_ptr<int64_t>();
  for (int64_t u = 0; u < units; ++u) mine[u] = parameters_.unit(u).arrivals().late() ? 1 : 0;
  late = comm_.all_gather(Comm::Agreement::late_gradients, late, [this] {
    return where(context_.global_rank) +
           "waited to hear which gradients the other ranks have to reduce" +
           " once more in backward " + std::to_string(finished_.epoch());
  });
  late = late.sum(0);
  forget_contributions();
  sent_all_ = false;
  for (const int64_t u : order_) {
    if (late.const_data_ptr<int64_t>()[u] == 0) continue;
    parameters_.unit(u).arrivals().reopen_for_late_gradients();
    start(u);
  }
  if (counts_users()) start_counting();
  sent_all_ = true;
  finish_started();
}

bool Reductions::counts_users() const {
  const bool sums_directly = comm_.world() == 1 && !context_.offloads();
  return !sums_directly && !flags_come_along(context_, comm_);
}

void Reductions::start_counting() {
  const SideStream::Scope beside(context_.reducing);
  contributed_.push_back(any_late_ ? 1 : 0);
  const auto count = std::ssize(contributed_);
  const bool on_device = comm_.on_device();
  const auto options = at::TensorOptions().dtype(at::kInt);
  if (on_device && contributes_all_ && !reduces_late_) {
    counts_ = at::ones({count}, options.device(context_.compute.device()));
  } else {
    counts_ = at::empty({count}, options.pinned_memory(on_device));
    std::copy(contributed_.begin(), contributed_.end(), counts_.mutable_data_ptr<int32_t>());
    if (on_device) counts_ = counts_.to(context_.compute.device(), /*non_blocking=*/true);
  }
  comm_.all_reduce_sum(counts_, counting_);
}

void Reductions::finish_counting() {
  const SideStream::Scope beside(context_.reducing);
  counting_.wait([this] {
    return where(context_.global_rank) +
           "waited to hear which parameters the other ranks used in"
           " backward " +
           std::to_string(finished_.epoch());
  });
  // Where this rank uses every slot, nobody needs to wait for what the device knows.
  const bool needs_answer = reduces_late_ || !contributes_all_;
  const at::Tensor counts = needs_answer ? counts_.cpu() : at::ones({counts_.numel()}, at::kInt);
  const auto* count = counts.const_data_ptr<int32_t>();
  for (const int64_t u : counted_units_) {
    Unit& unit = parameters_.unit(u);
    unit.take_counts(count);
    count += unit.layout().size();
  }
  any_late_ = *count > 0;
  counts_.reset();
}

void Reductions::forget_contributions() {
  counted_units_.clear();
  contributed_.clear();
  contributes_all_ = true;
}

void Reductions::abort(int64_t units) {
  if (std::exchange(in_epoch_, false)) {
    const auto exit = sent_all_ ? Comm::Exit::sent_all : Comm::Exit::early;
    comm_.leave_epoch(Comm::Kind::reduction, finished_.epoch(), exit);
  }
  context_.reducing.join();
  const size_t abandoned_before = abandoned_.size();
  for (int64_t u = 0; u < units; ++u) {
    if (std::unique_ptr<Bucket> bucket = parameters_.unit(u).abort_backward(abandoned_)) {
      pool_.give_back(std::move(bucket));
    }
  }
  for (size_t o = abandoned_before; o < abandoned_.size(); ++o) pool_.forget();
  if (counts_.defined())
    abandoned_.push_back({std::move(counting_), nullptr, {std::move(counts_)}});
  counting_ = Pending();
  counts_.reset();
  in_flight_.clear();
}

}  // namespace zero_ext
