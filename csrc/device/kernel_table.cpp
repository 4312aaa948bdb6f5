#include "device/kernel_table.h"

// at::parallel_for is inline, and serial unless this file is compiled with -fopenmp. The extension
// must not be linked with -fopenmp, so that it uses torch's OpenMP runtime.
#include <ATen/Parallel.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <array>

#include "kernels/cuda/table.h"

namespace zero_ext {
namespace {

void parallel_for(int64_t numel, int64_t grain_numel, kernels::RangeBody body, void* context) {
  at::parallel_for(0, numel, grain_numel,
                   [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

using Tables = std::array<const kernels::Kernels*, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

Tables& tables() {
  static Tables tables = [] {
    Tables known{};
    known[static_cast<size_t>(c10::DeviceType::CPU)] = &kernels::cpu();
#if defined(ZERO_EXT_CUDA)
    known[static_cast<size_t>(c10::DeviceType::CUDA)] = &kernels::cuda();
#endif
    return known;
  }();
  return tables;
}

thread_local const char* launch_error = "unknown error";

}  // namespace

kernels::Launch cpu_launch() { return {.parallel_for = parallel_for}; }

bool has_kernels_on(c10::DeviceType type) { return tables()[static_cast<size_t>(type)] != nullptr; }

const kernels::Kernels& kernels_on(c10::DeviceType type) {
  TORCH_CHECK(has_kernels_on(type), "zero_ext: this build has no kernels for ", type,
              ". Build for CUDA with ZERO_EXT_CUDA=1, or move the tensors to the CPU.");
  return *tables()[static_cast<size_t>(type)];
}

void set_kernels(c10::DeviceType type, const kernels::Kernels* table) {
  tables()[static_cast<size_t>(type)] = table;
}

kernels::Launch launch_on(c10::Device device) {
  if (device.is_cpu()) return cpu_launch();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return {.stream = stream.native_handle(), .error = &launch_error};
}

void check(kernels::Status status, const char* kernel) {
  TORCH_CHECK(status != kernels::Status::launch_failed, "zero_ext: ", kernel,
              " could not be launched: ", launch_error, ".");
  TORCH_INTERNAL_ASSERT(status == kernels::Status::ok, "zero_ext: kernel ", kernel,
                        " returned status ", static_cast<int>(status));
}

bool has_kernels(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

kernels::DType dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kernels::DType::f32;
    case at::kBFloat16:
      return kernels::DType::bf16;
    case at::kHalf:
      return kernels::DType::f16;
    default:
      TORCH_CHECK(false, "zero_ext: ", dtype,
                  " has no kernels; use torch.float32, torch.bfloat16 or torch.float16.");
  }
}

}  // namespace zero_ext
