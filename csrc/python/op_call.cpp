#include "python/op_call.h"

#include <Python.h>
#include <c10/util/irange.h>

namespace zero_ext {

OpCall::OpCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
    : schema_(op.schema()),
      values_(torch::jit::pop(*stack, schema_.arguments().size())),
      guard_(device_of_written()),
      launch_(launch_on(device())) {
  launch_.error = &error_;
}

OpCall::~OpCall() {
  if (Py_IsInitialized() == 0) return;
  const PyGILState_STATE gil = PyGILState_Ensure();
  values_.clear();
  PyGILState_Release(gil);
}

template <class Visit>
void OpCall::for_each_written(const Visit& visit) const {
  for (const auto i : c10::irange(values_.size())) {
    const c10::AliasInfo* alias = schema_.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite() || !has(i)) continue;
    for (const c10::IValue& written : tensors(i)) visit(written.toTensor());
  }
}

c10::Device OpCall::device_of_written() const {
  std::optional<c10::Device> first;
  for_each_written([&](const at::Tensor& written) {
    if (!first.has_value()) first = written.device();
  });
  return first.value_or(at::kCPU);
}

kernels::DType OpCall::check_list(size_t i) const {
  const auto list = tensors(i);
  for (const auto k : c10::irange(list.size())) {
    const at::Tensor& tensor = list[k].toTensor();
    check_value(name(i), tensor, device());
    TORCH_CHECK(tensor.scalar_type() == list[0].toTensor().scalar_type(), "zero_ext: '", name(i),
                "[", k, "]' has dtype ", tensor.scalar_type(), ", '", name(i), "[0]' has ",
                list[0].toTensor().scalar_type(), ". Call once per dtype.");
  }
  return list.empty() ? kernels::DType::f32 : dtype_of(list[0].toTensor().scalar_type());
}

void OpCall::check_pair(size_t i, const at::Tensor& one, size_t k, const at::Tensor& other) const {
  check_numel(name(i), one, other.numel(), name(k));
  check_apart(name(i), one, name(k), other);
}

void OpCall::check_same_length(size_t i, size_t length, size_t k, size_t other_length) const {
  TORCH_CHECK(length == other_length, "zero_ext: ", length, " tensors in '", name(i), "', ",
              other_length, " in '", name(k), "'. Pass one for each.");
}

void OpCall::finish(kernels::Status status) const {
  TORCH_CHECK(status != kernels::Status::launch_failed, schema_.name(),
              " could not be launched on ", device(), ": ", error_, ".");
  TORCH_INTERNAL_ASSERT(status == kernels::Status::ok, schema_.name(),
                        " was refused by its kernel (status ", static_cast<int32_t>(status), ").");
  for_each_written(mark_written);
}

}  // namespace zero_ext
