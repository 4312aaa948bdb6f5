// CUDA's table.
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -c kernels_cuda.cu
#include "kernels_cuda.h"

namespace zero_ext::kernels {

const Kernels& cuda() {
  static constexpr Kernels kTable{
      .accumulate = accumulate_cuda,
      .accumulate_list = accumulate_list_cuda,
      .accumulate_ranks = accumulate_ranks_cuda,
      .adam = adam_cuda,
      .sgd = sgd_cuda,
      .cast = cast_cuda,
      .flatten = flatten_cuda,
      .find_nonfinite = find_nonfinite_cuda,
      .sum_of_squares = sum_of_squares_cuda,
      .add_squares = add_squares_cuda,
      .adopt_writes = adopt_writes_cuda,
      .count_step = count_step_cuda,
      .clip_factor = clip_factor_cuda,
  };
  return kTable;
}

}  // namespace zero_ext::kernels
