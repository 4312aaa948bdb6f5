// adam of int8 moments, block by block; formula: AdamArgs in kernels.h.
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/adamw_blocks.cu
//
// Memory bound: reads grad; reads and writes master, the parameter and 1 byte of each moment: 20
// bytes per element with a half-precision parameter. A warp updates a block. It loads the whole
// block before it uses any of it, and keeps the moments in registers until the scale is known.
#include <cuda_bf16.h>

#include <cmath>

#include "kernels/cuda/table.h"
#include "kernels/cuda/update.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

constexpr int kLanes = 32;
constexpr int kPerLane = static_cast<int>(kBlockElements) / kLanes;
constexpr int kCodes = 256;

// The greatest of a warp's values, in every lane.
template <class T>
__device__ inline T greatest_of_warp(T value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xFFFFFFFFU, value);
#else
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) {
    value = greatest(value, __shfl_xor_sync(0xFFFFFFFFU, value, other));
  }
  return value;
#endif
}

// What each code stands for. An update spends much of its arithmetic on this, so the kernel looks
// it up in shared memory.
struct Multiples {
  float of_signed[kCodes];
  float of_unsigned[kCodes];

  __device__ float of(int8_t code) const { return of_signed[static_cast<uint8_t>(code)]; }
  __device__ float of(uint8_t code) const { return of_unsigned[code]; }
};

// from_float of each element. One instruction makes two bf16, but has other bits for NaN.
template <class T, int N>
__device__ inline Pack<T, N> from_floats(const Pack<float, N>& from) {
  Pack<T, N> to;
  if constexpr (std::is_same_v<T, BFloat16> && N % 2 == 0) {
    bool has_nan = false;
#pragma unroll
    for (int k = 0; k < N; k += 2) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(from.value[k], from.value[k + 1]);
      memcpy(&to.value[k], &two, sizeof(two));
      has_nan |= std::isnan(from.value[k]) || std::isnan(from.value[k + 1]);
    }
    if (!has_nan) return to;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) to.value[k] = from_float<T>(from.value[k]);
  return to;
}

template <class T, int N>
__device__ inline bool same_words(const Pack<T, N>& a, const Pack<T, N>& b) {
  constexpr int kWords = (static_cast<int>(sizeof(a)) + 3) / 4;
  uint32_t words[2][kWords] = {};
  memcpy(words[0], &a, sizeof(a));
  memcpy(words[1], &b, sizeof(b));
  uint32_t differ = 0;
#pragma unroll
  for (int k = 0; k < kWords; ++k) differ |= words[0][k] ^ words[1][k];
  return differ == 0;
}

// written_or_master of each element. Few vectors hold a written one.
template <class T, int N>
__device__ inline void adopt_writes(const Pack<T, N>& params, Pack<float, N>& masters) {
  const Pack<T, N> copies = from_floats<T>(masters);
  if (same_words(copies, params)) return;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (bits_of(copies.value[k]) != bits_of(params.value[k]))
      masters.value[k] = to_float(params.value[k]);
  }
}

// One warp's view of a block. Vectors of `width` elements lie side by side over the lanes.
template <class T, bool decoupled, int width>
struct Block {
  static constexpr int kVectors = kPerLane / width;

  const AdamArgs& args;
  const AdamConstants& constants;
  const Multiples& multiples;
  // Of this lane's first vector.
  int64_t begin;
  int64_t states;
  int64_t left;  // elements up to the end of the segment
  Pack<float, width> master[kVectors] = {};
  Pack<T, width> param[kVectors] = {};
  Pack<float, width> grad[kVectors] = {};
  Pack<int8_t, width> code[kVectors] = {};
  Pack<uint8_t, width> code_sq[kVectors] = {};
  float first[kPerLane] = {};
  float second[kPerLane] = {};

  __device__ static int64_t offset(int vector) { return int64_t{vector} * kLanes * width; }
  // Only whole blocks have vectors of several elements.
  __device__ bool has(int vector) const { return width > 1 || offset(vector) < left; }
  __device__ T* params() const { return static_cast<T*>(args.param) + begin; }
  __device__ int8_t* codes() const { return static_cast<int8_t*>(args.exp_avg) + states; }
  __device__ uint8_t* codes_sq() const { return static_cast<uint8_t*>(args.exp_avg_sq) + states; }

  // Every lane calls it.
  __device__ void update(int64_t scale) {
    load();
    update_all_moments(args.exp_avg_scale[scale], args.exp_avg_sq_scale[scale]);
    const float first_scale = scale_of_warp<true>(first);
    const float second_scale = scale_of_warp<false>(second);
    update_params();
    if (threadIdx.x % kLanes == 0) {
      args.exp_avg_scale[scale] = first_scale;
      args.exp_avg_sq_scale[scale] = second_scale;
    }
    write(first, first_scale, codes());
    write(second, second_scale, codes_sq());
  }

