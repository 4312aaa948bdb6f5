// OpCall: where one call of an op runs: on the device of the tensor that it writes to, on the current
// stream of that device.
//
// Threads: used by the thread that called the op.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "device/kernel_table.h"
#include "kernels/kernels.h"

namespace zero_ext {

class OpCall {
 public:
  explicit OpCall(const at::Tensor& written) : device_(written.device()), guard_(device_) {
    launch_.error = &error_;
  }
  OpCall(const OpCall&) = delete;
  OpCall& operator=(const OpCall&) = delete;

  c10::Device device() const { return device_; }
  const kernels::Kernels& kernels() const { return kernels_; }
  kernels::Launch& launch() { return launch_; }

  void check(const char* op, kernels::Status status) const {
    TORCH_CHECK(status != kernels::Status::launch_failed, "zero_ext::", op,
                " could not be launched on ", device_, ": ", error_, ".");
    TORCH_INTERNAL_ASSERT(status == kernels::Status::ok, "zero_ext::", op,
                          " was refused by its kernel (status ", static_cast<int32_t>(status),
                          ").");
  }

 private:
  c10::Device device_;
  c10::DeviceGuard guard_;
  const kernels::Kernels& kernels_ = kernels_on(device_.type());
  const char* error_ = "unknown error";
  kernels::Launch launch_ = launch_on(device_);
};

}  // namespace zero_ext
