// The stateless kernels as torch.ops.zero_ext.*: schema, checks, CPU implementation. The fake
// implementations are in zero_ext/ops.py.
//
// Every op checks all of its arguments before it writes anything, and every buffer that is written
// must be contiguous.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels/dispatch_cpu.h"
#include "kernels/kernels.h"
#include "launch.h"
#include "op_checks.h"

namespace zero_ext {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void check_numel(const char* name, const Tensor& tensor, int64_t numel, const char* other) {
  TORCH_CHECK(tensor.numel() == numel, "zero_ext: '", name, "' has ", tensor.numel(),
              " elements, '", other, "' has ", numel, ". Pass ranges of the same length.");
}

void check_same_length(const char* name, size_t length, const char* other, size_t other_length) {
  TORCH_CHECK(length == other_length, "zero_ext: ", length, " tensors in '", name, "', ",
              other_length, " in '", other, "'. Pass one for each.");
}

// One dtype for a whole list, because a kernel call has one. Float32 where the list is empty.
at::ScalarType check_list(const char* name, at::TensorList list) {
  for (const auto i : c10::irange(list.size())) {
    check_value(name, list[i]);
    TORCH_CHECK(list[i].scalar_type() == list[0].scalar_type(), "zero_ext: '", name, "[", i,
                "]' has dtype ", list[i].scalar_type(), ", '", name, "[0]' has ",
                list[0].scalar_type(), ". Call once per dtype.");
  }
  return list.empty() ? at::kFloat : list[0].scalar_type();
}

int32_t* nonfinite_flag(const OptionalTensor& nonfinite) {
  if (!nonfinite.has_value()) return nullptr;
  check_layout("nonfinite", *nonfinite);
  TORCH_CHECK(nonfinite->scalar_type() == at::kInt && nonfinite->numel() == 1,
              "zero_ext: 'nonfinite' has dtype ", nonfinite->scalar_type(), " and ",
              nonfinite->numel(),
              " elements, it must be one torch.int32. Pass torch.zeros(1, dtype=torch.int32).");
  return nonfinite->mutable_data_ptr<int32_t>();
}

void check_status(const char* op, kernels::Status status) {
  TORCH_INTERNAL_ASSERT(status == kernels::Status::ok, "zero_ext::", op,
                        " was refused by its kernel (status ", static_cast<int32_t>(status), ").");
}

void accumulate_(const Tensor& grad, const Tensor& sum, double scale, bool fresh,
                 const OptionalTensor& nonfinite) {
  check_value("grad", grad);
  check_float("sum", sum);
  check_numel("grad", grad, sum.numel(), "sum");
  check_apart("grad", grad, "sum", sum);
  int32_t* flag = nonfinite_flag(nonfinite);
  check_status("accumulate_",
               kernels::cpu().accumulate(grad.const_data_ptr(), dtype_of(grad.scalar_type()),
                                         sum.mutable_data_ptr<float>(), sum.numel(),
                                         static_cast<float>(scale), fresh, flag, cpu_launch()));
  mark_written(sum);
  mark_written(nonfinite);
}

void accumulate_list_(at::TensorList grads, at::TensorList sums, double scale, bool fresh,
                      const OptionalTensor& nonfinite) {
  check_same_length("grads", grads.size(), "sums", sums.size());
  const at::ScalarType dtype = check_list("grads", grads);
  std::vector<kernels::AccumulateSegment> segments;
  segments.reserve(grads.size());
  for (const auto i : c10::irange(grads.size())) {
    check_float("sums", sums[i]);
    check_numel("grads", grads[i], sums[i].numel(), "sums");
    check_apart("grads", grads[i], "sums", sums[i]);
  }
  int32_t* flag = nonfinite_flag(nonfinite);
  for (const auto i : c10::irange(grads.size())) {
    segments.push_back(
        {grads[i].const_data_ptr(), sums[i].mutable_data_ptr<float>(), sums[i].numel()});
  }
  check_status("accumulate_list_", kernels::cpu().accumulate_list(
                                       segments.data(), std::ssize(segments), dtype_of(dtype),
                                       static_cast<float>(scale), fresh, flag, cpu_launch()));
  for (const Tensor& sum : sums) mark_written(sum);
  mark_written(nonfinite);
}

void accumulate_ranks_(at::TensorList grads, const Tensor& sum, double scale, bool fresh,
                       const OptionalTensor& nonfinite) {
  const at::ScalarType dtype = check_list("grads", grads);
  check_float("sum", sum);
  TORCH_CHECK(!grads.empty(), "zero_ext: 'grads' is empty. Pass one gradient per rank.");
  std::vector<const void*> pointers;
  pointers.reserve(grads.size());
  for (const Tensor& grad : grads) {
    check_numel("grads", grad, sum.numel(), "sum");
    // The kernel allows a gradient that is exactly the sum.
    const bool is_sum = dtype == at::kFloat && grad.const_data_ptr() == sum.const_data_ptr();
    if (!is_sum) check_apart("grads", grad, "sum", sum);
    pointers.push_back(grad.const_data_ptr());
  }
  int32_t* flag = nonfinite_flag(nonfinite);
  check_status("accumulate_ranks_", kernels::cpu().accumulate_ranks(
                                        pointers.data(), static_cast<int32_t>(pointers.size()),
                                        dtype_of(dtype), sum.mutable_data_ptr<float>(), sum.numel(),
                                        static_cast<float>(scale), fresh, flag, cpu_launch()));
  mark_written(sum);
  mark_written(nonfinite);
}

// A float32 buffer of an optimizer that has one element per element of `master`.
float* optimizer_buffer(const char* name, const Tensor& buffer, const Tensor& master) {
  check_float(name, buffer);
  check_numel(name, buffer, master.numel(), "master");
  return buffer.mutable_data_ptr<float>();
}

float* optimizer_buffer(const char* name, const OptionalTensor& buffer, const Tensor& master) {
  return buffer.has_value() ? optimizer_buffer(name, *buffer, master) : nullptr;
}

// The compute copy of `master`, or null where there is none.
void* compute_copy(const OptionalTensor& param, const Tensor& master) {
  if (!param.has_value()) return nullptr;
  check_value("param", *param);
  check_numel("param", *param, master.numel(), "master");
  check_apart("param", *param, "master", master);
  return param->mutable_data_ptr();
}

kernels::DType compute_dtype(const OptionalTensor& param) {
  return param.has_value() ? dtype_of(param->scalar_type()) : kernels::DType::f32;
}

void adamw_(const Tensor& master, const OptionalTensor& param, const Tensor& grad,
            const Tensor& exp_avg, const Tensor& exp_avg_sq, const OptionalTensor& max_exp_avg_sq,
            double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
            double grad_scale, bool maximize, bool decoupled) {
  TORCH_CHECK(step >= 1, "zero_ext: 'step' is ", step, ", the first update is number 1.");
  check_float("master", master);
  const kernels::AdamArgs args{
      .master = master.mutable_data_ptr<float>(),
      .param = compute_copy(param, master),
      .param_dtype = compute_dtype(param),
      .grad = optimizer_buffer("grad", grad, master),
      .exp_avg = optimizer_buffer("exp_avg", exp_avg, master),
      .exp_avg_sq = optimizer_buffer("exp_avg_sq", exp_avg_sq, master),
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
  };
  check_status("adamw_", kernels::cpu().adam(args, cpu_launch()));
  mark_written(master);
  mark_written(param);
  mark_written(exp_avg);
  mark_written(exp_avg_sq);
  mark_written(max_exp_avg_sq);
}

void sgd_(const Tensor& master, const OptionalTensor& param, const Tensor& grad,
          const OptionalTensor& momentum_buffer, double lr, double momentum, double dampening,
          double weight_decay, bool nesterov, bool first, double grad_scale, bool maximize) {
  check_float("master", master);
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
  };
  check_status("sgd_", kernels::cpu().sgd(args, cpu_launch()));
  mark_written(master);
  mark_written(param);
  mark_written(momentum_buffer);
}

