// The stateless kernels as torch.ops.zero_ext.*: schema, checks, one implementation for every
// device that has kernels. Updates of optimizers are in update_ops.cpp, fake implementations in
// zero_ext/ops.py.
//
// Every op checks all of its arguments before it writes anything, and every buffer that is written
// must be contiguous.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <Python.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "device/kernel_table.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/kernels.h"
#include "python/op_call.h"
#include "python/op_checks.h"

namespace zero_ext {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = c10::List<Tensor>;

// The arguments of an op with lists. Such ops are boxed kernels, because at::TensorList would copy
// the list. Releasing a tensor that Python holds as well takes the GIL: a thousand tensors, released
// one by one, wait longer for it than the rest of the call takes.
class Arguments {
 public:
  Arguments(torch::jit::Stack* stack, size_t count) : values_(torch::jit::pop(*stack, count)) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  ~Arguments() {
    if (Py_IsInitialized() == 0) return;
    const PyGILState_STATE gil = PyGILState_Ensure();
    values_.clear();
    PyGILState_Release(gil);
  }

  Tensors tensors(size_t i) const { return values_[i].toTensorList(); }
  const Tensor& tensor(size_t i) const { return values_[i].toTensor(); }
  OptionalTensor optional_tensor(size_t i) const { return values_[i].toOptional<Tensor>(); }
  float number(size_t i) const { return static_cast<float>(values_[i].toDouble()); }
  bool flag(size_t i) const { return values_[i].toBool(); }
  c10::List<int64_t> integers(size_t i) const { return values_[i].toIntList(); }

