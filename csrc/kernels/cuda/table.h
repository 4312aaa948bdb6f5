// The CUDA kernels, one file each. table.cu puts them into the table. Contracts: kernels.h.
#pragma once

#include "kernels/kernels.h"

namespace zero_ext::kernels {

// CUDA's table. Calls run on the current device, on Launch::stream, and never wait for the device.
const Kernels& cuda();

Status accumulate_list_cuda(const AccumulateSegment* segments, int64_t count, DType dtype,
                            float scale, bool fresh, int32_t* nonfinite, const Launch& launch);
Status accumulate_ranks_cuda(const void* const* grads, int32_t ranks, DType dtype, float* sum,
                             int64_t numel, float scale, bool fresh, int32_t* nonfinite,
                             const Launch& launch);
Status adam_cuda(const AdamArgs& args, const Launch& launch);
// adam_cuda of int8 moments.
Status adam_blocks_cuda(const AdamArgs& args, const Launch& launch);
Status sgd_cuda(const SgdArgs& args, const Launch& launch);
Status cast_cuda(const void* source, DType source_dtype, void* target, DType target_dtype,
                 int64_t numel, const Launch& launch);
Status flatten_cuda(const CopySegment* segments, int64_t count, DType source_dtype,
                    DType target_dtype, Write write, int32_t* nonfinite, const Launch& launch);
Status find_nonfinite_cuda(const ReadSegment* segments, int64_t count, const Launch& launch);
Status add_squares_cuda(const float* value, int64_t numel, SquareSum* sum, const Launch& launch);
Status adopt_writes_cuda(const void* param, DType param_dtype, float* master, int64_t numel,
                         const Launch& launch);
Status clip_factor_cuda(const SquareSum* sum, double max_norm, float* norm, float* factor,
                        const Launch& launch);
Status show_words_cuda(uint32_t* const* words, int32_t count, uint32_t* number, bool next,
                       uint32_t tag, const Launch& launch);
Status await_words_cuda(const uint32_t* words, int32_t count, const uint32_t* number, uint32_t tag,
                        int64_t timeout_ns, int32_t* failed, const Launch& launch);

}  // namespace zero_ext::kernels
