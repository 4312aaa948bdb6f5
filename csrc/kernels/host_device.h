// Before a function that hosts and devices call: compiled for both, and always inlined.
#pragma once

#if defined(__CUDACC__)
#define ZERO_EXT_EVERYWHERE __host__ __device__ __forceinline__
#else
#define ZERO_EXT_EVERYWHERE inline __attribute__((always_inline))
#endif
