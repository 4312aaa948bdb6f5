// Vectors of elements on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "kernels/elements.h"

namespace zero_ext::kernels::device {

// N neighbouring elements, loaded or stored by one instruction.
template <class T, int N>
struct Pack {
  T value[N];
};

// The type that this instruction loads or stores.
template <int bytes>
struct RawOf;
template <>
struct RawOf<1> {
  using Type = uint8_t;
};
template <>
struct RawOf<2> {
  using Type = uint16_t;
};
template <>
struct RawOf<4> {
  using Type = uint32_t;
};
template <>
struct RawOf<8> {
  using Type = uint2;
};
template <>
struct RawOf<16> {
  using Type = uint4;
};

template <int N, class T>
__device__ inline Pack<T, N> load(const T* source) {
  using Raw = typename RawOf<static_cast<int>(sizeof(T)) * N>::Type;
  const Raw raw = *reinterpret_cast<const Raw*>(source);
  Pack<T, N> pack;
  memcpy(&pack, &raw, sizeof(raw));
  return pack;
}

// A store of a whole vector. Where the compiler cannot see the alignment, it splits an assignment
// into four stores.
template <class Raw>
__device__ inline void store_raw(Raw* target, const Raw& raw) {
  *target = raw;
}

#if defined(__CUDACC__)
__device__ inline void store_raw(uint2* target, const uint2& raw) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};"
               :
               : "l"(__cvta_generic_to_global(target)), "r"(raw.x), "r"(raw.y)
               : "memory");
}

__device__ inline void store_raw(uint4* target, const uint4& raw) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(target)), "r"(raw.x), "r"(raw.y), "r"(raw.z),
                 "r"(raw.w)
               : "memory");
}
#endif

template <int N, class T>
__device__ inline void store(T* target, const Pack<T, N>& pack) {
  using Raw = typename RawOf<static_cast<int>(sizeof(T)) * N>::Type;
  Raw raw;
  memcpy(&raw, &pack, sizeof(raw));
  store_raw(reinterpret_cast<Raw*>(target), raw);
}

// Elements of one vector: the widest type fills 16 bytes, narrower types fill 8. So the bytes that
// neighbouring threads touch always lie side by side.
template <class... T>
constexpr int vector_numel() {
  int64_t widest = 1;
  for (const int64_t bytes : {static_cast<int64_t>(sizeof(T))...}) {
    widest = bytes > widest ? bytes : widest;
  }
  return static_cast<int>(16 / widest);
}

}  // namespace zero_ext::kernels::device
