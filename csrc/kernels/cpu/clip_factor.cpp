// clip_factor: *norm   = sqrt(sum)
//              *factor = isfinite(norm) ? min(1, max_norm / (sqrt(sum) + 1e-6)) : 1
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/clip_factor.cpp
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {

Status clip_factor_cpu(const SquareSum* sum, double max_norm, float* norm, float* factor,
                       const Launch& /*launch*/) {
  *factor = clipping_factor(*sum, max_norm, norm);
  return Status::ok;
}

}  // namespace zero_ext::kernels
