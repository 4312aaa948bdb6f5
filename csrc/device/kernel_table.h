// KernelTable: the kernels of a device, launched on ATen's threads and streams with ATen's dtypes.
//
// Note [Devices]
// A device is a c10::Device, a table of kernels, and c10's device-generic streams, events and
// allocators. Nothing in this room or above it knows CUDA. A device that zero_ext was not built for
// registers its table with set_kernels().
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "kernels/kernels.h"

namespace zero_ext {

// Runs on at::get_num_threads() threads, and serially inside another parallel region.
kernels::Launch cpu_launch();

// The table of a device's kernels. Raises where this build has none.
const kernels::Kernels& kernels_on(c10::DeviceType type);
bool has_kernels_on(c10::DeviceType type);
// `table` must live as long as the process.
void set_kernels(c10::DeviceType type, const kernels::Kernels* table);

// cpu_launch(), or the current stream of `device`, which must be the current device of its type.
kernels::Launch launch_on(c10::Device device);

// The table of the device that an engine's buffers lie on.
class KernelTable {
 public:
  explicit KernelTable(c10::Device device = c10::kCPU)
      : device_(device), kernels_(&kernels_on(device.type())) {}
  c10::Device device() const { return device_; }
  bool on_host() const { return device_.is_cpu(); }
  const kernels::Kernels* operator->() const { return kernels_; }
  kernels::Launch launch() const { return launch_on(device_); }

 private:
  c10::Device device_;
  const kernels::Kernels* kernels_;
};

// Raises where `kernel` rejected its arguments or its launch failed.
void check(kernels::Status status, const char* kernel);

// True for float32, bfloat16 and float16.
bool has_kernels(at::ScalarType dtype);

// The kernels' name of a dtype. Raises for a dtype without kernels, and names it.
kernels::DType dtype_of(at::ScalarType dtype);

}  // namespace zero_ext