void cast_(const Tensor& source, const Tensor& target) {
  check_value("source", source);
  check_value("target", target);
  check_numel("source", source, target.numel(), "target");
  check_apart("source", source, "target", target);
  check_status("cast_",
               kernels::cpu().cast(source.const_data_ptr(), dtype_of(source.scalar_type()),
                                   target.mutable_data_ptr(), dtype_of(target.scalar_type()),
                                   target.numel(), cpu_launch()));
  mark_written(target);
}

void check_offset(size_t i, int64_t offset, int64_t numel, const Tensor& flat) {
  TORCH_CHECK(offset >= 0 && offset + numel <= flat.numel(), "zero_ext: 'sources[", i, "]' with ",
              numel, " elements at offset ", offset, " does not fit into 'flat' with ",
              flat.numel(), " elements. Correct the offset or enlarge 'flat'.");
}

void flatten_(at::TensorList sources, const Tensor& flat, at::IntArrayRef offsets, bool add,
              const OptionalTensor& nonfinite) {
  check_same_length("sources", sources.size(), "offsets", offsets.size());
  const at::ScalarType dtype = check_list("sources", sources);
  check_value("flat", flat);
  for (const auto i : c10::irange(sources.size())) {
    check_offset(i, offsets[i], sources[i].numel(), flat);
    check_apart("sources", sources[i], "flat", flat);
  }
  int32_t* flag = nonfinite_flag(nonfinite);
  std::vector<kernels::CopySegment> segments;
  segments.reserve(sources.size());
  char* base = static_cast<char*>(flat.mutable_data_ptr());
  for (const auto i : c10::irange(sources.size())) {
    segments.push_back(
        {sources[i].const_data_ptr(), base + offsets[i] * flat.element_size(), sources[i].numel()});
  }
  const kernels::Write write = add ? kernels::Write::add : kernels::Write::overwrite;
  check_status("flatten_",
               kernels::cpu().flatten(segments.data(), std::ssize(segments), dtype_of(dtype),
                                      dtype_of(flat.scalar_type()), write, flag, cpu_launch()));
  mark_written(flat);
  mark_written(nonfinite);
}

