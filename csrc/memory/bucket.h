// Bucket: the staging memory of one unit's reduction. BucketPool: the two of them that an engine
// owns.
//
// Owner:     BucketPool. A UnitReduction borrows a bucket (Note [Reduction order] in
//            reductions.h), until its reduction is finished.
// Threads:   called only under Engine::mutex_.
// Invariant: there are at most kSize buckets that come back; memory is kept, because fresh memory
//            costs more than the copy. Between backwards the system may take it where it runs
//            short.
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
  // [numel] of `dtype`: what the other ranks sent, or what was sent to the host.
  at::Tensor received(at::ScalarType dtype, int64_t numel) {
    return typed(received_, places_.received, dtype, numel);
  }
  // On a device: its memory was used last by what the current stream has been given so far; and the
  // current stream goes on when that is done.
  void mark_used();
  void wait_until_unused() const;
  // Nobody reads it any more. On the host it keeps its memory, whose pages the system may take.
  void discard();

 private:
  // A storage of its own where the old one is too small: a device's backend may still read that.
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
  // A free bucket, or null where all are lent.
  std::unique_ptr<Bucket> try_acquire();
  void give_back(std::unique_ptr<Bucket> bucket);
  // Until the next backward none is needed.
  void discard();
  // A bucket whose reduction will never finish (its backward threw) is not coming back.
  void forget() { --lent_; }

 private:
  std::shared_ptr<MemoryCounter> counter_;
  BucketPlaces places_;
  std::vector<std::unique_ptr<Bucket>> free_;
  int64_t lent_ = 0;
};

}  // namespace zero_ext
