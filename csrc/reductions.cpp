#include "reductions.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "check.h"

namespace zero_ext {

void Reductions::begin(float scale) {
  scale_ = scale;
  ++round_;
  turn_ = 0;
  contributed_.clear();
}

void Reductions::lend_bucket(Unit& unit) {
  std::unique_ptr<Bucket> bucket = pool_.try_acquire();
  while (bucket == nullptr && !in_flight_.empty()) {
    finish_oldest();
    bucket = pool_.try_acquire();
  }
  if (bucket == nullptr) {
    bucket = pool_.acquire_extra();
    ++extra_buckets_;
  }
  unit.lend_bucket(std::move(bucket));
}

void Reductions::start_ready() {
  for (; turn_ < parameters_.unit_count() && parameters_.unit(turn_).complete(); ++turn_) {
    Unit& unit = parameters_.unit(turn_);
    if (unit.needs_bucket_to_reduce()) lend_bucket(unit);
    unit.start_reduce(comm_, round_);
    if (counts_users()) {
      for (int64_t i = 0; i < unit.layout().size(); ++i) {
        contributed_.push_back(unit.contributes(i) ? 1 : 0);
      }
    }
    in_flight_.push_back(turn_);
    ++started_;
  }
}

void Reductions::finish_oldest() {
  Unit& unit = parameters_.unit(in_flight_.front());
  if (std::unique_ptr<Bucket> bucket = unit.finish_reduce(scale_)) {
    pool_.give_back(std::move(bucket));
  }
  in_flight_.pop_front();
  // Every rank has sent its part of this one, and is in no earlier backward any more.
  if (!orphans_.empty()) drop_orphans();
}

void Reductions::drop_orphans() {
  // A device may still have to run what they began, before the reduction that this stream has
  // waited for.
  const SideStream::Scope beside(context_.reducing);
  for (Unit::Orphan& orphan : orphans_) {
    orphan.pending.abandon();
    orphan.bucket->mark_used();
  }
  orphans_.clear();
}

void Reductions::finish() {
  for (int64_t u = turn_; u < parameters_.unit_count(); ++u) parameters_.unit(u).expect_no_more();
  start_ready();
  if (counts_users()) start_counting();
  while (!in_flight_.empty()) finish_oldest();
  if (counts_users()) finish_counting();
  context_.reducing.join();
  ++finished_;
}

bool Reductions::counts_users() const {
  const bool sums_directly = comm_.world() == 1 && !context_.offloads();
  return !sums_directly && !flags_come_along(context_, comm_);
}

void Reductions::start_counting() {
  const SideStream::Scope beside(context_.reducing);
  const auto slots = static_cast<int64_t>(contributed_.size());
  const bool on_device = comm_.on_device();
  const auto options = at::TensorOptions().dtype(at::kInt);
  if (on_device && contributes_all()) {
    counts_ = at::ones({slots}, options.device(context_.compute.device()));
  } else {
    counts_ = at::empty({slots}, options.pinned_memory(on_device));
    std::copy(contributed_.begin(), contributed_.end(), counts_.mutable_data_ptr<int32_t>());
    if (on_device) counts_ = counts_.to(context_.compute.device(), /*non_blocking=*/true);
  }
  comm_.all_reduce_sum(counts_, counting_);
}

void Reductions::finish_counting() {
  const SideStream::Scope beside(context_.reducing);
  counting_.wait([this] {
    return where(context_.rank) +
           "waited to hear which parameters the other ranks used in"
           " backward " +
           std::to_string(round_);
  });
  // Where this rank uses every slot, nobody needs to wait for what the device knows.
  const at::Tensor counts =
      contributes_all() ? at::ones({counts_.numel()}, at::kInt) : counts_.cpu();
  const auto* count = counts.const_data_ptr<int32_t>();
  for (int64_t u = 0; u < parameters_.unit_count(); ++u) {
    Unit& unit = parameters_.unit(u);
    unit.take_counts(count);
    count += unit.layout().size();
  }
  counts_.reset();
}

bool Reductions::contributes_all() const {
  return std::find(contributed_.begin(), contributed_.end(), 0) == contributed_.end();
}

void Reductions::abort(int64_t units) {
  context_.reducing.join();
  counting_ = Pending();
  counts_.reset();
  const size_t orphans_before = orphans_.size();
  for (int64_t u = 0; u < units; ++u) {
    if (std::unique_ptr<Bucket> bucket = parameters_.unit(u).abort_backward(orphans_)) {
      pool_.give_back(std::move(bucket));
    }
  }
  for (size_t o = orphans_before; o < orphans_.size(); ++o) pool_.forget();
  in_flight_.clear();
}

}  // namespace zero_ext
