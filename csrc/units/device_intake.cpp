#include "units/device_intake.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>

#include <iterator>
#include <vector>

#include "device/kernel_table.h"
#include "device/streams.h"
#include "kernels/kernels.h"
#include "memory/storage.h"

namespace zero_ext {

void DeviceIntake::begin_on_stream() {
  // Sums are set aside on it before the first gradient, which may come on another stream.
  last_stream_ = current_stream(context_.compute.device());
}

void DeviceIntake::follow_stream() {
  const c10::Stream stream = current_stream(context_.compute.device());
  if (last_stream_ == stream) return;
  if (last_stream_.has_value()) {
    // Waiting gradients are launched on their own stream, to which their memory belongs.
    const c10::StreamGuard before(*last_stream_);
    launch_waiting();
    order(*last_stream_, stream);
  }
  last_stream_ = stream;
}

void DeviceIntake::flush() {
  follow_stream();
  launch_waiting();
}

void DeviceIntake::drop_waiting() {
  waiting_.clear();
  follow_stream();
}

void DeviceIntake::add(int64_t i, const at::Tensor& grad, bool first, float scale) {
  if (!first) launch_waiting();  // the first one may be among them
  const bool direct = path_ == GradientPath::direct;
  waiting_.add(i, grad, direct ? sums_.fresh(i) : sums_.local_fresh(i), scale);
  if (direct) sums_.mark_summed(i);
  if (path_ == GradientPath::local) sums_.mark_local_summed(i);
  if (arrivals_.complete()) launch_waiting();
}

void DeviceIntake::launch_waiting() { waiting_.add_to(own_sums()); }

GradientBatch::SumOf DeviceIntake::own_sums() const {
  return [this](int64_t, const Piece& piece) { return sums_.local(piece, piece.slot_begin); };
}

void DeviceIntake::launch_held(const std::function<bool(int64_t)>& first,
                               const std::function<void(GradientBatch&)>& launch) {
  const c10::Stream stream = current_stream(context_.compute.device());
  c10::DeviceAllocator* allocator = c10::getDeviceAllocator(stream.device_type());
  for (size_t k = 0;; ++k) {
    GradientBatch batch(context_, layout_, first_record_);
    for (int64_t i = 0; i < layout_.size(); ++i) {
      if (held_[i].size() <= k) continue;
      const at::Tensor& grad = held_[i][k];
      // Its memory may belong to another stream, which this one follows.
      allocator->recordStream(grad.storage().data_ptr(), stream);
      batch.add(i, grad, k == 0 && first(i), scale_);
    }
    if (batch.empty()) break;
    launch(batch);
  }
  for (auto& grads : held_) grads.clear();
}

void DeviceIntake::add_held_to(const GradientBatch::SumOf& sum_of) {
  launch_held([this](int64_t i) { return sums_.local_fresh(i); },
              [&](GradientBatch& batch) { batch.add_to(sum_of); });
}

void DeviceIntake::add_held_to_local() { add_held_to(own_sums()); }

void DeviceIntake::message_was_lent() {
  // What this rank does not contribute, gaps included, is zeros.
  follow_stream();
  message_.zero_();
}

void DeviceIntake::stage() {
  if (path_ == GradientPath::local) return stage_local();
  launch_held([](int64_t) { return true; },
              [this](GradientBatch& batch) { batch.copy_into(message_); });
}

void DeviceIntake::stage_local() {
  const KernelTable& table = context_.compute;
  // A message in half precision is rounded once, from the fp32 sum.
  const bool in_place = message_.scalar_type() == at::kFloat;
  at::Tensor sums = message_;
  if (!in_place) {
    sums = context_.on_device(layout_.padded_numel(), at::kFloat);
    sums.zero_();
  }
  auto* first = sums.mutable_data_ptr<float>();
  const auto sum_of = [&](int64_t i, const Piece& piece) {
    return first + layout_.slot(i).offset + piece.slot_begin;
  };
  std::vector<kernels::CopySegment> copies;
  for (int64_t i = 0; i < layout_.size(); ++i) {
    if (sums_.local_fresh(i)) continue;
    for (const Piece& piece : layout_.pieces(i)) {
      copies.push_back({.source = sums_.local(piece, piece.slot_begin),
                        .target = sum_of(i, piece),
                        .numel = piece.numel});
    }
  }
  check(table->flatten(copies.data(), std::ssize(copies), kernels::DType::f32, kernels::DType::f32,
                       kernels::Write::overwrite, /*nonfinite=*/nullptr, table.launch()),
        "flatten");
  add_held_to(sum_of);
  if (in_place) return;
  check(table->cast(first, kernels::DType::f32, in_message(0), dtype_of(message_.scalar_type()),
                    layout_.padded_numel(), table.launch()),
        "cast");
}

}  // namespace zero_ext
