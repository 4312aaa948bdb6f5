#include "flat_buffer.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

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

at::Tensor over_storage(const c10::Storage& storage, at::ScalarType dtype, int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

}  // namespace

void MemoryCounter::add(Held held, int64_t bytes) {
  bytes_[static_cast<int>(held)] += bytes;
  const int64_t total = total_ += bytes;
  int64_t peak = peak_;
  while (total > peak && !peak_.compare_exchange_weak(peak, total)) {
  }
}

FlatBuffer::FlatBuffer(std::shared_ptr<MemoryCounter> counter, Held held, at::ScalarType dtype,
                       int64_t numel)
    : counter_(std::move(counter)), held_(held) {
  const size_t bytes = numel * c10::elementSize(dtype);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate_host(bytes),
                       /*allocator=*/nullptr, /*resizable=*/false);
  tensor_ = over_storage(storage, dtype, 0, {numel}, {1});
  counter_->add(held_, static_cast<int64_t>(bytes));
}

FlatBuffer& FlatBuffer::operator=(FlatBuffer&& other) noexcept {
  if (this != &other) {
    release();
    counter_ = std::exchange(other.counter_, nullptr);
    held_ = other.held_;
    tensor_ = std::exchange(other.tensor_, at::Tensor());
  }
  return *this;
}

void* FlatBuffer::at(int64_t element) const {
  return static_cast<char*>(data()) + element * tensor_.element_size();
}

at::Tensor FlatBuffer::typed(at::ScalarType dtype, int64_t numel) const {
  return over_storage(tensor_.storage(), dtype, 0, {numel}, {1});
}

at::Tensor FlatBuffer::slice(int64_t offset, int64_t numel) const {
  return over_storage(tensor_.storage(), tensor_.scalar_type(), offset, {numel}, {1});
}

at::Tensor FlatBuffer::view(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) const {
  return over_storage(tensor_.storage(), tensor_.scalar_type(), offset, sizes, strides);
}

void FlatBuffer::fill_zero() { std::memset(data(), 0, tensor_.nbytes()); }

void FlatBuffer::grow(int64_t numel) {
  const int64_t old_bytes = static_cast<int64_t>(tensor_.nbytes());
  const int64_t new_bytes = numel * tensor_.element_size();
  if (new_bytes <= old_bytes) return;
  c10::DataPtr memory = allocate_host(new_bytes);
  std::memcpy(memory.get(), data(), old_bytes);
  std::memset(static_cast<char*>(memory.get()) + old_bytes, 0, new_bytes - old_bytes);
  c10::StorageImpl* storage = tensor_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(new_bytes);
  tensor_.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  counter_->add(held_, new_bytes - old_bytes);
}

void FlatBuffer::release() {
  if (!tensor_.defined()) return;
  counter_->add(held_, -static_cast<int64_t>(tensor_.nbytes()));
  tensor_.reset();
  counter_.reset();
}

}  // namespace zero_ext
