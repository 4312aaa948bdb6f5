// adam: one step of Adam or AdamW on flat ranges; formula: AdamArgs in kernels.h.
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/adamw.cu
//
// Memory bound: reads grad; reads and writes master, both moments and the parameter: 32 bytes per
// element with a half-precision parameter.
#include "kernels/cuda/table.h"
#include "kernels/cuda/update.h"

namespace zero_ext::kernels {

Status adam_cuda(const AdamArgs& args, const Launch& launch) {
  if (!is_valid(args) || args.changed != nullptr) return Status::bad_argument;
  return args.moments == Moments::int8 ? adam_blocks_cuda(args, launch)
                                       : device::run_update(args, launch);
}

}  // namespace zero_ext::kernels
