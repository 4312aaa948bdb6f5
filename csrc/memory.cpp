#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace zero_ext {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;

// Flat buffers are long-lived and large. Huge pages make their first touch several times cheaper
// and spare TLB misses.
c10::DataPtr allocate_host(size_t bytes) {
  const bool huge = bytes >= 2 * kHugePage;
  const size_t alignment = huge ? kHugePage : kAlignment;
  const size_t rounded = (std::max<size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded);
  TORCH_CHECK(memory != nullptr, "zero_ext: cannot allocate ", bytes, " bytes of host memory");
  if (huge) madvise(memory, rounded, MADV_HUGEPAGE);
  return {memory, memory, [](void* p) { std::free(p); }, c10::Device(c10::kCPU)};
}

// Huge pages of the system's, which go back to it.
struct Mapping {
  void* memory;
  size_t bytes;
};

void unmap(void* context) {
  const auto* mapping = static_cast<Mapping*>(context);
  munmap(mapping->memory, mapping->bytes);
  delete mapping;
}

c10::DataPtr map_huge_pages(size_t bytes) {
  const size_t mapped = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "zero_ext: cannot allocate ", bytes, " bytes of host memory");
  const size_t past_boundary = reinterpret_cast<uintptr_t>(memory) % kHugePage;
  void* begin = static_cast<char*>(memory) + (kHugePage - past_boundary) % kHugePage;
  madvise(begin, mapped - kHugePage, MADV_HUGEPAGE);
  return {begin, new Mapping{memory, mapped}, &unmap, c10::Device(c10::kCPU)};
}

at::Tensor bytes_at(void* data, c10::Device device, size_t bytes) {
  return at::for_blob(data, {static_cast<int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

c10::DataPtr allocate_at(const Place& place, size_t bytes) {
  if (!place.device.is_cpu()) {
    const c10::DeviceGuard guard(place.device);
    return c10::GetAllocator(place.device.type())->allocate(bytes);
  }
  if (place.pinned_for == c10::kCPU) return allocate_host(bytes);
  return at::getHostAllocator(place.pinned_for)->allocate(bytes);
}

c10::DataPtr allocate_transient(const Place& place, size_t bytes) {
  if (!place.device.is_cpu() || bytes < 2 * kHugePage) return allocate_at(place, bytes);
  return map_huge_pages(bytes);
}

void copy_bytes(void* target, c10::Device target_device, const void* source,
                c10::Device source_device, size_t bytes) {
  if (bytes == 0) return;
  if (target_device.is_cpu() && source_device.is_cpu()) {
    std::memcpy(target, source, bytes);
    return;
  }
  const at::NoGradGuard no_grad;
  bytes_at(target, target_device, bytes)
      .copy_(bytes_at(const_cast<void*>(source), source_device, bytes), /*non_blocking=*/true);
}

void zero_bytes(void* target, c10::Device device, size_t bytes) {
  if (bytes == 0) return;
  if (device.is_cpu()) {
    std::memset(target, 0, bytes);
    return;
  }
  const at::NoGradGuard no_grad;
  bytes_at(target, device, bytes).zero_();
}

}  // namespace zero_ext
