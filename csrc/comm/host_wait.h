// Waits of the host for a device that other ranks may keep waiting.
#pragma once

#include <c10/core/Device.h>

#include "comm/collective_watch.h"

namespace zero_ext {

// wait_on_host() for all that is queued on the current stream: before a copy between host and device.
// The copy would wait for it as well, and know nothing of ranks. `watch`: null for one rank.
void wait_for_stream(c10::Device device, CollectiveWatch* watch);
// After another wait, or an error of the backend: raises where the ranks wait for each other.
void raise_if_ranks_wait(c10::Device device, CollectiveWatch* watch);

}  // namespace zero_ext
