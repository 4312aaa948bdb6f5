#include "memory/flat_buffer.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <exception>
#include <utility>

#include "device/streams.h"

namespace zero_ext {
namespace {

// Counts `bytes`, which `make` allocates. Counts nothing where `make` raises.
template <typename Make>
auto counted(MemoryCounter& counter, Held held, int64_t bytes, const Make& make) {
  counter.add(held, bytes);
  try {
    return make();
  } catch (...) {
    counter.subtract(held, bytes);
    throw;
  }
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
  return counted(*counter_, held_, bytes, [&] { return source_->allocate(place_, bytes); });
}

void SpareMemory::give(c10::DataPtr memory, int64_t bytes) {
  blocks_.push_back({.memory = std::move(memory), .bytes = bytes});
}

void SpareMemory::clear() {
  for (const Block& block : blocks_) counter_->subtract(held_, block.bytes);
  blocks_.clear();
}

void SpareMemory::trim() {
  clear();
  source_->trim();
}

FlatBuffer::FlatBuffer(std::shared_ptr<MemoryCounter> counter, Held held, Place place,
                       at::ScalarType dtype, int64_t numel) {
  *this = over(std::move(counter), held, dtype, numel,
               [&] { return allocate_at(place, numel * c10::elementSize(dtype)); });
  place_ = place;
}

FlatBuffer FlatBuffer::over(std::shared_ptr<MemoryCounter> counter, Held held, at::ScalarType dtype,
                            int64_t numel, const std::function<c10::DataPtr()>& make) {
  FlatBuffer buffer;
  const size_t bytes = numel * c10::elementSize(dtype);
  c10::DataPtr memory = counted(*counter, held, static_cast<int64_t>(bytes), make);
  buffer.counter_ = std::move(counter);
  buffer.held_ = held;
  buffer.place_ = {.device = memory.device()};
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                       /*allocator=*/nullptr, /*resizable=*/false);
  buffer.tensor_ = over_storage(storage, dtype, 0, {numel}, {1});
  return buffer;
}

FlatBuffer FlatBuffer::without_memory(std::shared_ptr<MemoryCounter> counter, Held held,
                                      Place place, at::ScalarType dtype, int64_t numel,
                                      const std::string& message) {
  FlatBuffer buffer;
  buffer.counter_ = std::move(counter);
  buffer.held_ = held;
  buffer.place_ = place;
  c10::Storage storage(c10::Storage::use_byte_size_t(), numel * c10::elementSize(dtype),
                       c10::DataPtr(nullptr, place.device), /*allocator=*/nullptr,
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
    place_ = other.place_;
    emptied_ = other.emptied_;
    tensor_ = std::exchange(other.tensor_, at::Tensor());
    offloaded_memory_ = std::move(other.offloaded_memory_);
    offloaded_counter_ = std::move(other.offloaded_counter_);
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

void FlatBuffer::fill_zero() { zero_bytes(data(), device(), tensor_.nbytes()); }

void FlatBuffer::copy_begin(const FlatBuffer& source, size_t bytes) {
  copy_bytes(data(), device(), source.data(), source.device(), bytes);
}

void FlatBuffer::empty(SpareMemory& spare, const std::string& message) {
  if (!device().is_cpu()) return empty(message);
  spare.give(take_memory(storage(), message), static_cast<int64_t>(tensor_.nbytes()));
  emptied_ = true;
}

void FlatBuffer::allocate(SpareMemory& spare) {
  if (!device().is_cpu()) return allocate();
  give_memory(storage(), spare.take(static_cast<int64_t>(tensor_.nbytes())));
  emptied_ = false;
}

FlatBuffer FlatBuffer::incoming(SpareMemory& spare) const {
  FlatBuffer buffer =
      without_memory(counter_, held_, place_, tensor_.scalar_type(), tensor_.numel(), "");
  buffer.allocate(spare);
  return buffer;
}

void FlatBuffer::take_memory_of(FlatBuffer& other) {
  give_memory(storage(), take_memory(other.storage(), ""));
  emptied_ = false;
  other.emptied_ = true;
}

void FlatBuffer::empty(const std::string& message) {
  record_use(current_stream(device()));
  take_memory(storage(), message);
  emptied_ = true;
  counter_->subtract(held_, static_cast<int64_t>(tensor_.nbytes()));
}

void FlatBuffer::allocate() {
  const auto bytes = static_cast<int64_t>(tensor_.nbytes());
  give_memory(storage(),
              counted(*counter_, held_, bytes, [&] { return allocate_at(place_, bytes); }));
  emptied_ = false;
}

void FlatBuffer::discard() {
  if (defined() && !emptied_) zero_ext::discard(place_, data(), tensor_.nbytes());
}

void FlatBuffer::offload(const std::shared_ptr<MemoryCounter>& host, const std::string& message) {
  if (!defined() || emptied_ || device().is_cpu()) return;
  const auto bytes = static_cast<int64_t>(tensor_.nbytes());
  offloaded_memory_ =
      counted(*host, held_, bytes, [&] { return OffloadedStorage(tensor_.storage(), message); });
  offloaded_counter_ = host;
  emptied_ = true;
  counter_->subtract(held_, bytes);
}

void FlatBuffer::reload() {
  if (!offloaded_memory_.defined()) return;
  const auto bytes = static_cast<int64_t>(tensor_.nbytes());
  counted(*counter_, held_, bytes, [&] { offloaded_memory_.bring_back(); });
  emptied_ = false;
  offloaded_counter_->subtract(held_, bytes);
  offloaded_counter_.reset();
}

void FlatBuffer::grow(int64_t numel) {
  const int64_t old_bytes = static_cast<int64_t>(tensor_.nbytes());
  const int64_t new_bytes = numel * tensor_.element_size();
  if (new_bytes <= old_bytes) return;
  c10::DataPtr memory = counted(*counter_, held_, new_bytes - old_bytes,
                                [&] { return allocate_at(place_, new_bytes); });
  copy_bytes(memory.get(), device(), data(), device(), old_bytes);
  zero_bytes(static_cast<char*>(memory.get()) + old_bytes, device(), new_bytes - old_bytes);
  record_use(current_stream(device()));
  storage().set_data_ptr_noswap(std::move(memory));
  storage().set_nbytes(new_bytes);
  tensor_.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
}

void FlatBuffer::record_use(const c10::Stream& stream) const {
  if (!defined() || device().is_cpu()) return;
  c10::getDeviceAllocator(device().type())->recordStream(tensor_.storage().data_ptr(), stream);
}

void FlatBuffer::drop() { *this = FlatBuffer(); }

void FlatBuffer::release() {
  if (!tensor_.defined()) return;
  const auto bytes = static_cast<int64_t>(tensor_.nbytes());
  if (!emptied_) {
    try {
      // The last use may have been on another stream than the allocation.
      record_use(current_stream(device()));
    } catch (const std::exception&) {
      // The device has failed, so that no work uses the memory any more.
    }
    counter_->subtract(held_, bytes);
  }
  if (offloaded_counter_ != nullptr) offloaded_counter_->subtract(held_, bytes);
  offloaded_counter_.reset();
  offloaded_memory_ = OffloadedStorage();
  tensor_.reset();
  counter_.reset();
}

}  // namespace zero_ext
