// Checks that ops make of their arguments before they write anything. Each message has the
// argument's name, what is wrong with it, and the remedy.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero_ext {

// On `device`, contiguous.
void check_layout(const char* name, const at::Tensor& tensor, c10::Device device);
// The same, and of a dtype that has kernels.
void check_value(const char* name, const at::Tensor& tensor, c10::Device device);
// The same, and float32.
void check_float(const char* name, const at::Tensor& tensor, c10::Device device);
// The same, and one element of `dtype`.
void check_scalar(const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                  c10::Device device);
// The two share no memory. Tensors without elements never do.
void check_apart(const char* name, const at::Tensor& tensor, const char* other_name,
                 const at::Tensor& other);

// `tensor` has `numel` elements, as `other_name` has.
void check_numel(const char* name, const at::Tensor& tensor, int64_t numel, const char* other_name);

// Tells autograd that the op wrote into `tensor`, as every in-place op of torch does.
void mark_written(const at::Tensor& tensor);

}  // namespace zero_ext
