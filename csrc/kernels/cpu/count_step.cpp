// count_step: *steps_done += 1, unless skipped
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/count_step.cpp
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {

Status count_step_cpu(float* steps_done, const int32_t* skip, const Launch& /*launch*/) {
  if (skip == nullptr || *skip == 0) ++*steps_done;
  return Status::ok;
}

}  // namespace zero_ext::kernels
