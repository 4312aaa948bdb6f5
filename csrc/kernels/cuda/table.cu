// CUDA's table.
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/table.cu
#include <cuda_runtime.h>

#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

uint64_t capture_id_cuda(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;  // NOLINT: CUDA's type
  const cudaError_t error =
      cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id);
  if (error == cudaSuccess && status == cudaStreamCaptureStatusActive) return id;
  // The default stream is never captured, and may not be queried while another stream is.
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return 0;
}

void ask_during_captures_cuda() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
}

}  // namespace

const Kernels& cuda() {
  static constexpr Kernels kTable{
      .accumulate_list = accumulate_list_cuda,
      .accumulate_ranks = accumulate_ranks_cuda,
      .adam = adam_cuda,
      .sgd = sgd_cuda,
      .cast = cast_cuda,
      .flatten = flatten_cuda,
      .find_nonfinite = find_nonfinite_cuda,
      .add_squares = add_squares_cuda,
      .adopt_writes = adopt_writes_cuda,
      .clip_factor = clip_factor_cuda,
      .show_words = show_words_cuda,
      .await_words = await_words_cuda,
      .capture_id = capture_id_cuda,
      .ask_during_captures = ask_during_captures_cuda,
  };
  return kTable;
}

}  // namespace zero_ext::kernels
