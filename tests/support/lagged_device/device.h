// What the operators need of device.cpp.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>

namespace lagged {

// Makes "lagged" a device of PyTorch. Once, before the process' first backward.
void register_device();

// One per device.
const at::Generator& default_generator(int device);
// The CPU's generator behind one of the device.
at::Generator host_generator(const at::Generator& generator);

// Gives the storage new memory; what fits is copied by the current stream.
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace lagged
