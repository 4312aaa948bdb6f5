// torch.autocast("lagged"): CUDA's lists of operators.
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

using namespace at;            // NOLINT: the macros below name what is in both
using namespace at::autocast;  // NOLINT

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LAGGED_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define LAGGED_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define LAGGED_SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define LAGGED_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LAGGED_LOWER)
  AT_FORALL_FP32(LAGGED_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(LAGGED_SET_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(LAGGED_PROMOTE)
}

}  // namespace