 private:
  std::vector<c10::IValue> values_;
};

void check_same_length(const char* name, size_t length, const char* other, size_t other_length) {
  TORCH_CHECK(length == other_length, "zero_ext: ", length, " tensors in '", name, "', ",
              other_length, " in '", other, "'. Pass one for each.");
}

// One dtype for a whole list, because a kernel call has one. Float32 where the list is empty.
at::ScalarType check_list(const char* name, const Tensors& list, c10::Device device) {
  for (const auto i : c10::irange(list.size())) {
    check_value(name, list[i], device);
    TORCH_CHECK(list[i].scalar_type() == list[0].scalar_type(), "zero_ext: '", name, "[", i,
                "]' has dtype ", list[i].scalar_type(), ", '", name, "[0]' has ",
                list[0].scalar_type(), ". Call once per dtype.");
  }
  return list.empty() ? at::kFloat : list[0].scalar_type();
}

int32_t* nonfinite_flag(const OptionalTensor& nonfinite, c10::Device device) {
  if (!nonfinite.has_value()) return nullptr;
  check_scalar("nonfinite", *nonfinite, at::kInt, device);
  return nonfinite->mutable_data_ptr<int32_t>();
}

void accumulate_(const Tensor& grad, const Tensor& sum, double scale, bool fresh,
                 const OptionalTensor& nonfinite) {
  OpCall call(sum);
  check_value("grad", grad, call.device());
  check_float("sum", sum, call.device());
  check_numel("grad", grad, sum.numel(), "sum");
  check_apart("grad", grad, "sum", sum);
  int32_t* flag = nonfinite_flag(nonfinite, call.device());
  call.check("accumulate_",
             call.kernels().accumulate(grad.const_data_ptr(), dtype_of(grad.scalar_type()),
                                       sum.mutable_data_ptr<float>(), sum.numel(),
                                       static_cast<float>(scale), fresh, flag, call.launch()));
  mark_written(sum);
  mark_written(nonfinite);
}

void accumulate_list_(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments arguments(stack, 5);
  const Tensors grads = arguments.tensors(0);
  const Tensors sums = arguments.tensors(1);
  const float scale = arguments.number(2);
  const bool fresh = arguments.flag(3);
  const OptionalTensor nonfinite = arguments.optional_tensor(4);
  check_same_length("grads", grads.size(), "sums", sums.size());
  if (sums.empty()) return;
  OpCall call(sums[0]);
  const at::ScalarType dtype = check_list("grads", grads, call.device());
  std::vector<kernels::AccumulateSegment> segments;
  segments.reserve(grads.size());
  for (const auto i : c10::irange(grads.size())) {
    check_float("sums", sums[i], call.device());
    check_numel("grads", grads[i], sums[i].numel(), "sums");
    check_apart("grads", grads[i], "sums", sums[i]);
  }
  int32_t* flag = nonfinite_flag(nonfinite, call.device());
  for (const auto i : c10::irange(grads.size())) {
    segments.push_back(
        {grads[i].const_data_ptr(), sums[i].mutable_data_ptr<float>(), sums[i].numel()});
  }
  call.check("accumulate_list_",
             call.kernels().accumulate_list(segments.data(), std::ssize(segments), dtype_of(dtype),
                                            scale, fresh, flag, call.launch()));
  for (const auto i : c10::irange(sums.size())) mark_written(sums[i]);
  mark_written(nonfinite);
}

void accumulate_ranks_(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments arguments(stack, 5);
  const Tensors grads = arguments.tensors(0);
  const Tensor& sum = arguments.tensor(1);
  const float scale = arguments.number(2);
  const bool fresh = arguments.flag(3);
  const OptionalTensor nonfinite = arguments.optional_tensor(4);
  OpCall call(sum);
  const at::ScalarType dtype = check_list("grads", grads, call.device());
  check_float("sum", sum, call.device());
  TORCH_CHECK(!grads.empty(), "zero_ext: 'grads' is empty. Pass one gradient per rank.");
  std::vector<const void*> pointers;
  pointers.reserve(grads.size());
  for (const auto i : c10::irange(grads.size())) {
    const Tensor& grad = grads[i];
    check_numel("grads", grad, sum.numel(), "sum");
    // The kernel allows a gradient that is exactly the sum.
    const bool is_sum = dtype == at::kFloat && grad.const_data_ptr() == sum.const_data_ptr();
    if (!is_sum) check_apart("grads", grad, "sum", sum);
    pointers.push_back(grad.const_data_ptr());
  }
  int32_t* flag = nonfinite_flag(nonfinite, call.device());
  call.check("accumulate_ranks_",
             call.kernels().accumulate_ranks(pointers.data(), static_cast<int32_t>(pointers.size()),
                                             dtype_of(dtype), sum.mutable_data_ptr<float>(),
                                             sum.numel(), scale, fresh, flag, call.launch()));
  mark_written(sum);
  mark_written(nonfinite);
}

void cast_(const Tensor& source, const Tensor& target) {
  OpCall call(target);
  check_value("source", source, call.device());
  check_value("target", target, call.device());
  check_numel("source", source, target.numel(), "target");
  check_apart("source", source, "target", target);
  call.check("cast_", call.kernels().cast(source.const_data_ptr(), dtype_of(source.scalar_type()),
                                          target.mutable_data_ptr(), dtype_of(target.scalar_type()),
                                          target.numel(), call.launch()));
  mark_written(target);
}

void check_offset(size_t i, int64_t offset, int64_t numel, const Tensor& flat) {
  TORCH_CHECK(offset >= 0 && offset + numel <= flat.numel(), "zero_ext: 'sources[", i, "]' with ",
              numel, " elements at offset ", offset, " does not fit into 'flat' with ",
              flat.numel(), " elements. Correct the offset or enlarge 'flat'.");
}

void flatten_(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments arguments(stack, 5);
  const Tensors sources = arguments.tensors(0);
  const Tensor& flat = arguments.tensor(1);
  const c10::List<int64_t> offsets = arguments.integers(2);
  const bool add = arguments.flag(3);
  const OptionalTensor nonfinite = arguments.optional_tensor(4);
  check_same_length("sources", sources.size(), "offsets", offsets.size());
  OpCall call(flat);
  const at::ScalarType dtype = check_list("sources", sources, call.device());
  check_value("flat", flat, call.device());
  for (const auto i : c10::irange(sources.size())) {
    check_offset(i, offsets[i], sources[i].numel(), flat);
    check_apart("sources", sources[i], "flat", flat);
  }
  int32_t* flag = nonfinite_flag(nonfinite, call.device());
  std::vector<kernels::CopySegment> segments;
  segments.reserve(sources.size());
  char* base = static_cast<char*>(flat.mutable_data_ptr());
  for (const auto i : c10::irange(sources.size())) {
    segments.push_back(
        {sources[i].const_data_ptr(), base + offsets[i] * flat.element_size(), sources[i].numel()});
  }
  const kernels::Write write = add ? kernels::Write::add : kernels::Write::overwrite;
  call.check("flatten_",
             call.kernels().flatten(segments.data(), std::ssize(segments), dtype_of(dtype),
                                    dtype_of(flat.scalar_type()), write, flag, call.launch()));
  mark_written(flat);
  mark_written(nonfinite);
}

void find_nonfinite_(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments arguments(stack, 2);
  const Tensors values = arguments.tensors(0);
  const Tensor& nonfinite = arguments.tensor(1);
  OpCall call(nonfinite);
  TORCH_CHECK(nonfinite.scalar_type() == at::kInt && nonfinite.is_contiguous(),
              "zero_ext: 'nonfinite' is ", nonfinite.scalar_type(),
              nonfinite.is_contiguous() ? "" : ", not contiguous",
              ". Pass contiguous int32 flags, one for each of 'values'.");
  check_numel("nonfinite", nonfinite, static_cast<int64_t>(values.size()), "values");
  std::vector<kernels::ReadSegment> segments;
  segments.reserve(values.size());
  for (const auto i : c10::irange(values.size())) {
    check_float("values", values[i], call.device());
  }
  int32_t* flags = nonfinite.mutable_data_ptr<int32_t>();
  for (const auto i : c10::irange(values.size())) {
    segments.push_back({values[i].const_data_ptr<float>(), values[i].numel(), flags + i});
  }
  call.check("find_nonfinite_",
             call.kernels().find_nonfinite(segments.data(), std::ssize(segments), call.launch()));
  mark_written(nonfinite);
}

void adopt_writes_(const Tensor& param, const Tensor& master) {
  OpCall call(master);
  check_value("param", param, call.device());
  check_float("master", master, call.device());
  check_numel("param", param, master.numel(), "master");
  check_apart("param", param, "master", master);
  call.check("adopt_writes_", call.kernels().adopt_writes(
                                  param.const_data_ptr(), dtype_of(param.scalar_type()),
                                  master.mutable_data_ptr<float>(), master.numel(), call.launch()));
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

// For tests: has "none", "sums" or "all" kernels fetch ahead, returns which did before.
std::string use_fetch_ahead(const std::string& kernels) {
  constexpr std::array kNames{"none", "sums", "all"};
  const auto* place = std::find(kNames.begin(), kNames.end(), kernels);
  TORCH_CHECK(place != kNames.end(), "zero_ext: no kernels '", kernels,
              "' that fetch ahead. Choose none, sums or all.");
  const auto previous = kernels::use_fetch_ahead(
      static_cast<kernels::FetchAhead>(std::distance(kNames.begin(), place)));
  return kNames.at(static_cast<size_t>(previous));
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
  m.def("cast_(Tensor source, Tensor(a!) target) -> ()");
  m.def(
      "flatten_(Tensor[] sources, Tensor(a!) flat, int[] offsets, bool add=False, Tensor(b!)? "
      "nonfinite=None) "
      "-> ()");
  m.def("find_nonfinite_(Tensor[] values, Tensor(a!) nonfinite) -> ()");
  m.def("adopt_writes_(Tensor param, Tensor(a!) master) -> ()");
  m.def("_use_instruction_set(str name) -> str", use_instruction_set);
  m.def("_instruction_set() -> str", instruction_set_name);
  m.def("_use_fetch_ahead(str kernels) -> str", use_fetch_ahead);
}

namespace {

void implement(torch::Library& m) {
  m.impl("accumulate_", accumulate_);
  m.impl("accumulate_list_", torch::CppFunction::makeFromBoxedFunction<accumulate_list_>());
  m.impl("accumulate_ranks_", torch::CppFunction::makeFromBoxedFunction<accumulate_ranks_>());
  m.impl("cast_", cast_);
  m.impl("flatten_", torch::CppFunction::makeFromBoxedFunction<flatten_>());
  m.impl("find_nonfinite_", torch::CppFunction::makeFromBoxedFunction<find_nonfinite_>());
  m.impl("adopt_writes_", adopt_writes_);
}

}  // namespace

TORCH_LIBRARY_IMPL(zero_ext, CPU, m) { implement(m); }
#if defined(ZERO_EXT_CUDA)
TORCH_LIBRARY_IMPL(zero_ext, CUDA, m) { implement(m); }
#endif

}  // namespace zero_ext
