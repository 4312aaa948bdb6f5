// Runs a kernel's body over ranges and lists on the device.
//
// A body is a small struct of pointers with these members, where N is kWidth or 1:
//
//   kWidth                         elements of a vector
//   kUnroll                        vectors that a thread loads before it uses the first of them
//   Loaded<N>                      the values that it reads of N neighbouring elements
//   int64_t head(numel)            elements before the first vector, see head_numel
//   Loaded<N> load<N>(i)           reads elements [i, i + N)
//   int32_t finish<N>(i, loaded)   writes them; returns the largest magnitude_bits, or 0
//
// Both N run the same operations on each element, and no element's result depends on another's. So
// neither the grid nor the vectors can change a bit.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/vectors.h"
#include "kernels/kernels.h"

namespace zero_ext::kernels::device {

constexpr int kThreads = 256;
// 80 registers per thread at most. Left to itself ptxas spills some for a fourth or later block, which no
// kernel here needs to fill the memory's bandwidth.
constexpr int kBlocksAtOnce = 3;
// Several times the blocks that are resident at once, so that the hardware evens out late blocks.
constexpr int64_t kBlocksPerMultiprocessor = 32;

template <int N, class T>
__device__ inline uint32_t numel_to_vector(const T* array) {
  constexpr uintptr_t kBytes = sizeof(T) * N;
  return static_cast<uint32_t>((0 - reinterpret_cast<uintptr_t>(array)) % kBytes / sizeof(T));
}

// The number of elements before the first one at which a vector of N may begin in every array;
// `numel` where there is none.
template <int N, class First, class... Rest>
__device__ inline int64_t head_numel(int64_t numel, const First* first, const Rest*... rest) {
  const uint32_t head = numel_to_vector<N>(first);
  const bool agree = (true && ... && (numel_to_vector<N>(rest) == head));
  return agree && head < numel ? static_cast<int64_t>(head) : numel;
}

// Units of N elements: unit u is at u * N, or `gap` later from unit `gap_at` on.
struct Units {
  int64_t count;
  int64_t begin;
  int64_t gap_at;
  int64_t gap;

  template <int N>
  __device__ int64_t index(int64_t unit) const {
    return begin + unit * N + (unit >= gap_at ? gap : 0);
  }
};

// The part of `units` that belongs to `thread` of `threads`. All loads of kUnroll units are issued
// before the first is used, so that enough bytes are in flight to fill the memory's bandwidth.
template <int N, class Body>
__device__ inline int32_t walk_units(const Body& body, const Units& units, int64_t thread,
                                     int64_t threads) {
  constexpr int kUnroll = Body::kUnroll;
  using Loaded = typename Body::template Loaded<N>;
  int32_t largest = 0;
  int64_t unit = thread;
  for (; unit + (kUnroll - 1) * threads < units.count; unit += kUnroll * threads) {
    Loaded loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      loaded[k] = body.template load<N>(units.index<N>(unit + k * threads));
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t i = units.index<N>(unit + k * threads);
      largest = greatest(largest, body.template finish<N>(i, loaded[k]));
    }
  }
  for (; unit < units.count; unit += threads) {
    const int64_t i = units.index<N>(unit);
    largest = greatest(largest, body.template finish<N>(i, body.template load<N>(i)));
  }
  return largest;
}

template <class Body>
__device__ inline int32_t walk(const Body& body, int64_t numel, int64_t thread, int64_t threads) {
  constexpr int kWidth = Body::kWidth;
  const int64_t head = body.head(numel);
  const int64_t vectors = (numel - head) / kWidth;
  const int64_t covered = vectors * kWidth;
  const Units middle{.count = vectors, .begin = head, .gap_at = vectors, .gap = 0};
  const Units ends{.count = numel - covered, .begin = 0, .gap_at = head, .gap = covered};
  const int32_t largest = walk_units<kWidth>(body, middle, thread, threads);
  return greatest(largest, walk_units<1>(body, ends, thread, threads));
}

// Several threads may find a non-finite value; all of them store the same 1.
__device__ inline void report_nonfinite(int32_t largest, int32_t* nonfinite) {
  if (largest >= kInfinityBits && nonfinite != nullptr) *nonfinite = 1;
}

__device__ inline int64_t thread_of_grid() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ inline int64_t threads_of_grid() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

template <class Body>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    over_range(const __grid_constant__ Body body, int64_t numel, int32_t* nonfinite) {
  report_nonfinite(walk(body, numel, thread_of_grid(), threads_of_grid()), nonfinite);
}

// Note [Lists in the kernel's parameters]
// A list is passed by value in the parameters of its launch (32,764 bytes at most, since CUDA
// 12.1). The caller may free the list at once, nothing is allocated, copied or waited for, and a
// captured graph keeps the list. Long lists take one launch per kLongList segments. Segments are
// cut into pieces of kPieceNumel that the blocks take in turn. So one long segment occupies all
// blocks.
constexpr int kShortList = 64;
constexpr int kLongList = 896;
constexpr int64_t kPieceNumel = 8192;

template <class Segment, int capacity, int64_t piece_numel = kPieceNumel>
struct SegmentPack {
  static constexpr int64_t kNumel = piece_numel;
  int32_t count;
  int32_t pieces;
  int32_t first_piece[capacity];  // of each segment
  Segment segment[capacity];      // none is empty
};

