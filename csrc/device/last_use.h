// LastUse: orders the work of an engine on a device: what begins on another stream than the work
// before it waits for that work. On the host it does nothing.
//
// Owner:   EngineParts.
// Threads: called only under the engine's lock.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

#include "device/streams.h"

namespace zero_ext {

class LastUse {
 public:
  explicit LastUse(c10::Device device) : device_(device) {}
  void remember() {
    if (!device_.is_cpu()) event_.emplace(current_stream(device_));
  }
  // The current stream goes on after that.
  void follow() const {
    if (!event_.has_value()) return;
    const c10::Stream stream = current_stream(device_);
    if (event_->stream() != stream) event_->block(stream);
  }

 private:
  const c10::Device device_;
  std::optional<StreamEvent> event_;
};

}  // namespace zero_ext
