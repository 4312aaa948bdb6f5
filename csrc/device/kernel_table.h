// Launch: which kernels run for a device and how, when ATen owns the threads and the streams, and
// ATen's dtypes as the kernels' own.
//
// Note [Devices]
// A device is its c10::Device, its table of kernels and c10's device-generic streams, events and
// allocators: nothing here or above knows CUDA. A device that zero_ext was not built for brings its
// table with set_kernels().
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "kernels/kernels.h"

namespace zero_ext {

// Runs on at::get_num_threads() threads; serially inside another parallel region.
kernels::Launch cpu_launch();

// The table of a device's kernels. An error where this build has none for it.
const kernels::Kernels& kernels_on(c10::DeviceType type);
bool has_kernels_on(c10::DeviceType type);
// `table` must live as long as the process.
void set_kernels(c10::DeviceType type, const kernels::Kernels* table);

// cpu_launch(), or the current stream of `device`, which must be the current device of its type.
kernels::Launch launch_on(c10::Device device);

// Where the kernels of an engine's buffers run.
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

// Raises where `kernel` refused or its launch failed.
void check(kernels::Status status, const char* kernel);

// True for float32, bfloat16 and float16.
bool has_kernels(at::ScalarType dtype);

// The kernels' name for a dtype that has kernels; anything else is an error that names it.
kernels::DType dtype_of(at::ScalarType dtype);

}  // namespace zero_ext
