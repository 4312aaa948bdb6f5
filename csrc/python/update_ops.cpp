// The updates of optimizers as torch.ops.zero_ext.*; see ops.cpp.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

#include "device/kernel_table.h"
#include "kernels/kernels.h"
#include "python/op_call.h"
#include "python/op_checks.h"

namespace zero_ext {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A float32 buffer of an optimizer that has one element per element of `master`.
float* optimizer_buffer(const char* name, const Tensor& buffer, const Tensor& master) {
  check_float(name, buffer, master.device());
  check_numel(name, buffer, master.numel(), "master");
  return buffer.mutable_data_ptr<float>();
}

float* optimizer_buffer(const char* name, const OptionalTensor& buffer, const Tensor& master) {
  return buffer.has_value() ? optimizer_buffer(name, *buffer, master) : nullptr;
}

// The compute copy of `master`, or null where there is none.
void* compute_copy(const OptionalTensor& param, const Tensor& master) {
  if (!param.has_value()) return nullptr;
  check_value("param", *param, master.device());
  check_numel("param", *param, master.numel(), "master");
  check_apart("param", *param, "master", master);
  return param->mutable_data_ptr();
}

kernels::DType compute_dtype(const OptionalTensor& param) {
  return param.has_value() ? dtype_of(param->scalar_type()) : kernels::DType::f32;
}

// A value on the device, or null.
template <class T>
const T* device_scalar(const char* name, const OptionalTensor& value, c10::Device device) {
  if (!value.has_value()) return nullptr;
  check_scalar(name, *value, c10::CppTypeToScalarType<T>::value, device);
  return value->const_data_ptr<T>();
}

kernels::OnDevice on_device(const OptionalTensor& skip, const OptionalTensor& steps_done,
                            const OptionalTensor& grad_factor, c10::Device device) {
  return {.skip = device_scalar<int32_t>("skip", skip, device),
          .steps_done = device_scalar<float>("steps_done", steps_done, device),
          .grad_factor = device_scalar<float>("grad_factor", grad_factor, device)};
}

// How the moments are stored.
kernels::Moments moments_of(const Tensor& exp_avg, const OptionalTensor& scale) {
  const at::ScalarType dtype = exp_avg.scalar_type();
  if (dtype == at::kBFloat16) return kernels::Moments::bf16;
  TORCH_CHECK((dtype == at::kChar) == scale.has_value(), "zero_ext: 'exp_avg' has dtype ", dtype,
              ". Pass 'exp_avg_scale' and 'exp_avg_sq_scale' with int8 codes, and only then.");
  return dtype == at::kChar ? kernels::Moments::int8 : kernels::Moments::f32;
}

// A moment with one element per element of `master`.
void* moment(const char* name, const Tensor& buffer, at::ScalarType dtype, const Tensor& master) {
  if (dtype == at::kFloat) return optimizer_buffer(name, buffer, master);
  TORCH_CHECK(
      buffer.scalar_type() == dtype && buffer.device() == master.device() && buffer.is_contiguous(),
      "zero_ext: '", name, "' must be contiguous, of dtype ", dtype, ", on ", master.device(),
      ", beside these moments.");
  check_numel(name, buffer, master.numel(), "master");
  return buffer.mutable_data_ptr();
}

// One scale for each block, or null.
float* scale_buffer(const char* name, const OptionalTensor& scale, const Tensor& master) {
  if (!scale.has_value()) return nullptr;
  check_float(name, *scale, master.device());
  const int64_t blocks = (master.numel() + kernels::kBlockElements - 1) / kernels::kBlockElements;
  TORCH_CHECK(scale->numel() == blocks, "zero_ext: '", name, "' has ", scale->numel(),
              " elements, there are ", blocks, " blocks.");
  return scale->mutable_data_ptr<float>();
}

void adamw_(const Tensor& master, const OptionalTensor& param, const Tensor& grad,
            const Tensor& exp_avg, const Tensor& exp_avg_sq, const OptionalTensor& max_exp_avg_sq,
            double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
            double grad_scale, bool maximize, bool decoupled, const OptionalTensor& skip,
            const OptionalTensor& steps_done, const OptionalTensor& grad_factor,
            const OptionalTensor& exp_avg_scale, const OptionalTensor& exp_avg_sq_scale) {
  TORCH_CHECK(step >= 1, "zero_ext: 'step' is ", step, ", the first update is number 1.");
  OpCall call(master);
  check_float("master", master, call.device());
  const kernels::Moments moments = moments_of(exp_avg, exp_avg_scale);
  const bool in_codes = moments == kernels::Moments::int8;
  const auto values = moments == kernels::Moments::bf16 ? at::kBFloat16 : at::kFloat;
  TORCH_CHECK(moments == kernels::Moments::f32 || !max_exp_avg_sq.has_value(),
              "zero_ext: 'max_exp_avg_sq' goes with float32 moments only.");
  const kernels::AdamArgs args{
      .master = master.mutable_data_ptr<float>(),
      .param = compute_copy(param, master),
      .param_dtype = compute_dtype(param),
      .grad = optimizer_buffer("grad", grad, master),
      .moments = moments,
      .exp_avg = moment("exp_avg", exp_avg, in_codes ? at::kChar : values, master),
      .exp_avg_sq = moment("exp_avg_sq", exp_avg_sq, in_codes ? at::kByte : values, master),
      .exp_avg_scale = scale_buffer("exp_avg_scale", exp_avg_scale, master),
      .exp_avg_sq_scale = scale_buffer("exp_avg_sq_scale", exp_avg_sq_scale, master),
      .max_exp_avg_sq = optimizer_buffer("max_exp_avg_sq", max_exp_avg_sq, master),
      .numel = master.numel(),
      .lr = lr,
      .beta1 = beta1,
      .beta2 = beta2,
      .eps = eps,
      .weight_decay = weight_decay,
      .step = step,
      .grad_scale = static_cast<float>(grad_scale),
      .maximize = maximize,
      .decoupled = decoupled,
      .on_device = on_device(skip, steps_done, grad_factor, call.device()),
  };
  call.check("adamw_", call.kernels().adam(args, call.launch()));
  mark_written(master);
  mark_written(param);
  mark_written(exp_avg);
  mark_written(exp_avg_sq);
  mark_written(max_exp_avg_sq);
  mark_written(exp_avg_scale);
  mark_written(exp_avg_sq_scale);
}

void sgd_(const Tensor& master, const OptionalTensor& param, const Tensor& grad,
          const OptionalTensor& momentum_buffer, double lr, double momentum, double dampening,
          double weight_decay, bool nesterov, bool first, double grad_scale, bool maximize,
          const OptionalTensor& skip, const OptionalTensor& steps_done,
          const OptionalTensor& grad_factor) {
  OpCall call(master);
  check_float("master", master, call.device());
  TORCH_CHECK(momentum == 0 || momentum_buffer.has_value(), "zero_ext: 'momentum' is ", momentum,
              " and 'momentum_buffer' is None. Pass a buffer of ", master.numel(), " elements.");
  const kernels::SgdArgs args{
      .master = master.mutable_data_ptr<float>(),
      .param = compute_copy(param, master),
      .param_dtype = compute_dtype(param),
      .grad = optimizer_buffer("grad", grad, master),
      .momentum_buffer = optimizer_buffer("momentum_buffer", momentum_buffer, master),
      .numel = master.numel(),
      .lr = lr,
      .momentum = momentum,
      .dampening = dampening,
      .weight_decay = weight_decay,
      .nesterov = nesterov,
      .first = first,
      .grad_scale = static_cast<float>(grad_scale),
      .maximize = maximize,
      .on_device = on_device(skip, steps_done, grad_factor, call.device()),
  };
  call.check("sgd_", call.kernels().sgd(args, call.launch()));
  mark_written(master);
  mark_written(param);
  mark_written(momentum_buffer);
}

void implement_updates(torch::Library& m) {
  m.impl("adamw_", adamw_);
  m.impl("sgd_", sgd_);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zero_ext, m) {
  m.def(
      "adamw_(Tensor(a!) master, Tensor(b!)? param, Tensor grad, Tensor(c!) exp_avg, Tensor(d!) "
      "exp_avg_sq, "
      "Tensor(e!)? max_exp_avg_sq=None, *, float lr, float beta1, float beta2, float eps, float "
      "weight_decay, "
      "int step, float grad_scale=1.0, bool maximize=False, bool decoupled=True, Tensor? "
      "skip=None, "
      "Tensor? steps_done=None, Tensor? grad_factor=None, Tensor(f!)? exp_avg_scale=None, "
      "Tensor(g!)? exp_avg_sq_scale=None) -> ()");
  m.def(
      "sgd_(Tensor(a!) master, Tensor(b!)? param, Tensor grad, Tensor(c!)? momentum_buffer=None, "
      "*, float lr, "
      "float momentum=0.0, float dampening=0.0, float weight_decay=0.0, bool nesterov=False, bool "
      "first=False, "
      "float grad_scale=1.0, bool maximize=False, Tensor? skip=None, Tensor? steps_done=None, "
      "Tensor? grad_factor=None) -> ()");
}

TORCH_LIBRARY_IMPL(zero_ext, CPU, m) { implement_updates(m); }
#if defined(ZERO_EXT_CUDA)
TORCH_LIBRARY_IMPL(zero_ext, CUDA, m) { implement_updates(m); }
#endif

}  // namespace zero_ext
