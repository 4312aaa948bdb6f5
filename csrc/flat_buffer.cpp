#include "flat_buffer.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <torch/headeronly/version.h>

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
  const int64_t total = total_ += bytes;
  if (total > limit_) {
    total_ -= bytes;
    TORCH_CHECK(false, "zero_ext: ", bytes, " more bytes for '", kHeldNames[static_cast<int>(held)],
                "' would make ", total, ", the limit (ZERO_EXT_LIMIT_BYTES) is ", limit_,
                ". More ranks, smaller units (bucket_mb) or less prefetch_mb need less.");
  }
  bytes_[static_cast<int>(held)] += bytes;
  int64_t peak = peak_;
  while (total > peak && !peak_.compare_exchange_weak(peak, total)) {
  }
}

void MemoryCounter::subtract(Held held, int64_t bytes) {
  total_ -= bytes;
  bytes_[static_cast<int>(held)] -= bytes;
}

c10::DataPtr SpareMemory::take(int64_t bytes) {
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    if (block->bytes != bytes) continue;
    c10::DataPtr memory = std::move(block->memory);
    blocks_.erase(block);
    return memory;
  }
  clear();
  counter_->add(held_, bytes);
  return allocate_host(bytes);
}

void SpareMemory::give(c10::DataPtr memory, int64_t bytes) {
  blocks_.push_back({std::move(memory), bytes});
}

void SpareMemory::clear() {
  for (const Block& block : blocks_) counter_->subtract(held_, block.bytes);
  blocks_.clear();
}

namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
// Torch 2.11 can forbid reads and has no function that allows them again; without the message a
// read of released memory would end the process. An explicit instantiation may name what is
// private.
bool& reads_raise(c10::StorageImpl& storage);

template <bool c10::StorageImpl::* flag>
struct PrivateFlag {
  friend bool& reads_raise(c10::StorageImpl& storage) { return storage.*flag; }
};
template struct PrivateFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

void forbid_access(c10::StorageImpl& storage, const std::string& message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

// The memory comes afterwards: StorageImpl then sums up its flags.
template <typename Storage>
void allow_access(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    reads_raise(storage) = false;
  }
}

}  // namespace

FlatBuffer::FlatBuffer(std::shared_ptr<MemoryCounter> counter, Held held, at::ScalarType dtype,
                       int64_t numel)
    : counter_(std::move(counter)), held_(held) {
  const size_t bytes = numel * c10::elementSize(dtype);
  counter_->add(held_, static_cast<int64_t>(bytes));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate_host(bytes),
                       /*allocator=*/nullptr, /*resizable=*/false);
  tensor_ = over_storage(storage, dtype, 0, {numel}, {1});
}

FlatBuffer FlatBuffer::without_memory(std::shared_ptr<MemoryCounter> counter, Held held,
                                      at::ScalarType dtype, int64_t numel,
                                      const std::string& message) {
  FlatBuffer buffer;
  buffer.counter_ = std::move(counter);
  buffer.held_ = held;
  c10::Storage storage(c10::Storage::use_byte_size_t(), numel * c10::elementSize(dtype),
                       c10::DataPtr(nullptr, c10::Device(c10::kCPU)), /*allocator=*/nullptr,
                       /*resizable=*/false);
  buffer.tensor_ = over_storage(storage, dtype, 0, {numel}, {1});
  forbid_access(*storage.unsafeGetStorageImpl(), message);
  buffer.emptied_ = true;
  return buffer;
}

FlatBuffer& FlatBuffer::operator=(FlatBuffer&& other) noexcept {
  if (this != &other) {
    release();
    counter_ = std::exchange(other.counter_, nullptr);
    held_ = other.held_;
    emptied_ = other.emptied_;
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

void FlatBuffer::empty(SpareMemory& spare, const std::string& message) {
  c10::StorageImpl* storage = tensor_.storage().unsafeGetStorageImpl();
  c10::DataPtr nothing(nullptr, c10::Device(c10::kCPU));
  spare.give(storage->set_data_ptr(std::move(nothing)), static_cast<int64_t>(tensor_.nbytes()));
  forbid_access(*storage, message);
  emptied_ = true;
}

void FlatBuffer::allocate(SpareMemory& spare) {
  c10::StorageImpl* storage = tensor_.storage().unsafeGetStorageImpl();
  c10::DataPtr memory = spare.take(static_cast<int64_t>(tensor_.nbytes()));
  allow_access(*storage);
  storage->set_data_ptr_noswap(std::move(memory));
  emptied_ = false;
}

void FlatBuffer::grow(int64_t numel) {
  const int64_t old_bytes = static_cast<int64_t>(tensor_.nbytes());
  const int64_t new_bytes = numel * tensor_.element_size();
  if (new_bytes <= old_bytes) return;
  counter_->add(held_, new_bytes - old_bytes);
  c10::DataPtr memory = allocate_host(new_bytes);
  std::memcpy(memory.get(), data(), old_bytes);
  std::memset(static_cast<char*>(memory.get()) + old_bytes, 0, new_bytes - old_bytes);
  c10::StorageImpl* storage = tensor_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(new_bytes);
  tensor_.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
}

void FlatBuffer::release() {
  if (!tensor_.defined()) return;
  if (!emptied_) counter_->subtract(held_, static_cast<int64_t>(tensor_.nbytes()));
  tensor_.reset();
  counter_.reset();
}

}  // namespace zero_ext
