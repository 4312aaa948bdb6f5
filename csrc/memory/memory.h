// Memory: bytes of a device or of the host for the engine's buffers.
//
// Work on a device is queued on its current stream. Memory that is freed is reused in the order of
// that stream, as the device's allocator does it.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace zero_ext {

// Where a buffer lies.
struct Place {
  c10::Device device = c10::kCPU;
  // Not CPU: pinned host memory, so that copies to and from this device do not wait.
  c10::DeviceType pinned_for = c10::kCPU;
};

// Not initialised.
c10::DataPtr allocate_at(const Place& place, size_t bytes);
// Declares that the values of a whole block of allocate_at() are not needed any more. The system
// may reclaim the pages of a large block on the host when memory runs short (MADV_FREE). Bytes that
// are written afterwards are kept; other bytes are as before, or zero. Costs 0.5 µs per MiB of huge
// pages, and 50 to 90 µs per MiB of small ones.
void discard(const Place& place, void* data, size_t bytes);

// The pages of one block of host memory.
struct Mapping {
  void* memory;
  size_t mapped;
  void* begin;   // the first boundary of a huge page
  size_t bytes;  // usable from `begin` on
};

// TransientMemory: large blocks of host memory that are allocated and freed in every step.
//
// They are mapped, not malloc's. When a block at the end of malloc's heap is freed, malloc returns
// it to the system, and torch's next tensors get fresh pages, 6,000 to 16,000 a step. A stage-3
// step of the GPT benchmark took 1.12 of plain PyTorch's time with malloc, and takes 1.08 without
// (means of six runs).
// A freed block stays mapped, and the system may reclaim its pages when memory runs short
// (MADV_FREE). The next block reuses the pages that are left. Fresh huge pages would have to be
// made and cleared: the same step took 0.655 of FSDP2's time with them, 0.63 without (medians).
class TransientMemory : public std::enable_shared_from_this<TransientMemory> {
 public:
  ~TransientMemory() { trim(); }
  // Not initialised. Small blocks, and blocks of a device, come from allocate_at().
  c10::DataPtr allocate(const Place& place, size_t bytes);
  // Unmaps the blocks that are not in use.
  void trim();

 private:
  struct Lease;
  static void end_lease(void* lease);
  // The smallest idle block that is large enough, if there is one.
  std::optional<Mapping> take_idle(size_t bytes);

  std::mutex mutex_;
  std::vector<Mapping> idle_;  // never more blocks than were in use at once
};

// Copies raw memory between devices. Between pinned host memory and a device the copy is queued on
// the device's current stream; otherwise it is complete on return.
void copy_bytes(void* target, c10::Device target_device, const void* source,
                c10::Device source_device, size_t bytes);
void zero_bytes(void* target, c10::Device device, size_t bytes);

}  // namespace zero_ext