// The segment that a piece belongs to: the last segment whose first piece is at or before it.
template <class Pack>
__device__ inline int32_t segment_of(const Pack& pack, int64_t piece) {
  int32_t first = 0;
  int32_t after = pack.count;
  while (after - first > 1) {
    const int32_t middle = first + (after - first) / 2;
    if (pack.first_piece[middle] <= piece) {
      first = middle;
    } else {
      after = middle;
    }
  }
  return first;
}

// Calls visit(segment, begin, numel) for each of this block's pieces of a list.
template <class Pack, class Visit>
__device__ inline void for_each_piece(const Pack& pack, const Visit& visit) {
  for (int64_t piece = blockIdx.x; piece < pack.pieces; piece += gridDim.x) {
    const int32_t at = segment_of(pack, piece);
    const int64_t begin = (piece - pack.first_piece[at]) * Pack::kNumel;
    const int64_t left = pack.segment[at].numel - begin;
    visit(pack.segment[at], begin, left < Pack::kNumel ? left : Pack::kNumel);
  }
}

// `body.at(segment, begin)` is the body for the elements of a segment from `begin` on.
template <class Pack, class Body>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    over_segments(const __grid_constant__ Pack pack, const __grid_constant__ Body body,
                  int32_t* nonfinite) {
  for_each_piece(pack, [&](const auto& segment, int64_t begin, int64_t numel) {
    const int32_t largest = walk(body.at(segment, begin), numel, threadIdx.x, blockDim.x);
    report_nonfinite(largest, segment.nonfinite != nullptr ? segment.nonfinite : nonfinite);
  });
}

inline Status checked(cudaError_t error, const Launch& launch) {
  if (error == cudaSuccess) return Status::ok;
  // The status reports this error. Left in place, the next caller of CUDA would be blamed for it.
  static_cast<void>(cudaGetLastError());
  if (launch.error != nullptr) *launch.error = cudaGetErrorString(error);
  return Status::launch_failed;
}

// Queues kernel(arguments...) in `blocks_wanted` blocks, or in as many as the device can use.
template <class... Parameters, class... Arguments>
Status queue(const Launch& launch, int64_t blocks_wanted, void (*kernel)(Parameters...),
             const Arguments&... arguments) {
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return checked(error, launch);
  const int64_t most = multiprocessors * kBlocksPerMultiprocessor;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks_wanted < most ? blocks_wanted : most));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  return checked(cudaLaunchKernelEx(&config, kernel, arguments...), launch);
}

// The number of blocks with which every thread has kUnroll vectors.
template <class Body>
int64_t blocks_for(int64_t numel) {
  constexpr int64_t kRound = int64_t{kThreads} * Body::kUnroll * Body::kWidth;
  return (numel + kRound - 1) / kRound;
}

template <class Body>
Status run(const Launch& launch, int64_t numel, const Body& body, int32_t* nonfinite = nullptr) {
  if (numel == 0) return Status::ok;
  return queue(launch, blocks_for<Body>(numel), over_range<Body>, body, numel, nonfinite);
}

// Calls queue_pack(pack) for each launch's part of a list.
template <class Pack, class Segment, class Queue>
Status for_each_pack(const Segment* segments, int64_t count, const Queue& queue_pack) {
  constexpr auto kCapacity = static_cast<int32_t>(std::extent_v<decltype(Pack::segment)>);
  Pack pack{};
  for (int64_t i = 0; i < count; ++i) {
    if (segments[i].numel > 0) {
      pack.first_piece[pack.count] = pack.pieces;
      pack.segment[pack.count] = segments[i];
      pack.pieces += static_cast<int32_t>((segments[i].numel + Pack::kNumel - 1) / Pack::kNumel);
      ++pack.count;
    }
    const bool is_last = i + 1 == count;
    if (pack.count == 0 || (pack.count < kCapacity && !is_last)) continue;
    const Status status = queue_pack(pack);
    if (status != Status::ok) return status;
    pack.count = 0;
    pack.pieces = 0;
  }
  return Status::ok;
}

// The most elements whose pieces SegmentPack::pieces can count.
template <int64_t piece_numel = kPieceNumel>
constexpr int64_t kMostListNumel = (int64_t{1} << 30) * piece_numel;

template <int64_t piece_numel = kPieceNumel, class Segment>
bool is_list(const Segment* segments, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (segments[i].numel < 0 || segments[i].numel > kMostListNumel<piece_numel> - total)
      return false;
    total += segments[i].numel;
  }
  return true;
}

// Calls queue_pack(pack) for each launch's part of a list, which is cut into pieces.
template <int64_t piece_numel = kPieceNumel, class Segment, class Queue>
Status run_pieces(const Segment* segments, int64_t count, const Queue& queue_pack) {
  using Short = SegmentPack<Segment, kShortList, piece_numel>;
  using Long = SegmentPack<Segment, kLongList, piece_numel>;
  if (!is_list<piece_numel>(segments, count)) return Status::bad_argument;
  return count <= kShortList ? for_each_pack<Short>(segments, count, queue_pack)
                             : for_each_pack<Long>(segments, count, queue_pack);
}

template <class Segment, class Body>
Status run_list(const Launch& launch, const Segment* segments, int64_t count, const Body& body,
                int32_t* nonfinite) {
  return run_pieces(segments, count, [&]<class Pack>(const Pack& pack) {
    return queue(launch, pack.pieces, over_segments<Pack, Body>, pack, body, nonfinite);
  });
}

// Of updates, whose arithmetic hides the search for a piece's segment, and of find_nonfinite. As
// many blocks as for one range.
constexpr int64_t kShortPieceNumel = 2048;

}  // namespace zero_ext::kernels::device
