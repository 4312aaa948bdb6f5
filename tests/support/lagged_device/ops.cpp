// ATen's operators on "lagged": memory and views here, everything else by the CPU's kernels.
//
// Note [How an operator runs]
// Operators that only write to their arguments (in place) are queued: they run on the stream's
// thread. For all others the host must know the results' shapes, so it waits for the current stream
// (and no other), runs the CPU's kernel at once on tensors that alias the device's memory, and
// queues the copies of what came out to where it belongs. Until then results are 0xff, so another
// stream that does not wait reads NaN, whichever way the operator ran.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <set>
#include <unordered_map>

#include "device.h"
#include "runtime.h"

namespace lagged {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

Tensor tensor_like(const Tensor& tensor, c10::Storage storage, c10::DispatchKey key,
                   int64_t storage_offset) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), storage_offset);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

// The device's memory as the CPU's. Owns nothing: memory stays mapped.
c10::Storage host_storage(const c10::Storage& storage) {
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(storage.mutable_data(), c10::kCPU), nullptr, false);
}

Tensor host_alias(const Tensor& tensor) {
  return tensor_like(tensor, host_storage(tensor.storage()), c10::DispatchKey::CPU,
                     tensor.storage_offset());
}

// A CPU tensor that stays what it is while a task waits. Not the tensor itself, but its storage:
// see Queue::push about what tasks own.
Tensor kept(const Tensor& tensor) {
  return tensor_like(tensor, tensor.storage(), c10::DispatchKey::CPU, tensor.storage_offset());
}

bool takes_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

struct HostMode {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::NoGradGuard no_grad;
};

std::atomic<bool> own_sums{true};

// Note [Own sums]
// The last bits of a GPU's matrix products are not the CPU's. So that no test depends on that, ours
// are computed in fp64 and rounded once.
bool has_own_sums(const c10::OperatorHandle& op) {
  static const std::set<std::string> names{"aten::mm",          "aten::addmm",
                                           "aten::bmm",         "aten::baddbmm",
                                           "aten::convolution", "aten::convolution_backward"};
  return own_sums && names.contains(op.schema().name()) && op.schema().overload_name().empty();
}

// One call of an operator with the device's tensors replaced by the CPU's.
class HostCall {
 public:
  // What the CPU's kernel writes to: the device's memory, or copies that finish() brings there.
  enum class Writes : int8_t { in_place, to_copies };

  HostCall(const c10::OperatorHandle& op, Writes writes) : op_(op), writes_(writes) {}

  void replace_arguments(Stack& stack, c10::Device device) {
    const auto& schema = op_.schema().arguments();
    const size_t first = first_argument(stack);
    const auto is_written = [&](size_t i) {
      return schema[i].alias_info() != nullptr && schema[i].alias_info()->isWrite();
    };
    for (size_t i = 0; i < schema.size(); ++i)
      check_device(stack[first + i], device, is_written(i));
    for (size_t i = 0; i < schema.size(); ++i) {
      if (stack[first + i].isNone() && takes_generator(schema[i])) {
        stack[first + i] = default_generator(device.index());
      }
      replace(stack[first + i], is_written(i));
    }
  }

  void run(Stack& stack) const {
    const bool widened = has_own_sums(op_);
    std::optional<at::ScalarType> dtype;
    for (size_t i = first_argument(stack); widened && i < stack.size(); ++i) {
      if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
      dtype = stack[i].toTensor().scalar_type();
      stack[i] = stack[i].toTensor().to(at::kDouble);
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (size_t i = stack.size() - op_.schema().returns().size(); dtype && i < stack.size(); ++i) {
      if (stack[i].toTensor().defined()) stack[i] = stack[i].toTensor().to(*dtype);
    }
  }

  // Queues the copies of what was written and of what is new, and puts device tensors in place of
  // the results.
  void finish(Stack& stack, c10::Device device) {
    Queue& queue = current_queue(device.index());
    for (const auto& [copy, original] : copies_) publish(copy, original, queue);
    const size_t first = stack.size() - op_.schema().returns().size();
    for (size_t i = first; i < stack.size(); ++i) {
      if (stack[i].isTensor()) {
        stack[i] = device_tensor(stack[i].toTensor(), device, queue);
      } else if (stack[i].isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : stack[i].toTensorVector()) {
          list.push_back(device_tensor(tensor, device, queue));
        }
        stack[i] = list;
      }
    }
  }

 private:
  size_t first_argument(const Stack& stack) const {
    return stack.size() - op_.schema().arguments().size();
  }

