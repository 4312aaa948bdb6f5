// clip_factor: a norm, and what its gradients are multiplied by to keep it below a limit
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -c clip_factor_cpu.cpp
#include "kernels_cpu.h"

namespace zero_ext::kernels {

Status clip_factor_cpu(const SquareSum* sum, double max_norm, float* norm, float* factor,
                       const Launch& /*launch*/) {
  *factor = clipping_factor(*sum, max_norm, norm);
  return Status::ok;
}

}  // namespace zero_ext::kernels
