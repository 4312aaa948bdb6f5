// clip_factor: *norm   = sqrt(sum)
//              *factor = isfinite(norm) ? min(1, max_norm / (sqrt(sum) + 1e-6)) : 1
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/clip_factor.cu
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

__global__ void clip(const SquareSum* sum, double max_norm, float* norm, float* factor) {
  if (device::thread_of_grid() == 0) *factor = clipping_factor(*sum, max_norm, norm);
}

}  // namespace

Status clip_factor_cuda(const SquareSum* sum, double max_norm, float* norm, float* factor,
                        const Launch& launch) {
  return device::queue(launch, /*blocks_wanted=*/1, clip, sum, max_norm, norm, factor);
}

}  // namespace zero_ext::kernels
