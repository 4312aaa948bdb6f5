// count_step: *steps_done += 1, unless skipped
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/count_step.cu
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

__global__ void add_step(float* steps_done, const int32_t* skip) {
  const bool is_counted = skip == nullptr || *skip == 0;
  if (device::thread_of_grid() == 0 && is_counted) *steps_done += 1;
}

}  // namespace

Status count_step_cuda(float* steps_done, const int32_t* skip, const Launch& launch) {
  return device::queue(launch, /*blocks_wanted=*/1, add_step, steps_done, skip);
}

}  // namespace zero_ext::kernels
