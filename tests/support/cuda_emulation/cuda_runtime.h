// A stand-in for CUDA's own header: what csrc/kernels/*.cu use of it, carried out by one host
// thread, so that their arithmetic and their indexing run where there is no GPU. Found before the
// real header by -I; see compare.cpp.
//
// Blocks run one after the other. The threads of a block are fibers that run in turn from one
// __syncthreads or shuffle to the next, so that all of them are at the same one. __shared__ is
// static for that reason. Nothing is concurrent: races and launch limits are for a real device to
// find.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1;
  explicit dim3(unsigned count) : x(count) {}
  dim3() = default;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }

// The fibers of a block run one at a time.
template <class T>
T atomicAdd(T* target, T value) {
  return std::exchange(*target, *target + value);
}
template <class T>
T atomicMin(T* target, T value) {
  return std::exchange(*target, std::min(*target, value));
}
template <class T>
T atomicMax(T* target, T value) {
  return std::exchange(*target, std::max(*target, value));
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// One: grids of 32 blocks, so that moderate lengths go round their loops several times.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration"; }

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                            unsigned long long*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

namespace emulation {

// Runs the entry again and again, each time until it is resumed no more. Switches do not enter the
// kernel, as those of swapcontext() do: a run makes some hundred millions.
struct Fiber {
  static constexpr size_t kStackBytes = 64 << 10;
  jmp_buf place;
  std::vector<char> stack;
  bool done = false;
};

inline std::vector<Fiber> fibers;
inline jmp_buf scheduler;
inline unsigned current;
inline uint64_t shuffled[1024];
inline void (*entry)(void*);
inline void* entry_context;

inline void yield() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

inline void start() {
  for (;;) {
    entry(entry_context);
    fibers[current].done = true;
    yield();
  }
}

inline void begin(Fiber& fiber) {
  fiber.stack.resize(Fiber::kStackBytes);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.data();
  context.uc_stack.ss_size = fiber.stack.size();
  makecontext(&context, start, 0);
  setcontext(&context);
}

// Returns when the fiber yields.
[[gnu::noinline]] inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.stack.empty()) begin(fiber);
  _longjmp(fiber.place, 1);
}

inline void run_block(unsigned threads) {
  if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
  for (unsigned t = 0; t < threads; ++t) fibers[t].done = false;
  for (unsigned running = threads; running > 0;) {
    running = 0;
    for (unsigned t = 0; t < threads; ++t) {
      if (fibers[t].done) continue;
      current = t;
      threadIdx = dim3(t);
      resume(fibers[t]);
      running += !fibers[t].done;
    }
  }
}

}  // namespace emulation

inline void __syncthreads() { emulation::yield(); }

// A lane reads a higher one, which runs after it: the value is still that of this shuffle.
template <class T>
T __shfl_down_sync(unsigned, T value, int delta) {
  const unsigned thread = emulation::current;
  emulation::shuffled[thread] = std::bit_cast<uint64_t>(value);
  emulation::yield();
  return thread % 32 + delta < 32 ? std::bit_cast<T>(emulation::shuffled[thread + delta]) : value;
}

// No lane goes on before all have read.
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const unsigned thread = emulation::current;
  emulation::shuffled[thread] = static_cast<uint64_t>(static_cast<uint32_t>(value));
  emulation::yield();
  const auto result = static_cast<T>(static_cast<uint32_t>(emulation::shuffled[thread ^ mask]));
  emulation::yield();
  return result;
}

template <class T>
T __reduce_max_sync(unsigned lanes, T value) {
  for (int other = 16; other > 0; other /= 2) {
    value = std::max(value, __shfl_xor_sync(lanes, value, other));
  }
  return value;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  if (config->gridDim.x == 0 || config->blockDim.x > 1024) return cudaErrorInvalidConfiguration;
  auto call = [&] { kernel(arguments...); };
  emulation::entry = [](void* context) { (*static_cast<decltype(call)*>(context))(); };
  emulation::entry_context = &call;
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  for (unsigned block = 0; block < config->gridDim.x; ++block) {
    blockIdx = dim3(block);
    emulation::run_block(config->blockDim.x);
  }
  return cudaSuccess;
}
