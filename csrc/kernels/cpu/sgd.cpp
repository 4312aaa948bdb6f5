// sgd: one step of SGD on flat ranges; formula: SgdArgs in kernels.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/sgd.cpp
//
// Memory bound: reads grad; reads and writes master, the parameter and the momentum buffer.
#include "kernels/cpu/table.h"
#include "kernels/cpu/update.h"

namespace zero_ext::kernels {

Status sgd_cpu(const SgdArgs& args, const Launch& launch) {
  if (!is_valid(args)) return Status::bad_argument;
  return skipped(args.on_device) ? Status::ok : run_update(args, launch);
}

}  // namespace zero_ext::kernels
