// The bytes of a storage: addresses of its elements, and host memory for a while.
//
// Threads: not synchronised; the owner's lock protects them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <string>

namespace zero_ext {

// The address of element i of a contiguous tensor.
inline const void* element(const at::Tensor& tensor, int64_t i) {
  return static_cast<const char*>(tensor.const_data_ptr()) +
         i * static_cast<int64_t>(tensor.element_size());
}
inline void* mutable_element(const at::Tensor& tensor, int64_t i) {
  return static_cast<char*>(tensor.mutable_data_ptr()) +
         i * static_cast<int64_t>(tensor.element_size());
}

// The bytes of a device's storage, kept in pinned host memory until bring_back(). Access to the
// storage raises `message` meanwhile. The constructor and bring_back() wait for the device.
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
