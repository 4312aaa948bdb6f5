// Storages that have no memory for a while. Tensors over such a storage stay valid, and reading one
// raises a message.
//
// Threads: not synchronised; the owner's lock protects them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <string>

namespace zero_ext {

// From now on reading the storage, which has no memory, raises `message`.
void forbid_access(c10::StorageImpl& storage, const std::string& message);
// Takes the storage's memory away and returns it. Reading the storage then raises `message`.
c10::DataPtr take_memory(c10::StorageImpl& storage, const std::string& message);
void give_memory(c10::StorageImpl& storage, c10::DataPtr memory);

// The number of tensors and other owners that hold the storage.
size_t holders(const c10::Storage& storage);
inline bool is_shared(const c10::Storage& storage) { return holders(storage) > 1; }
// Whether the tensor has other holders than the caller, in Python or in C++.
bool is_shared(const at::Tensor& tensor);

// A tensor of any dense shape over the elements from `offset`.
at::Tensor over_storage(const c10::Storage& storage, at::ScalarType dtype, int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides);

// The address of element i of a contiguous tensor.
inline const void* element(const at::Tensor& tensor, int64_t i) {
  return static_cast<const char*>(tensor.const_data_ptr()) +
         i * static_cast<int64_t>(tensor.element_size());
}
inline void* mutable_element(const at::Tensor& tensor, int64_t i) {
  return static_cast<char*>(tensor.mutable_data_ptr()) +
         i * static_cast<int64_t>(tensor.element_size());
}

// The bytes of a device's storage, kept in pinned host memory until bring_back(). The constructor
// and bring_back() wait for the device.
class OffloadedStorage {
 public:
  OffloadedStorage() = default;
  OffloadedStorage(c10::Storage storage, const std::string& message);

  bool defined() const { return static_cast<bool>(storage_); }
  void bring_back();

 private:
  c10::Storage storage_;
  c10::DataPtr memory_;
};

}  // namespace zero_ext
