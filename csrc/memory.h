// Memory: bytes of a device or of the host, as the engine's buffers need them.
//
// Everything on a device is queued on its current stream; memory that is given back is reused by
// that stream first, as its allocator does it.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>

namespace zero_ext {

// Where a buffer lies.
struct Place {
  c10::Device device = c10::kCPU;
  // Host memory that `pinned_for` copies to and from without waiting; CPU: ordinary memory.
  c10::DeviceType pinned_for = c10::kCPU;
};

// Not initialised.
c10::DataPtr allocate_at(const Place& place, size_t bytes);
// For memory that comes and goes in every step. On the host, large blocks of it are not malloc's:
// when malloc gets one back at the end of its heap it returns that to the system, and torch's next
// tensors meet fresh pages (a stage-3 step of the GPT benchmark: 1.12 of plain PyTorch's time with
// malloc's memory, 1.08 without; means of six runs, 6,000 to 16,000 page faults a step).
c10::DataPtr allocate_transient(const Place& place, size_t bytes);

// Raw memory, each side on its device. Between pinned host memory and a device the copy is queued
// on the device's current stream, else it is made when this returns.
void copy_bytes(void* target, c10::Device target_device, const void* source,
                c10::Device source_device, size_t bytes);
void zero_bytes(void* target, c10::Device device, size_t bytes);

}  // namespace zero_ext
