#include "memory/storage.h"

#include <c10/core/TensorImpl.h>
#include <torch/headeronly/version.h>

#include <utility>

#include "device/streams.h"
#include "memory/memory.h"

namespace zero_ext {
namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
// Torch 2.11 can forbid reads but has no function that allows them again. Without the message a
// read of released memory would end the process. The template gets at the private flag, because an
// explicit instantiation may name private members.
bool& reads_raise(c10::StorageImpl& storage);

template <bool c10::StorageImpl::* flag>
struct PrivateFlag {
  friend bool& reads_raise(c10::StorageImpl& storage) { return storage.*flag; }
};
template struct PrivateFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

// To be called before the memory is set: StorageImpl then recomputes its flags.
template <typename Storage>
void allow_access(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    reads_raise(storage) = false;
  }
}

// Torch keeps the Python object of a storage or a tensor alive as long as the original. It counts
// that object as a holder.
template <typename Object>
size_t idle_wrappers(Object& object) {
  auto* slot = object.pyobj_slot();
  if constexpr (requires { slot->has_unique_reference(); }) {
    return slot->has_unique_reference() ? 1 : 0;
  } else {
    return 0;
  }
}

}  // namespace

void forbid_access(c10::StorageImpl& storage, const std::string& message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

c10::DataPtr take_memory(c10::StorageImpl& storage, const std::string& message) {
  c10::DataPtr memory = storage.set_data_ptr(c10::DataPtr(nullptr, storage.device()));
  forbid_access(storage, message);
  return memory;
}

void give_memory(c10::StorageImpl& storage, c10::DataPtr memory) {
  allow_access(storage);
  storage.set_data_ptr_noswap(std::move(memory));
}

size_t holders(const c10::Storage& storage) {
  return storage.use_count() - idle_wrappers(*storage.unsafeGetStorageImpl());
}

bool is_shared(const at::Tensor& tensor) {
  return tensor.use_count() > 1 + idle_wrappers(*tensor.unsafeGetTensorImpl());
}

at::Tensor over_storage(const c10::Storage& storage, at::ScalarType dtype, int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, storage.device())),
      c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

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
