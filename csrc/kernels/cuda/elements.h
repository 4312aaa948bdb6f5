// Elements of the three dtypes on the device, and vectors of them.
//
// The conversions are those of cpu/elements.h, operation by operation. So both devices agree in
// every bit, except for a NaN's payload, which the device's arithmetic does not keep. Intrinsics
// with a rounding in their name are never contracted or approximated, whatever flags nvcc has.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/kernels.h"

namespace zero_ext::kernels::device {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

__device__ inline float to_float(Float16 value) {
  const uint32_t magnitude = (static_cast<uint32_t>(value.bits) & 0x7FFFU) << 13;
  const float normal = __fmul_rn(__uint_as_float(magnitude + (224U << 23)), 0x1p-112F);
  const float subnormal = __fsub_rn(__uint_as_float((magnitude >> 13) | (126U << 23)), 0.5F);
  const uint32_t sign = (static_cast<uint32_t>(value.bits) & 0x8000U) << 16;
  const float magnitude_value = magnitude < (1U << 23) ? subnormal : normal;
  return __uint_as_float(sign | __float_as_uint(magnitude_value));
}

template <class T>
__device__ inline T from_float(float value) = delete;

template <>
__device__ inline float from_float<float>(float value) {
  return value;
}

template <>
__device__ inline BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  return {static_cast<uint16_t>(is_nan ? 0x7FC0U : rounded)};
}

template <>
__device__ inline Float16 from_float<Float16>(float value) {
  const uint32_t bits = __float_as_uint(value);
  const float magnitude = __uint_as_float(bits & 0x7FFFFFFFU);
  const float scaled = __fmul_rn(__fmul_rn(magnitude, 0x1p+112F), 0x1p-110F);
  const uint32_t doubled = bits + bits;
  const uint32_t exponent = doubled & 0xFF000000U;
  const uint32_t bias = exponent < 0x71000000U ? 0x71000000U : exponent;
  const uint32_t sum =
      __float_as_uint(__fadd_rn(__uint_as_float((bias >> 1) + 0x07800000U), scaled));
  const uint32_t rounded = ((sum >> 13) & 0x7C00U) + (sum & 0x0FFFU);
  const uint32_t unsigned_bits = doubled > 0xFF000000U ? 0x7E00U : rounded;
  return {static_cast<uint16_t>(((bits >> 16) & 0x8000U) | unsigned_bits)};
}

__device__ inline bool same_bits(float a, float b) {
  return __float_as_uint(a) == __float_as_uint(b);
}
__device__ inline bool same_bits(BFloat16 a, BFloat16 b) { return a.bits == b.bits; }
__device__ inline bool same_bits(Float16 a, Float16 b) { return a.bits == b.bits; }

// See Note [A written parameter wins over its master] in kernels.h.
template <class T>
__device__ inline bool is_written(T param, float master) {
  return !same_bits(from_float<T>(master), param);
}

template <class T>
__device__ inline float written_or_master(T param, float master) {
  return is_written(param, master) ? to_float(param) : master;
}

// As in cpu/elements.h: kInfinityBits or more for infinity and NaN.
constexpr int32_t kInfinityBits = 0x7F800000;

__device__ inline int32_t magnitude_bits(float value) {
  return static_cast<int32_t>(__float_as_uint(value) & 0x7FFFFFFFU);
}

__device__ inline int32_t largest_of(int32_t a, int32_t b) { return a > b ? a : b; }

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

// Calls visit(T{}) with the element type of `dtype`.
template <class Visit>
Status with_element(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::f32:
      return visit(float{});
    case DType::bf16:
      return visit(BFloat16{});
    case DType::f16:
      return visit(Float16{});
  }
  return Status::bad_argument;
}

}  // namespace zero_ext::kernels::device