  // As CUDA's operators: only numbers that are read and lists of indices may come from elsewhere.
  void check_device(const IValue& value, c10::Device device, bool written) const {
    const auto check = [&](const Tensor& tensor) {
      const bool number = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0 && !written;
      TORCH_CHECK(!tensor.defined() || tensor.device() == device || number, op_.schema().name(),
                  ": Expected all tensors to be on the same device, but found ",
                  "at least two devices, ", device, " and ", tensor.device(), "!");
    };
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) check(tensor);
    }
  }

  void replace(IValue& value, bool written) {
    if (value.isTensor()) {
      value = host_tensor(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(host_tensor(tensor, written));
      }
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(host_tensor(*tensor, written)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      value = host_generator(value.toGenerator());
    }
  }

  Tensor host_tensor(const Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      // A queued operator reads later.
      if (writes_ == Writes::in_place && tensor.is_cpu()) return snapshot(tensor);
      originals_.emplace(tensor.unsafeGetTensorImpl(), tensor);
      return tensor;
    }
    auto& storage = aliases_.try_emplace(tensor.storage().unsafeGetStorageImpl()).first->second;
    if (!storage) storage = host_storage(tensor.storage());
    Tensor host = tensor_like(tensor, storage, c10::DispatchKey::CPU, tensor.storage_offset());
    if (written && writes_ == Writes::to_copies) {
      Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(), host.options());
      copy.copy_(host);
      copies_.emplace_back(copy, tensor);
      host = copy;
    }
    originals_.emplace(host.unsafeGetTensorImpl(), tensor);
    hosts_.push_back(host);
    return host;
  }

  static Tensor snapshot(const Tensor& tensor) {
    Tensor copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return copy;
  }

  static void publish(const Tensor& copy, const Tensor& original, Queue& queue) {
    if (copy.sizes() != original.sizes() || copy.strides() != original.strides()) {
      original.resize_(copy.sizes());  // an `out` argument
      original.unsafeGetTensorImpl()->set_sizes_and_strides(copy.sizes(), copy.strides());
    }
    if (copy.numel() == 0) return;
    queue.push([copy, target = host_alias(original)] {
      const HostMode mode;
      target.copy_(copy);
    });
  }

  // What an operator returned, as a tensor of the device: an argument, a view of one, or new.
  Tensor device_tensor(const Tensor& host, c10::Device device, Queue& queue) {
    if (!host.defined()) return host;
    if (const auto found = originals_.find(host.unsafeGetTensorImpl()); found != originals_.end()) {
      return found->second;
    }
    TORCH_CHECK(host.layout() == c10::kStrided, "lagged has only strided tensors, ", op_.schema(),
                " returned ", host.layout());
    for (const auto& [device_storage, storage] : aliases_) {
      if (storage.unsafeGetStorageImpl() != host.storage().unsafeGetStorageImpl()) continue;
      auto owner = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(device_storage);
      return tensor_like(host, c10::Storage(std::move(owner)), c10::DispatchKey::PrivateUse1,
                         host.storage_offset());
    }
    auto& storage = fresh_.try_emplace(host.storage().unsafeGetStorageImpl()).first->second;
    if (!storage) storage = moved(host.storage(), queue);
    return tensor_like(host, storage, c10::DispatchKey::PrivateUse1, host.storage_offset());
  }

  static c10::Storage moved(const c10::Storage& host, Queue& queue) {
    auto* allocator = c10::GetAllocator(c10::kPrivateUse1);
    c10::Storage storage(c10::Storage::use_byte_size_t(), host.nbytes(),
                         allocator->allocate(host.nbytes()), allocator, true);
    if (host.nbytes() > 0) {
      queue.push([host, target = storage.mutable_data()] {
        std::memcpy(target, host.data(), host.nbytes());
      });
    }
    return storage;
  }

  const c10::OperatorHandle& op_;
  const Writes writes_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases_;  // by the device's storage
  std::unordered_map<c10::StorageImpl*, c10::Storage> fresh_;    // by the host's storage
  std::unordered_map<c10::TensorImpl*, Tensor> originals_;
  std::vector<std::pair<Tensor, Tensor>> copies_;  // of written tensors, and these
  std::vector<Tensor> hosts_;                      // keeps the keys of originals_ alive
};

std::optional<c10::Device> device_of_arguments(const c10::OperatorHandle& op, const Stack& stack) {
  std::optional<c10::Device> device;
  const size_t first = stack.size() - op.schema().arguments().size();
  for (size_t i = first; i < stack.size(); ++i) {
    const IValue& value = stack[i];
    if (value.isTensor() && on_device(value.toTensor())) return value.toTensor().device();
    if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) {
        if (on_device(tensor)) return tensor.device();
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor && on_device(*tensor)) return tensor->device();
      }
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      device = value.toDevice();
    }
  }
  return device;
}

// True where all results are arguments that the operator writes in place, and no random numbers are
// drawn, which must happen in the host's order.
bool can_be_queued(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& schema = op.schema();
  if (schema.returns().size() != 1 || schema.name().back() != '_') return false;
  for (const auto& argument : schema.arguments()) {
    if (takes_generator(argument)) return false;
    const auto* alias = argument.alias_info();
    if (argument.name() == "out" && alias != nullptr && alias->isWrite()) return false;
  }
  const auto* alias = schema.returns()[0].alias_info();
  const IValue& self = stack[stack.size() - schema.arguments().size()];
  return alias != nullptr && alias->isWrite() && self.isTensor() && on_device(self.toTensor());
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const HostMode mode;
  std::optional<c10::Device> device = device_of_arguments(op, *stack);
  if (!device || !device->has_index()) {
    device = c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current_device()));
  }
  const c10::DeviceGuard guard(*device);
  Queue& queue = current_queue(device->index());
  if (can_be_queued(op, *stack)) {
    const size_t first = stack->size() - op.schema().arguments().size();
    const IValue self = (*stack)[first];
    HostCall call(op, HostCall::Writes::in_place);
    call.replace_arguments(*stack, *device);
    queue.push([op, arguments = Stack(stack->begin() + first, stack->end())]() mutable {
      const HostMode mode;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
    });
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->push_back(self);
    return;
  }
  queue.wait_quietly(queue.last_ticket());  // a device would not: a failed task is no news here
  HostCall call(op, HostCall::Writes::to_copies);
  call.replace_arguments(*stack, *device);
  call.run(*stack);
  call.finish(*stack, *device);
}

