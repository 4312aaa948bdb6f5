// The module: its functions, and the bindings of the other files.
#include "python/bindings.h"

#include <chrono>
#include <string>

#include "core/torch_internals.h"
#include "device/kernel_table.h"
#include "engine/changes.h"
#include "gather/shutdown_handshake.h"
#include "kernels/digest.h"
#include "memory/memory.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("has_kernels_on",
        [](const at::Device& device) { return zero_ext::has_kernels_on(device.type()); });
  // The address of a device's zero_ext::kernels::Kernels. set_kernels(): for a device that this
  // package does not know.
  m.def("kernels_on", [](const at::Device& device) {
    return reinterpret_cast<uintptr_t>(&zero_ext::kernels_on(device.type()));
  });
  m.def("set_kernels", [](const at::Device& device, uintptr_t table) {
    zero_ext::set_kernels(device.type(),
                          reinterpret_cast<const zero_ext::kernels::Kernels*>(table));
  });
  m.def("cpu_instruction_set", &zero_ext::kernels::cpu_instruction_set);
  // Of the bytes of a contiguous buffer.
  m.def("digest", [](const py::buffer& buffer) {
    const py::buffer_info info = buffer.request();
    TORCH_CHECK_VALUE(PyBuffer_IsContiguous(info.view(), 'C') != 0,
                      "zero_ext: the buffer is not contiguous.");
    const py::gil_scoped_release no_gil;
    return zero_ext::kernels::digest(info.ptr, info.size * info.itemsize);
  });
  m.def("part_digest", &zero_ext::part_digest, zero_ext::NoGil());
  m.def(
      "wait_for_shutdowns",
      [](double seconds) {
        zero_ext::wait_for_shutdowns(
            std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3)));
      },
      py::arg("seconds"), zero_ext::NoGil());
  // Whether another tensor than this one, or another object, holds its memory.
  m.def("shares_memory",
        [](const at::Tensor& tensor) { return zero_ext::is_shared(tensor.storage()); });
  // The memory of the storage that a tensor lies in goes and comes: access raises `message` meanwhile.
  m.def(
      "take_memory",
      [](const at::Tensor& tensor, const std::string& message) {
        zero_ext::take_memory(*tensor.storage().unsafeGetStorageImpl(), message);
      },
      zero_ext::NoGil());
  m.def(
      "give_memory",
      [](const at::Tensor& tensor) {
        const c10::Storage& storage = tensor.storage();
        zero_ext::give_memory(
            *storage.unsafeGetStorageImpl(),
            zero_ext::allocate_at({.device = storage.device()}, storage.nbytes()));
      },
      zero_ext::NoGil());
  m.def("broadcast_parts", &zero_ext::broadcast_parts, zero_ext::NoGil());
  zero_ext::bind_errors(m);
  zero_ext::bind_engine(m);
  zero_ext::bind_optimizer(m);
  zero_ext::bind_for_tests(m);
}
