#include "memory/storage.h"

#include <utility>

#include "core/torch_internals.h"
#include "device/streams.h"
#include "memory/memory.h"

namespace zero_ext {

OffloadedStorage::OffloadedStorage(c10::Storage storage, const std::string& message)
    : storage_(std::move(storage)) {
  const c10::Device device = storage_.device();
  memory_ = allocate_at({.pinned_for = device.type()}, storage_.nbytes());
  copy_bytes(memory_.get(), c10::kCPU, storage_.data(), device, storage_.nbytes());
  current_stream(device).synchronize();
  take_memory(*storage_.unsafeGetStorageImpl(), message);
}

void OffloadedStorage::bring_back() {
  if (!defined()) return;
  const c10::Device device = storage_.device();
  c10::DataPtr memory = allocate_at({.device = device}, storage_.nbytes());
  copy_bytes(memory.get(), device, memory_.get(), c10::kCPU, storage_.nbytes());
  current_stream(device).synchronize();
  give_memory(*storage_.unsafeGetStorageImpl(), std::move(memory));
  *this = OffloadedStorage();
}

}  // namespace zero_ext