// Memory and views.

constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "lagged has only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "only CPU tensors can be pinned");
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<c10::Layout> layout, std::optional<c10::Device> device,
             std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, c10::GetAllocator(c10::kPrivateUse1), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
                     std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(c10::kPrivateUse1),
                                           kKeys, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                  std::optional<int64_t> storage_offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, storage_offset);
}

void fit_storage(const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                        tensor.itemsize(), tensor.storage_offset());
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  fit_storage(self);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t storage_offset,
                    at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(storage.device() == self.device(), "set_() of a ", self.device(),
              " tensor to a storage on ", storage.device());
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, storage_offset);
  } else {
    impl->set_storage_offset(storage_offset);
    impl->set_sizes_contiguous(size);
  }
  fit_storage(self);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {numel}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  auto* allocator = c10::GetAllocator(c10::kPrivateUse1);
  return set_storage(
      self,
      c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator->allocate(0), allocator, true), 0,
      {0}, {});
}

at::Scalar local_scalar(const Tensor& self) {
  const HostMode mode;
  count_host_wait();
  current_queue(self.device().index()).wait_all();
  return host_alias(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  c10::getDeviceAllocator(c10::kPrivateUse1)->recordStream(self.storage().data_ptr(), stream);
}

// The host's side of a copy that runs later. Pinned memory waits for the stream before it is
// reused, as CUDA's does; pageable memory is read before the call returns, as by CUDA, but written
// late, so that it shows.
Tensor host_source(const Tensor& tensor, bool non_blocking, Queue& queue) {
  Block* pinned = pinned_block(tensor.storage().data());
  if (pinned != nullptr) record_use(pinned, queue);
  if (!non_blocking || pinned != nullptr) return host_alias(tensor);
  return is_pinned(tensor.storage().data()) ? kept(tensor) : tensor.clone();
}

Tensor host_target(const Tensor& tensor, bool non_blocking, Queue& queue) {
  Block* pinned = pinned_block(tensor.storage().data());
  if (pinned != nullptr) record_use(pinned, queue);
  return !non_blocking || pinned != nullptr ? host_alias(tensor) : kept(tensor);
}

// Copies are queued on the current stream of the device that is read from, or else written to.
Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
  if (self.is_same(given)) return self;
  const HostMode mode;
  const Tensor source = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  if (self.numel() == 0) return self;
  const bool from_device = on_device(source);
  const bool to_device = on_device(self);
  Queue& queue = current_queue((from_device ? source : self).device().index());
  Queue& other = to_device ? current_queue(self.device().index()) : queue;
  const Tensor from = from_device ? host_alias(source) : host_source(source, non_blocking, queue);
  const Tensor to = to_device ? host_alias(self) : host_target(self, non_blocking, queue);
  queue.push_wait(other, other.last_ticket());
  const uint64_t ticket = queue.push([from, to] {
    const HostMode mode;
    to.copy_(from);
  });
  other.push_wait(queue, ticket);
  if (!non_blocking && !(from_device && to_device)) {
    count_host_wait();
    queue.wait(ticket);
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor result = target;
  return copy_(result, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

int64_t sdp_choice(const Tensor& /*query*/, const Tensor& /*key*/, const Tensor& /*value*/,
                   const std::optional<Tensor>& /*mask*/, double /*dropout*/, bool /*causal*/,
                   std::optional<double> /*scale*/, bool /*gqa*/) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, at::IntArrayRef)>(at::native::view));
  m.impl("_reshape_alias", static_cast<Tensor (*)(const Tensor&, at::IntArrayRef, at::IntArrayRef)>(
                               at::native::_reshape_alias));
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_fused_sdp_choice", sdp_choice);
}

// Every other operator that has a kernel for the CPU uses it. Named one by one, because a fallback
// would come after compositions (native_layer_norm has one).
void register_host_operators() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                __FILE__, __LINE__);
  const std::set<std::string> also{"aten::convolution", "aten::convolution_backward"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && !also.contains(name.name)) continue;
    const std::string short_name =
        name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

}  // namespace
}  // namespace lagged

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &lagged::sdp_choice)
}

LAGGED_EXPORT void lagged_register() {
  lagged::register_device();
  lagged::register_host_operators();
}

LAGGED_EXPORT void lagged_set_own_sums(bool own) { lagged::own_sums = own; }
