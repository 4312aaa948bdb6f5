// OpCall: one call of an op: its arguments, and where it runs: on the device of the first tensor
// that it writes to, on the current stream of that device.
//
// Ops are boxed kernels, because at::TensorList would copy a list. torch calls boxed(), which makes
// the OpCall, runs the op and checks its status. Then it tells autograd what the op wrote, by the
// schema.
//
// Threads: used by the thread that called the op.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "device/kernel_table.h"
#include "kernels/kernels.h"
#include "python/op_checks.h"

namespace zero_ext {

class OpCall {
 public:
  OpCall(const c10::OperatorHandle& op, torch::jit::Stack* stack);
  OpCall(const OpCall&) = delete;
  OpCall& operator=(const OpCall&) = delete;
  // Releasing a tensor that Python holds as well takes the GIL: a thousand tensors, released one by
  // one, wait longer for it than the rest of the call takes.
  ~OpCall();

  c10::Device device() const { return guard_.current_device(); }
  const kernels::Kernels& kernels() const { return kernels_on(device().type()); }
  const kernels::Launch& launch() const { return launch_; }

  // Argument i of the schema.
  const char* name(size_t i) const { return schema_.arguments()[i].name().c_str(); }
  bool has(size_t i) const { return !values_[i].isNone(); }
  const at::Tensor& tensor(size_t i) const { return values_[i].toTensor(); }
  // A list's elements, or the only tensor.
  c10::ArrayRef<c10::IValue> tensors(size_t i) const {
    return values_[i].isList() ? values_[i].toListRef() : c10::ArrayRef<c10::IValue>(values_[i]);
  }
  c10::List<int64_t> integers(size_t i) const { return values_[i].toIntList(); }
  int64_t integer(size_t i) const { return values_[i].toInt(); }
  double number(size_t i) const { return values_[i].toDouble(); }
  bool flag(size_t i) const { return values_[i].toBool(); }
  const std::string& text(size_t i) const { return values_[i].toStringRef(); }

  // Checked, see op_checks.h.
  const at::Tensor& value(size_t i) const {
    check_value(name(i), tensor(i), device());
    return tensor(i);
  }
  const at::Tensor& floats(size_t i) const {
    check_float(name(i), tensor(i), device());
    return tensor(i);
  }
  // One value on the device, or null.
  template <class T>
  T* scalar(size_t i) const {
    if (!has(i)) return nullptr;
    check_scalar(name(i), tensor(i), c10::CppTypeToScalarType<T>::value, device());
    return static_cast<T*>(tensor(i).data_ptr());
  }
  // The dtype of all tensors of a list, because a kernel call has one. Float32 where it is empty.
  kernels::DType check_list(size_t i) const;
  // `one` of argument i, `other` of argument k: as many elements, in memory of their own.
  void check_pair(size_t i, const at::Tensor& one, size_t k, const at::Tensor& other) const;
  void check_same_length(size_t i, size_t length, size_t k, size_t other_length) const;

  // The op ran.
  void finish(kernels::Status status) const;

 private:
  // Calls visit(tensor) for what the op writes.
  template <class Visit>
  void for_each_written(const Visit& visit) const;
  c10::Device device_of_written() const;

  const c10::FunctionSchema& schema_;
  std::vector<c10::IValue> values_;
  c10::DeviceGuard guard_;
  const char* error_ = "unknown error";
  kernels::Launch launch_;
};

template <kernels::Status (*op)(const OpCall& call)>
void boxed(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const OpCall call(handle, stack);
  call.finish(op(call));
}

template <kernels::Status (*op)(const OpCall& call)>
void implement(torch::Library& m, const char* name) {
  m.impl(name, torch::CppFunction::makeFromBoxedFunction<boxed<op>>());
}

}  // namespace zero_ext
