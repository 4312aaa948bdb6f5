// The stateless kernels as torch.ops.zero_ext.*: schema, checks, one implementation for every
// device that has kernels. Updates of optimizers are in update_ops.cpp, fake implementations in
// zero_ext/ops.py.
//
// Every op checks all of its arguments before it writes anything, and every buffer that is written
// must be contiguous.
#include <c10/util/irange.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/cpu/dispatch.h"
#include "python/op_call.h"

namespace zero_ext {
namespace {

using at::Tensor;
using kernels::Status;

// The arguments of all three that accumulate.
enum Accumulate : size_t { kGrads, kSums, kScale, kFresh, kNonfinite };

// accumulate_ is the same with one of each.
Status accumulate_list_(const OpCall& call) {
  const auto grads = call.tensors(kGrads);
  const auto sums = call.tensors(kSums);
  call.check_same_length(kGrads, grads.size(), kSums, sums.size());
  const kernels::DType dtype = call.check_list(kGrads);
  std::vector<kernels::AccumulateSegment> segments;
  segments.reserve(grads.size());
  for (const auto i : c10::irange(grads.size())) {
    const Tensor& grad = grads[i].toTensor();
    const Tensor& sum = sums[i].toTensor();
    check_float(call.name(kSums), sum, call.device());
    call.check_pair(kGrads, grad, kSums, sum);
    segments.push_back({grad.const_data_ptr(), sum.mutable_data_ptr<float>(), sum.numel()});
  }
  return call.kernels().accumulate_list(segments.data(), std::ssize(segments), dtype,
                                        static_cast<float>(call.number(kScale)), call.flag(kFresh),
                                        call.scalar<int32_t>(kNonfinite), call.launch());
}

Status accumulate_ranks_(const OpCall& call) {
  const auto grads = call.tensors(kGrads);
  const kernels::DType dtype = call.check_list(kGrads);
  const Tensor& sum = call.floats(kSums);
  TORCH_CHECK(!grads.empty(), "zero_ext: 'grads' is empty. Pass one gradient per rank.");
  std::vector<const void*> pointers;
  pointers.reserve(grads.size());
  for (const c10::IValue& each : grads) {
    const Tensor& grad = each.toTensor();
    check_numel(call.name(kGrads), grad, sum.numel(), call.name(kSums));
    // The kernel allows a gradient that is exactly the sum.
    const bool is_sum =
        dtype == kernels::DType::f32 && grad.const_data_ptr() == sum.const_data_ptr();
    if (!is_sum) check_apart(call.name(kGrads), grad, call.name(kSums), sum);
    pointers.push_back(grad.const_data_ptr());
  }
  return call.kernels().accumulate_ranks(pointers.data(), static_cast<int32_t>(pointers.size()),
                                         dtype, sum.mutable_data_ptr<float>(), sum.numel(),
                                         static_cast<float>(call.number(kScale)), call.flag(kFresh),
                                         call.scalar<int32_t>(kNonfinite), call.launch());
}

Status cast_(const OpCall& call) {
  const Tensor& source = call.value(0);
  const Tensor& target = call.value(1);
  call.check_pair(0, source, 1, target);
  return call.kernels().cast(source.const_data_ptr(), dtype_of(source.scalar_type()),
                             target.mutable_data_ptr(), dtype_of(target.scalar_type()),
                             target.numel(), call.launch());
}

Status flatten_(const OpCall& call) {
  enum : size_t { kSources, kFlat, kOffsets, kAdd, kFlag };
  const auto sources = call.tensors(kSources);
  const c10::List<int64_t> offsets = call.integers(kOffsets);
  call.check_same_length(kSources, sources.size(), kOffsets, offsets.size());
  const kernels::DType dtype = call.check_list(kSources);
  const Tensor& flat = call.value(kFlat);
  std::vector<kernels::CopySegment> segments;
  segments.reserve(sources.size());
  char* base = static_cast<char*>(flat.mutable_data_ptr());
  for (const auto i : c10::irange(sources.size())) {
    const Tensor& source = sources[i].toTensor();
    const int64_t offset = offsets[i];
    TORCH_CHECK(offset >= 0 && offset + source.numel() <= flat.numel(), "zero_ext: 'sources[", i,
                "]' with ", source.numel(), " elements at offset ", offset,
                " does not fit into 'flat' with ", flat.numel(),
                " elements. Correct the offset or enlarge 'flat'.");
    check_apart(call.name(kSources), source, call.name(kFlat), flat);
    segments.push_back(
        {source.const_data_ptr(), base + offset * flat.element_size(), source.numel()});
  }
  const kernels::Write write = call.flag(kAdd) ? kernels::Write::add : kernels::Write::overwrite;
  return call.kernels().flatten(segments.data(), std::ssize(segments), dtype,
                                dtype_of(flat.scalar_type()), write, call.scalar<int32_t>(kFlag),
                                call.launch());
}

Status find_nonfinite_(const OpCall& call) {
  const auto values = call.tensors(0);
  const Tensor& nonfinite = call.tensor(1);
  TORCH_CHECK(nonfinite.scalar_type() == at::kInt && nonfinite.is_contiguous(),
              "zero_ext: 'nonfinite' is ", nonfinite.scalar_type(),
              nonfinite.is_contiguous() ? "" : ", not contiguous",
              ". Pass contiguous int32 flags, one for each of 'values'.");
  check_numel(call.name(1), nonfinite, static_cast<int64_t>(values.size()), call.name(0));
  std::vector<kernels::ReadSegment> segments;
  segments.reserve(values.size());
  auto* flag = nonfinite.mutable_data_ptr<int32_t>();
  for (const c10::IValue& each : values) {
    const Tensor& value = each.toTensor();
    check_float(call.name(0), value, call.device());
    segments.push_back({value.const_data_ptr<float>(), value.numel(), flag++});
  }
  return call.kernels().find_nonfinite(segments.data(), std::ssize(segments), call.launch());
}

Status adopt_writes_(const OpCall& call) {
  const Tensor& param = call.value(0);
  const Tensor& master = call.floats(1);
  call.check_pair(0, param, 1, master);
  return call.kernels().adopt_writes(param.const_data_ptr(), dtype_of(param.scalar_type()),
                                     master.mutable_data_ptr<float>(), master.numel(),
                                     call.launch());
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

void implement_all(torch::Library& m) {
  implement<accumulate_list_>(m, "accumulate_");
  implement<accumulate_list_>(m, "accumulate_list_");
  implement<accumulate_ranks_>(m, "accumulate_ranks_");
  implement<cast_>(m, "cast_");
  implement<flatten_>(m, "flatten_");
  implement<find_nonfinite_>(m, "find_nonfinite_");
  implement<adopt_writes_>(m, "adopt_writes_");
}

}  // namespace

TORCH_LIBRARY_IMPL(zero_ext, CPU, m) { implement_all(m); }
#if defined(ZERO_EXT_CUDA)
TORCH_LIBRARY_IMPL(zero_ext, CUDA, m) { implement_all(m); }
#endif

}  // namespace zero_ext
