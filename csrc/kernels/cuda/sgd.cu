// sgd: one step of SGD on flat ranges; formula: SgdArgs in kernels.h.
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/sgd.cu
//
// Memory bound: reads grad; reads and writes master, the parameter and the momentum buffer.
#include "kernels/cuda/table.h"
#include "kernels/cuda/update.h"

namespace zero_ext::kernels {

Status sgd_cuda(const SgdArgs& args, const Launch& launch) {
  if (!is_valid(args) || args.changed != nullptr) return Status::bad_argument;
  return device::run_update(args, launch);
}

}  // namespace zero_ext::kernels
