#include "device/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "device/kernel_table.h"

namespace zero_ext {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void order(const c10::Stream& earlier, const c10::Stream& later) {
  if (earlier == later) return;
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

uint64_t capture_id(const c10::Stream& stream) {
  return kernels_on(stream.device_type()).capture_id(stream.native_handle());
}

StreamEvent::StreamEvent(const c10::Stream& stream)
    : stream_(stream), capture_id_(zero_ext::capture_id(stream)), event_(stream.device_type()) {
  event_.record(stream);
}

void StreamEvent::block(const c10::Stream& later) const {
  if (capture_id(later) == capture_id_) event_.block(later);
}

SideStream::SideStream(c10::Device device) {
  if (device.is_cpu()) return;
  // From the pool that torch.cuda.Stream() does not use: with a stream that the caller uses too,
  // the side stream's work would wait for the caller's.
  const c10::impl::VirtualGuardImpl device_guard(device.type());
  stream_ = device_guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

SideStream::Scope::Scope(const SideStream& side) {
  if (!side.stream_.has_value()) return;
  order(current_stream(side.stream_->device()), *side.stream_);
  guard_.reset_stream(*side.stream_);
}

SideStream::Scope::Scope(const SideStream& side, const StreamEvent& point) {
  if (!side.stream_.has_value()) return;
  point.block(*side.stream_);
  guard_.reset_stream(*side.stream_);
}

void SideStream::join() const {
  if (stream_.has_value()) StreamEvent(*stream_).block(current_stream(stream_->device()));
}

void SideStream::synchronize() const {
  if (stream_.has_value()) stream_->synchronize();
}

}  // namespace zero_ext
