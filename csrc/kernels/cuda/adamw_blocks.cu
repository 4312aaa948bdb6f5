// adam of int8 moments, block by block; formula: AdamArgs in kernels.h.
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/adamw_blocks.cu
//
// Memory bound: reads grad; reads and writes master, the parameter and 1 byte of each moment: 20
// bytes per element with a half-precision parameter. A warp updates a block, and keeps its moments
// in registers until the scale is known.
#include "kernels/constants.h"
#include "kernels/cuda/adam_element.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"
#include "kernels/moments.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

constexpr int kLanes = 32;
constexpr int kPerLane = static_cast<int>(kBlockElements) / kLanes;

// The greatest of a warp's values, in every lane.
template <class T>
__device__ inline T greatest_of_warp(T value) {
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) {
    value = greatest(value, __shfl_xor_sync(0xFFFFFFFFU, value, other));
  }
  return value;
}

// One warp's view of a block. Vectors of `width` elements lie side by side over the lanes.
template <class T, bool decoupled, int width>
struct Block {
  static constexpr bool kHasParam = !std::is_same_v<T, NoParam>;
  static constexpr int kVectors = kPerLane / width;

  const AdamArgs& args;
  const AdamConstants& constants;
  // Of this lane's first vector.
  int64_t begin;
  int64_t states;
  int64_t left;  // elements up to the end of the segment
  float first[kPerLane];
  float second[kPerLane];

  __device__ static int64_t offset(int vector) { return int64_t{vector} * kLanes * width; }

  __device__ void update(int64_t scale) {
    const float first_scale = args.exp_avg_scale[scale];
    const float second_scale = args.exp_avg_sq_scale[scale];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (offset(k) < left) update_vector(k, first_scale, second_scale);
    }
  }

  __device__ void update_vector(int vector, float first_scale, float second_scale) {
    const int64_t i = begin + offset(vector);
    const int64_t s = states + offset(vector);
    T* const params = static_cast<T*>(args.param);
    Pack<float, width> masters = load<width>(args.master + i);
    Pack<T, width> copies;
    if constexpr (kHasParam) copies = load<width>(params + i);
    const Pack<float, width> grads = load<width>(args.grad + i);
    const auto codes = load<width>(static_cast<const int8_t*>(args.exp_avg) + s);
    const auto codes_sq = load<width>(static_cast<const uint8_t*>(args.exp_avg_sq) + s);
#pragma unroll
    for (int j = 0; j < width; ++j) {
      float p = masters.value[j];
      if constexpr (kHasParam) p = written_or_master(copies.value[j], p);
      float m = __fmul_rn(first_scale, signed_multiple(codes.value[j]));
      float v = __fmul_rn(second_scale, unsigned_multiple(codes_sq.value[j]));
      update_moments<decoupled>(constants, grads.value[j], p, m, v);
      first[vector * width + j] = m;
      second[vector * width + j] = v;
      p = updated(constants, p, m, v);
      masters.value[j] = p;
      if constexpr (kHasParam) copies.value[j] = from_float<T>(p);
    }
    store(args.master + i, masters);
    if constexpr (kHasParam) store(params + i, copies);
  }

  // Every lane calls it.
  template <class Code>
  __device__ void write(const float (&moment)[kPerLane], Code* code, float* scale) const {
    int32_t high = 0;
    uint32_t low = 0;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      high = greatest(high, integer_of(moment[k]));
      low = greatest(low, static_cast<uint32_t>(integer_of(moment[k])));
    }
    const float factor =
        scale_of(greatest_of_warp(high), greatest_of_warp(low), std::is_signed_v<Code>);
    const float reciprocal = reciprocal_of(factor);
    if (threadIdx.x % kLanes == 0) *scale = factor;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (offset(k) >= left) continue;
      Pack<Code, width> codes;
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const float multiple = is_coded(factor) ? __fmul_rn(reciprocal, moment[k * width + j]) : 0;
        codes.value[j] = static_cast<Code>(code_of<Code>(multiple));
      }
      store(code + states + offset(k), codes);
    }
  }
};

template <class T, bool decoupled, int width>
__device__ inline void update_block(const AdamArgs& args, const AdamConstants& constants,
                                    const UpdateSegment& segment, int64_t block) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t first = block * kBlockElements + lane * width;
  const int64_t scale = segment.states / kBlockElements + block;
  Block<T, decoupled, width> own{
      args, constants, segment.begin + first, segment.states + first, segment.numel - first,
      {},   {}};
  own.update(scale);
  own.write(own.first, static_cast<int8_t*>(args.exp_avg), args.exp_avg_scale + scale);
  own.write(own.second, static_cast<uint8_t*>(args.exp_avg_sq), args.exp_avg_sq_scale + scale);
}

// Each warp updates one block of a piece. It needs more registers than kBlocksAtOnce leaves.
template <class List, class T, bool decoupled, int width>
__global__ void __launch_bounds__(kThreads, 2)
    update_blocks(const __grid_constant__ List list, const __grid_constant__ AdamArgs args,
                  const __grid_constant__ AdamConstants on_host) {
  static_assert(List::kNumel / kBlockElements == kThreads / kLanes);
  __shared__ AdamConstants constants;
  __shared__ bool runs;
  if (!begin_update(args.on_device, constants, runs, [&] { return constants_of(args, on_host); }))
    return;
  const AdamConstants known = constants;
  for_each_piece(list, [&](const UpdateSegment& segment, int64_t begin, int64_t /*numel*/) {
    const int64_t block = begin / kBlockElements + threadIdx.x / kLanes;
    const int64_t left = segment.numel - block * kBlockElements;
    if (left >= kBlockElements) {
      update_block<T, decoupled, width>(args, known, segment, block);
    } else if (left > 0) {  // the last block of a segment
      update_block<T, decoupled, 1>(args, known, segment, block);
    }
  });
}

bool is_aligned(const AdamArgs& args) {
  const auto at = [](const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  for (int64_t i = 0; i < args.count; ++i) {
    if (args.segments[i].begin % 8 != 0) return false;
  }
  return at(args.master, 16) && at(args.grad, 16) && at(args.param, 16) && at(args.exp_avg, 4) &&
         at(args.exp_avg_sq, 4);
}

template <class T, bool decoupled>
Status run_adam(const AdamArgs& args, const Launch& launch) {
  for (int64_t i = 0; i < args.count; ++i) {
    if (args.segments[i].states % kBlockElements != 0) return Status::bad_argument;
  }
  const bool aligned = is_aligned(args);
  return run_update_list(args.segments, args.count, [&]<class List>(const List& list) {
    return queue(
        launch, list.pieces,
        aligned ? update_blocks<List, T, decoupled, 4> : update_blocks<List, T, decoupled, 1>, list,
        args, constants_on_host(args));
  });
}

template <class T>
Status run_adam(const AdamArgs& args, const Launch& launch) {
  return args.decoupled ? run_adam<T, true>(args, launch) : run_adam<T, false>(args, launch);
}

}  // namespace

Status adam_blocks_cuda(const AdamArgs& args, const Launch& launch) {
  if (args.segments == nullptr) {
    const UpdateSegment whole{.begin = 0, .states = 0, .numel = args.numel};
    AdamArgs list = args;
    list.segments = &whole;
    list.count = 1;
    return adam_blocks_cuda(list, launch);
  }
  if (args.param == nullptr) return run_adam<NoParam>(args, launch);
  return with_element(args.param_dtype, [&]<class T>(T) { return run_adam<T>(args, launch); });
}

}  // namespace zero_ext::kernels
