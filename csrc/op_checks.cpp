#include "op_checks.h"

#include "launch.h"

namespace zero_ext {

void check_layout(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().is_cpu(), "zero_ext: '", name, "' is on ", tensor.device(),
      ", this kernel runs on the CPU. Move it, or move all tensors of the call to one device.");
  TORCH_CHECK(tensor.is_contiguous(), "zero_ext: '", name, "' of shape ", tensor.sizes(),
              " and strides ", tensor.strides(), " is not contiguous. Pass .contiguous().");
}

void check_value(const char* name, const at::Tensor& tensor) {
  check_layout(name, tensor);
  TORCH_CHECK(has_kernels(tensor.scalar_type()), "zero_ext: '", name, "' has dtype ",
              tensor.scalar_type(), ". Use torch.float32, torch.bfloat16 or torch.float16.");
}

void check_float(const char* name, const at::Tensor& tensor) {
  check_layout(name, tensor);
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, "zero_ext: '", name, "' has dtype ",
              tensor.scalar_type(), ", it must be torch.float32. Pass .float().");
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

void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void mark_written(const std::optional<at::Tensor>& tensor) {
  if (tensor.has_value()) mark_written(*tensor);
}

}  // namespace zero_ext
