// Bucket: the staging memory of one unit's reduction. BucketPool: the buckets of an engine.
//
// Owner:     BucketPool. A UnitReduction borrows a bucket when its reduction is due or shortly before (Note
//            [Reduction order] in reductions.h), and returns it when its reduction is finished.
// Threads:   called only under the engine's lock.
// Invariant: at most kSize buckets are lent and will be returned. A bucket keeps its memory: fresh
//            memory costs more than the copy. Between backwards the system may reclaim it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "device/streams.h"
#include "memory/flat_buffer.h"

namespace zero_ext {

struct BucketPlaces {
  Place gradients;
  Place received;
};

class Bucket {
 public:
  Bucket(const std::shared_ptr<MemoryCounter>& counter, const BucketPlaces& places);
  ~Bucket();
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;

  // [numel] of `dtype`: this rank's gradients, laid out as the unit.
  at::Tensor gradients(at::ScalarType dtype, int64_t numel) {
    return typed(gradients_, places_.gradients, dtype, numel);
  }
  // [numel] of `dtype`: the other ranks' gradients, or a copy on the host of what was sent.
  at::Tensor received(at::ScalarType dtype, int64_t numel) {
    return typed(received_, places_.received, dtype, numel);
  }
  // On a device: records the work queued on the current stream as the last use of this memory.
  void mark_used();
  // On a device: the current stream continues when the recorded last use is done.
  void wait_until_unused() const;
  // The values are not needed any more. On the host the memory stays mapped, and the system may
  // reclaim its pages.
  void discard();

 private:
  // Makes a new storage where the old one is too small. The old one is not resized, because a
  // device's backend may still read it.
  at::Tensor typed(FlatBuffer& buffer, const Place& place, at::ScalarType dtype, int64_t numel);

  std::shared_ptr<MemoryCounter> counter_;
  BucketPlaces places_;
  FlatBuffer gradients_;
  FlatBuffer received_;
  std::optional<StreamEvent> used_;
};

class BucketPool {
 public:
  BucketPool(std::shared_ptr<MemoryCounter> counter, const BucketPlaces& places)
      : counter_(std::move(counter)), places_(places) {}

  static constexpr int64_t kSize = 2;
  // A free bucket, or null where all buckets are lent.
  std::unique_ptr<Bucket> try_acquire();
  void give_back(std::unique_ptr<Bucket> bucket);
  // Discards the values of all free buckets, which the next backward overwrites.
  void discard();
  // Stops counting a lent bucket whose reduction will never finish, because its backward threw.
  void forget() { --lent_; }

 private:
  std::shared_ptr<MemoryCounter> counter_;
  BucketPlaces places_;
  std::vector<std::unique_ptr<Bucket>> free_;
  int64_t lent_ = 0;
};

}  // namespace zero_ext
