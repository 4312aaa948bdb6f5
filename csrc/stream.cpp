#include "stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

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

SideStream::SideStream(c10::Device device) {
  if (device.is_cpu()) return;
  stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

SideStream::Scope::Scope(const SideStream& side) {
  if (!side.stream_.has_value()) return;
  order(current_stream(side.stream_->device()), *side.stream_);
  guard_.reset_stream(*side.stream_);
  side.used_ = true;
}

void SideStream::join() const {
  if (used_) order(*stream_, current_stream(stream_->device()));
}

}  // namespace zero_ext
