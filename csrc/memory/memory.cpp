#include "memory/memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace zero_ext {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;
// Blocks of this size and larger have pages of their own.
constexpr size_t kLargeBytes = 2 * kHugePage;

// Flat buffers are long-lived and large. Huge pages make their first touch several times cheaper
// and save TLB misses. The end of a block, less than a huge page, is made of small pages, so that
// no memory is wasted.
Mapping map_pages(size_t bytes) {
  const auto page = static_cast<size_t>(getpagesize());
  const size_t rounded = (bytes + page - 1) / page * page;
  const size_t mapped = rounded + kHugePage;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "zero_ext: cannot allocate ", bytes, " bytes of host memory");
  const size_t past_boundary = reinterpret_cast<uintptr_t>(memory) % kHugePage;
  void* begin = static_cast<char*>(memory) + (kHugePage - past_boundary) % kHugePage;
  madvise(begin, rounded, MADV_HUGEPAGE);
  return {.memory = memory, .mapped = mapped, .begin = begin, .bytes = rounded};
}

void unmap_pages(const Mapping& mapping) { munmap(mapping.memory, mapping.mapped); }

c10::DataPtr allocate_host(size_t bytes) {
  if (bytes >= kLargeBytes) {
    auto mapping = std::make_unique<Mapping>(map_pages(bytes));
    void* begin = mapping->begin;
    const auto unmap = [](void* context) {
      unmap_pages(*std::unique_ptr<Mapping>(static_cast<Mapping*>(context)));
    };
    return {begin, mapping.release(), unmap, c10::Device(c10::kCPU)};
  }
  const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, rounded);
  TORCH_CHECK(memory != nullptr, "zero_ext: cannot allocate ", bytes, " bytes of host memory");
  return {memory, memory, [](void* p) { std::free(p); }, c10::Device(c10::kCPU)};
}

bool is_host(const Place& place) { return place.device.is_cpu() && place.pinned_for == c10::kCPU; }

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
  if (is_host(place)) return allocate_host(bytes);
  return at::getHostAllocator(place.pinned_for)->allocate(bytes);
}

void discard(const Place& place, void* data, size_t bytes) {
  // The system rejects this for locked pages, which then simply stay.
  if (is_host(place) && bytes >= kLargeBytes) madvise(data, bytes, MADV_FREE);
}

struct TransientMemory::Lease {
  std::weak_ptr<TransientMemory> owner;
  Mapping mapping;
};

std::optional<Mapping> TransientMemory::take_idle(size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return std::nullopt;
  const auto smaller = [](const Mapping& a, const Mapping& b) { return a.bytes < b.bytes; };
  std::sort(idle_.begin(), idle_.end(), smaller);
  const auto found = std::find_if(idle_.begin(), idle_.end(),
                                  [&](const Mapping& mapping) { return mapping.bytes >= bytes; });
  if (found == idle_.end()) {  // a new block replaces one that is too small
    unmap_pages(idle_.back());
    idle_.pop_back();
    return std::nullopt;
  }
  const Mapping mapping = *found;
  idle_.erase(found);
  return mapping;
}

c10::DataPtr TransientMemory::allocate(const Place& place, size_t bytes) {
  if (!is_host(place) || bytes < kLargeBytes) return allocate_at(place, bytes);
  const std::optional<Mapping> idle = take_idle(bytes);
  const Mapping mapping = idle.has_value() ? *idle : map_pages(bytes);
  return {mapping.begin, new Lease{weak_from_this(), mapping}, &end_lease, c10::Device(c10::kCPU)};
}

void TransientMemory::end_lease(void* lease) {
  const std::unique_ptr<Lease> ended(static_cast<Lease*>(lease));
  const std::shared_ptr<TransientMemory> owner = ended->owner.lock();
  const Mapping& mapping = ended->mapping;
  if (owner == nullptr || madvise(mapping.begin, mapping.bytes, MADV_FREE) != 0) {
    unmap_pages(mapping);
    return;
  }
  const std::lock_guard lock(owner->mutex_);
  owner->idle_.push_back(mapping);
}

void TransientMemory::trim() {
  const std::lock_guard lock(mutex_);
  for (const Mapping& mapping : idle_) unmap_pages(mapping);
  idle_.clear();
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
