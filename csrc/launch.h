// Launch: how kernels run on the CPU when ATen owns the threads, and ATen's dtypes as the kernels'
// own.
#pragma once

#include <c10/core/ScalarType.h>

#include "kernels/kernels.h"

namespace zero_ext {

// Runs on at::get_num_threads() threads; serially inside another parallel region.
kernels::Launch cpu_launch();

// True for float32, bfloat16 and float16.
bool has_kernels(at::ScalarType dtype);

// The kernels' name for a dtype that has kernels; anything else is an error that names it.
kernels::DType dtype_of(at::ScalarType dtype);

}  // namespace zero_ext
