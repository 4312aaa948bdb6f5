// Launch: which kernels run for a device and how, when ATen owns the threads and the streams, and
// ATen's dtypes as the kernels' own.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "kernels/kernels.h"

namespace zero_ext {

// Runs on at::get_num_threads() threads; serially inside another parallel region.
kernels::Launch cpu_launch();

// The table of a device's kernels. An error where this build has none for it.
const kernels::Kernels& kernels_on(c10::DeviceType type);

// cpu_launch(), or the current stream of `device`, which must be the current device of its type.
kernels::Launch launch_on(c10::Device device);

// True for float32, bfloat16 and float16.
bool has_kernels(at::ScalarType dtype);

// The kernels' name for a dtype that has kernels; anything else is an error that names it.
kernels::DType dtype_of(at::ScalarType dtype);

}  // namespace zero_ext