  __device__ void load() {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!has(k)) continue;
      code[k] = device::load<width>(codes() + offset(k));
      code_sq[k] = device::load<width>(codes_sq() + offset(k));
      grad[k] = device::load<width>(args.grad + begin + offset(k));
      master[k] = device::load<width>(args.master + begin + offset(k));
      if constexpr (kHasParam<T>) param[k] = device::load<width>(params() + offset(k));
    }
  }

  __device__ void update_all_moments(float first_scale, float second_scale) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!has(k)) continue;
      if constexpr (kHasParam<T>) adopt_writes(param[k], master[k]);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        float m = first_scale * multiples.of(code[k].value[j]);
        float v = second_scale * multiples.of(code_sq[k].value[j]);
        const float g = decayed<decoupled>(constants, grad[k].value[j], master[k].value[j]);
        update_moments(constants, g, m, v);
        first[k * width + j] = m;
        second[k * width + j] = v;
      }
    }
  }

  // Every lane calls it.
  template <bool is_signed>
  __device__ static float scale_of_warp(const float (&moment)[kPerLane]) {
    int32_t high = 0;
    uint32_t low = 0;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      high = greatest(high, integer_of(moment[k]));
      low = greatest(low, static_cast<uint32_t>(integer_of(moment[k])));
    }
    return scale_of(is_signed ? greatest_of_warp(high) : 0, greatest_of_warp(low), is_signed);
  }

  __device__ void update_params() {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!has(k)) continue;
#pragma unroll
      for (int j = 0; j < width; ++j) {
        float& p = master[k].value[j];
        p = updated(constants, p, first[k * width + j], second[k * width + j]);
      }
      store(args.master + begin + offset(k), master[k]);
      if constexpr (kHasParam<T>) store(params() + offset(k), from_floats<T>(master[k]));
    }
  }

  template <class Code>
  __device__ void write(const float (&moment)[kPerLane], float scale, Code* to) const {
    const float reciprocal = reciprocal_of(scale);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!has(k)) continue;
      Pack<Code, width> coded = {};
#pragma unroll
      for (int j = 0; is_coded(scale) && j < width; ++j) {
        coded.value[j] = static_cast<Code>(code_of<Code>(reciprocal * moment[k * width + j]));
      }
      store(to + offset(k), coded);
    }
  }
};

template <class T, bool decoupled, int width>
__device__ inline void update_block(const AdamArgs& args, const AdamConstants& constants,
                                    const Multiples& multiples, const UpdateSegment& segment,
                                    int64_t block) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t first = block * kBlockElements + lane * width;
  Block<T, decoupled, width> own{args,
                                 constants,
                                 multiples,
                                 segment.begin + first,
                                 segment.states + first,
                                 segment.numel - first};
  own.update(segment.states / kBlockElements + block);
}

// Each warp updates one block of a piece.
template <class List, class T, bool decoupled, int width>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    update_blocks(const __grid_constant__ List list, const __grid_constant__ AdamArgs args,
                  const __grid_constant__ AdamConstants on_host) {
  static_assert(List::kNumel / kBlockElements == kThreads / kLanes);
  static_assert(kThreads == kCodes);
  __shared__ AdamConstants constants;
  __shared__ Multiples multiples;
  __shared__ bool runs;
  const auto code = static_cast<int32_t>(threadIdx.x);
  multiples.of_signed[code] = signed_multiple(static_cast<int8_t>(code));
  multiples.of_unsigned[code] = unsigned_multiple(code);
  if (!begin_update(args, on_host, constants, runs)) return;
  for_each_piece(list, [&](const UpdateSegment& segment, int64_t begin, int64_t /*numel*/) {
    const int64_t block = begin / kBlockElements + threadIdx.x / kLanes;
    const int64_t left = segment.numel - block * kBlockElements;
    if (left >= kBlockElements) {
      update_block<T, decoupled, width>(args, constants, multiples, segment, block);
    } else if (left > 0) {  // the last block of a segment
      update_block<T, decoupled, 1>(args, constants, multiples, segment, block);
    }
  });
}

bool is_aligned(const AdamArgs& args, const UpdateSegment* segments, int64_t count) {
  const auto at = [](const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (segments[i].begin % 8 != 0) return false;
  }
  return at(args.master, 16) && at(args.grad, 16) && at(args.param, 16) && at(args.exp_avg, 4) &&
         at(args.exp_avg_sq, 4);
}

template <class T, bool decoupled>
Status run_blocks(const AdamArgs& args, const Launch& launch) {
  return with_segments(args, [&](const UpdateSegment* segments, int64_t count) {
    const bool aligned = is_aligned(args, segments, count);
    return run_pieces<kShortPieceNumel>(segments, count, [&]<class List>(const List& list) {
      return queue(
          launch, list.pieces,
          aligned ? update_blocks<List, T, decoupled, 4> : update_blocks<List, T, decoupled, 1>,
          list, args, constants_on_host(args));
    });
  });
}

}  // namespace

Status adam_blocks_cuda(const AdamArgs& args, const Launch& launch) {
  return with_param(args, [&]<class T>() {
    return args.decoupled ? run_blocks<T, true>(args, launch) : run_blocks<T, false>(args, launch);
  });
}

}  // namespace zero_ext::kernels
