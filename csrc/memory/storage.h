// Storages that are without memory for a while. Tensors over them stay valid; reading one raises a
// message meanwhile.
//
// Threads: not synchronised; the owner's lock protects them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <string>

namespace zero_ext {

// A storage that has no memory raises `message`.
void forbid_access(c10::StorageImpl& storage, const std::string& message);
// Returns the storage's memory, which then has none.
c10::DataPtr take_memory(c10::StorageImpl& storage, const std::string& message);
void give_memory(c10::StorageImpl& storage, c10::DataPtr memory);

// How many tensors, or whatever else, hold it.
size_t holders(const c10::Storage& storage);
inline bool is_shared(const c10::Storage& storage) { return holders(storage) > 1; }
// Whether anybody but the caller holds the tensor, in Python or in C++.
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

// The bytes of a device's storage, in pinned host memory until bring_back(). Both wait for the
// device.
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
