#include "python/op_checks.h"

#include <string>

#include "device/kernel_table.h"

namespace zero_ext {

void check_layout(const char* name, const at::Tensor& tensor, c10::Device device) {
  const bool is_there = device.is_cpu() ? tensor.device().is_cpu() : tensor.device() == device;
  TORCH_CHECK(is_there, "zero_ext: '", name, "' is on ", tensor.device(), ", this call runs on ",
              device, ". Move all tensors of the call to one device.");
  TORCH_CHECK(tensor.is_contiguous(), "zero_ext: '", name, "' of shape ", tensor.sizes(),
              " and strides ", tensor.strides(), " is not contiguous. Pass .contiguous().");
}

void check_value(const char* name, const at::Tensor& tensor, c10::Device device) {
  check_layout(name, tensor, device);
  TORCH_CHECK(has_kernels(tensor.scalar_type()), "zero_ext: '", name, "' has dtype ",
              tensor.scalar_type(), ". Use torch.float32, torch.bfloat16 or torch.float16.");
}

void check_float(const char* name, const at::Tensor& tensor, c10::Device device) {
  check_layout(name, tensor, device);
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, "zero_ext: '", name, "' has dtype ",
              tensor.scalar_type(), ", it must be torch.float32. Pass .float().");
}

void check_scalar(const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                  c10::Device device) {
  check_layout(name, tensor, device);
  const std::string wanted = dtype == at::kInt ? "torch.int32" : "torch.float32";
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.numel() == 1, "zero_ext: '", name,
              "' has dtype ", tensor.scalar_type(), " and ", tensor.numel(),
              " elements, it must be one ", wanted, ". Pass torch.zeros(1, dtype=", wanted, ").");
}

void check_apart(const char* name, const at::Tensor& tensor, const char* other_name,
                 const at::Tensor& other) {
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  const auto* other_begin = static_cast<const char*>(other.const_data_ptr());
  const bool overlap = tensor.numel() > 0 && other.numel() > 0 &&
                       begin < other_begin + other.nbytes() &&
                       other_begin < begin + tensor.nbytes();
  TORCH_CHECK(!overlap, "zero_ext: '", name, "' and '", other_name,
              "' share memory. Pass separate buffers.");
}

void check_numel(const char* name, const at::Tensor& tensor, int64_t numel,
                 const char* other_name) {
  TORCH_CHECK(tensor.numel() == numel, "zero_ext: '", name, "' has ", tensor.numel(),
              " elements, '", other_name, "' has ", numel, ". Pass ranges of the same length.");
}

void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace zero_ext