Tensor sum_of_squares(const Tensor& value) {
  check_float("value", value);
  Tensor result = at::empty({}, value.options().dtype(at::kDouble));
  double& sum = *result.mutable_data_ptr<double>();
  sum = 0;
  check_status("sum_of_squares", kernels::cpu().sum_of_squares(value.const_data_ptr<float>(),
                                                               value.numel(), &sum, cpu_launch()));
  return result;
}

void adopt_writes_(const Tensor& param, const Tensor& master) {
  check_value("param", param);
  check_float("master", master);
  check_numel("param", param, master.numel(), "master");
  check_apart("param", param, "master", master);
  check_status(
      "adopt_writes_",
      kernels::cpu().adopt_writes(param.const_data_ptr(), dtype_of(param.scalar_type()),
                                  master.mutable_data_ptr<float>(), master.numel(), cpu_launch()));
  mark_written(master);
}

// For tests and benchmarks: runs all later kernels on `name`, returns the one that was in use.
std::string use_instruction_set(const std::string& name) {
  const std::string previous = kernels::cpu_instruction_set();
  using kernels::InstructionSet;
  TORCH_CHECK(name == "baseline" || name == "avx2" || name == "avx512",
              "zero_ext: no instruction set '", name, "'. Choose baseline, avx2 or avx512.");
  const InstructionSet set = name == "avx512" ? InstructionSet::avx512
                             : name == "avx2" ? InstructionSet::avx2
                                              : InstructionSet::baseline;
  TORCH_CHECK(kernels::use_instruction_set(set), "zero_ext: this CPU has no ", name,
              ". Choose another instruction set.");
  return previous;
}

std::string instruction_set_name() { return kernels::cpu_instruction_set(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(zero_ext, m) {
  m.def(
      "accumulate_(Tensor grad, Tensor(a!) sum, float scale=1.0, bool fresh=False, Tensor(b!)? "
      "nonfinite=None) "
      "-> ()");
  m.def(
      "accumulate_list_(Tensor[] grads, Tensor(a!)[] sums, float scale=1.0, bool fresh=False, "
      "Tensor(b!)? nonfinite=None) -> ()");
  m.def(
      "accumulate_ranks_(Tensor[] grads, Tensor(a!) sum, float scale=1.0, bool fresh=False, "
      "Tensor(b!)? nonfinite=None) -> ()");
  m.def(
      "adamw_(Tensor(a!) master, Tensor(b!)? param, Tensor grad, Tensor(c!) exp_avg, Tensor(d!) "
      "exp_avg_sq, "
      "Tensor(e!)? max_exp_avg_sq=None, *, float lr, float beta1, float beta2, float eps, float "
      "weight_decay, "
      "int step, float grad_scale=1.0, bool maximize=False, bool decoupled=True) -> ()");
  m.def(
      "sgd_(Tensor(a!) master, Tensor(b!)? param, Tensor grad, Tensor(c!)? momentum_buffer=None, "
      "*, float lr, "
      "float momentum=0.0, float dampening=0.0, float weight_decay=0.0, bool nesterov=False, bool "
      "first=False, "
      "float grad_scale=1.0, bool maximize=False) -> ()");
  m.def("cast_(Tensor source, Tensor(a!) target) -> ()");
  m.def(
      "flatten_(Tensor[] sources, Tensor(a!) flat, int[] offsets, bool add=False, Tensor(b!)? "
      "nonfinite=None) "
      "-> ()");
  m.def("sum_of_squares(Tensor value) -> Tensor");
  m.def("adopt_writes_(Tensor param, Tensor(a!) master) -> ()");
  m.def("_use_instruction_set(str name) -> str", use_instruction_set);
  m.def("_instruction_set() -> str", instruction_set_name);
}

TORCH_LIBRARY_IMPL(zero_ext, CPU, m) {
  m.impl("accumulate_", accumulate_);
  m.impl("accumulate_list_", accumulate_list_);
  m.impl("accumulate_ranks_", accumulate_ranks_);
  m.impl("adamw_", adamw_);
  m.impl("sgd_", sgd_);
  m.impl("cast_", cast_);
  m.impl("flatten_", flatten_);
  m.impl("sum_of_squares", sum_of_squares);
  m.impl("adopt_writes_", adopt_writes_);
}

}  // namespace zero_ext
