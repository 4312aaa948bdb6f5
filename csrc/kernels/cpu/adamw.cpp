// adam: one step of Adam or AdamW on flat ranges; formula: AdamArgs in kernels.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/adamw.cpp
//
// Memory bound where a square root and two divisions are fast: reads grad; reads and writes master,
// both moments and the parameter: 32 bytes per element with a half-precision parameter.
#include "kernels/cpu/table.h"
#include "kernels/cpu/update.h"

namespace zero_ext::kernels {

Status adam_cpu(const AdamArgs& args, const Launch& launch) {
  if (!is_valid(args)) return Status::bad_argument;
  if (skipped(args.on_device)) return Status::ok;
  return args.moments == Moments::int8 ? adam_blocks_cpu(args, launch) : run_update(args, launch);
}

}  // namespace zero_ext::kernels
