#include "memory/bucket.h"

#include <utility>

namespace zero_ext {

Bucket::Bucket(const std::shared_ptr<MemoryCounter>& counter, const BucketPlaces& places)
    : counter_(counter),
      places_(places),
      gradients_(counter, Held::bucket, places.gradients, at::kByte, 0),
      received_(counter, Held::bucket, places.received, at::kByte, 0) {}

Bucket::~Bucket() {
  if (!used_.has_value()) return;
  for (const FlatBuffer* buffer : {&gradients_, &received_}) buffer->record_use(used_->stream());
}

void Bucket::mark_used() {
  const c10::Device device = places_.gradients.device;
  if (!device.is_cpu()) used_.emplace(current_stream(device));
}

void Bucket::wait_until_unused() const {
  if (used_.has_value()) used_->block(current_stream(places_.gradients.device));
}

void Bucket::discard() {
  gradients_.discard();
  received_.discard();
}

at::Tensor Bucket::typed(FlatBuffer& buffer, const Place& place, at::ScalarType dtype,
                         int64_t numel) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes > buffer.numel()) {
    buffer.drop();
    buffer = FlatBuffer(counter_, Held::bucket, place, at::kByte, bytes);
  }
  return buffer.typed(dtype, numel);
}

std::unique_ptr<Bucket> BucketPool::try_acquire() {
  if (free_.empty()) {
    if (lent_ == kSize) return nullptr;
    free_.push_back(std::make_unique<Bucket>(counter_, places_));
  }
  std::unique_ptr<Bucket> bucket = std::move(free_.back());
  free_.pop_back();
  ++lent_;
  return bucket;
}

void BucketPool::give_back(std::unique_ptr<Bucket> bucket) {
  --lent_;
  free_.push_back(std::move(bucket));
}

void BucketPool::discard() {
  for (const std::unique_ptr<Bucket>& bucket : free_) bucket->discard();
}

}  // namespace zero_ext
