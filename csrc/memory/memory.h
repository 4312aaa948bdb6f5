// Memory: bytes of a device or of the host, as the engine's buffers need them.
//
// Everything on a device is queued on its current stream; memory that is given back is reused by
// that stream first, as its allocator does it.
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
  // Host memory that `pinned_for` copies to and from without waiting; CPU: ordinary memory.
  c10::DeviceType pinned_for = c10::kCPU;
};

// Not initialised.
c10::DataPtr allocate_at(const Place& place, size_t bytes);
// The values of a whole block of allocate_at()'s are needed no more: the system may take the pages
// of a large one on the host when it runs short (MADV_FREE). What is written next is there; what
// was not written is what it was, or zero. Of huge pages 0.5 µs per MiB, of small ones 50 to 90.
void discard(const Place& place, void* data, size_t bytes);

// Pages of the host's, a block's own.
struct Mapping {
  void* memory;
  size_t mapped;
  void* begin;   // of a huge page
  size_t bytes;  // from there
};

// Large blocks of host memory that come and go in every step.
//
// They are not malloc's: when malloc gets one back at the end of its heap it returns that to the
// system, and torch's next tensors meet fresh pages (a stage-3 step of the GPT benchmark: 1.12 of
// plain PyTorch's time with malloc's memory, 1.08 without; means of six runs, 6,000 to 16,000 page
// faults a step). A block that is given back stays mapped, and the system may take its pages when
// it runs short (MADV_FREE); what it has left, the next block finds. Fresh huge pages would have to
// be made and cleared: the same step took 0.655 of FSDP2's time with them, 0.63 without (medians).
class TransientMemory : public std::enable_shared_from_this<TransientMemory> {
 public:
  ~TransientMemory() { trim(); }
  // Not initialised. Smaller blocks, and those of a device, are as those of allocate_at().
  c10::DataPtr allocate(const Place& place, size_t bytes);
  // Unmaps what is not in use.
  void trim();

 private:
  struct Lease;
  static void end_lease(void* lease);
  // The smallest one that is large enough, if there is any.
  std::optional<Mapping> take_idle(size_t bytes);

  std::mutex mutex_;
  std::vector<Mapping> idle_;  // never more than were in use at once
};

// Raw memory, each side on its device. Between pinned host memory and a device the copy is queued
// on the device's current stream, else it is made when this returns.
void copy_bytes(void* target, c10::Device target_device, const void* source,
                c10::Device source_device, size_t bytes);
void zero_bytes(void* target, c10::Device device, size_t bytes);

}  // namespace zero_ext
