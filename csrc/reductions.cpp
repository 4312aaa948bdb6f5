#include "reductions.h"

#include <memory>
#include <utility>

namespace zero_ext {

void Reductions::begin(float scale) {
  scale_ = scale;
  ++round_;
  turn_ = 0;
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
  while (!in_flight_.empty()) finish_oldest();
  context_.reducing.join();
  ++finished_;
}

void Reductions::abort(int64_t units) {
  context_.reducing.join();
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
