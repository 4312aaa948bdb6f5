// Elements of the three dtypes, for host and device.
//
// Every conversion is exact or rounds to nearest even, as torch's does. Subnormals are kept,
// overflow becomes infinity, NaN becomes the dtype's quiet NaN. Conversions have no branches, so
// that loops over them vectorise. They use integer or exact float operations, so that devices and
// instruction sets agree in every bit, except for a NaN's payload, which a device's arithmetic does
// not keep. They are right with flushed subnormals (torch.set_flush_denormal) too. Each operator
// rounds once: the compile lines have -ffp-contract=off or -fmad=false.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/host_device.h"
#include "kernels/kernels.h"

namespace zero_ext::kernels {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

ZERO_EXT_EVERYWHERE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
ZERO_EXT_EVERYWHERE float float_of(int32_t bits) { return __builtin_bit_cast(float, bits); }
ZERO_EXT_EVERYWHERE int32_t integer_of(float value) { return __builtin_bit_cast(int32_t, value); }

ZERO_EXT_EVERYWHERE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
ZERO_EXT_EVERYWHERE uint32_t bits_of(BFloat16 value) { return value.bits; }
ZERO_EXT_EVERYWHERE uint32_t bits_of(Float16 value) { return value.bits; }

// `condition ? a : b` as mask arithmetic. With a conditional expression the compiler moves the
// float operations that lead to a or b into branches, and the CPU's loop stays scalar.
ZERO_EXT_EVERYWHERE uint32_t select(bool condition, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return condition ? a : b;
#else
  const uint32_t mask = 0U - static_cast<uint32_t>(condition);
  return b ^ ((a ^ b) & mask);
#endif
}

ZERO_EXT_EVERYWHERE float select(bool condition, float a, float b) {
  return float_of(select(condition, bits_of(a), bits_of(b)));
}

ZERO_EXT_EVERYWHERE float to_float(float value) { return value; }

ZERO_EXT_EVERYWHERE float to_float(BFloat16 value) {
  return float_of(static_cast<uint32_t>(value.bits) << 16);
}

// Normal numbers, infinity and NaN: an exact multiplication rebiases the exponent. Subnormals: the
// mantissa is placed into the last bits of 0.5, and 0.5 is subtracted. (After M. Dukhan's FP16
// library, which c10 uses as well.)
ZERO_EXT_EVERYWHERE float to_float(Float16 value) {
  const uint32_t magnitude = (static_cast<uint32_t>(value.bits) & 0x7FFFU) << 13;
  const float normal = float_of(magnitude + (224U << 23)) * 0x1p-112F;
  const float subnormal = float_of((magnitude >> 13) | (126U << 23)) - 0.5F;
  const uint32_t sign = (static_cast<uint32_t>(value.bits) & 0x8000U) << 16;
  const uint32_t unsigned_bits =
      select(magnitude < (1U << 23), bits_of(subnormal), bits_of(normal));
  return float_of(sign | unsigned_bits);
}

// The bits of the rounded value, still 32 bits wide, so that the vector code can compare them
// without narrowing.
template <class T>
uint32_t rounded_bits(float value) = delete;

template <>
ZERO_EXT_EVERYWHERE uint32_t rounded_bits<float>(float value) {
  return bits_of(value);
}

template <>
ZERO_EXT_EVERYWHERE uint32_t rounded_bits<BFloat16>(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return value != value ? 0x7FC0U : rounded;
}

// The float adder does the rounding. Adding a power of two shifts the last place of the result to
// the end of the mantissa. That power is 2^13 above that place, or more for subnormals. Scaling up
// first turns values that overflow into infinity.
template <>
ZERO_EXT_EVERYWHERE uint32_t rounded_bits<Float16>(float value) {
  const uint32_t bits = bits_of(value);
  const float scaled = (float_of(bits & 0x7FFFFFFFU) * 0x1p+112F) * 0x1p-110F;
  const uint32_t doubled = bits + bits;
  const uint32_t exponent = doubled & 0xFF000000U;
  const uint32_t bias = select(exponent < 0x71000000U, 0x71000000U, exponent);
  const uint32_t sum = bits_of(float_of((bias >> 1) + 0x07800000U) + scaled);
  const uint32_t rounded = ((sum >> 13) & 0x7C00U) + (sum & 0x0FFFU);
  return ((bits >> 16) & 0x8000U) | select(doubled > 0xFF000000U, 0x7E00U, rounded);
}

template <class T>
ZERO_EXT_EVERYWHERE T from_float(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return {static_cast<uint16_t>(rounded_bits<T>(value))};
  }
}

// See Note [A written parameter wins over its master] in kernels.h.
template <class T>
ZERO_EXT_EVERYWHERE bool is_written(T param, float master) {
  return rounded_bits<T>(master) != bits_of(param);
}

template <class T>
ZERO_EXT_EVERYWHERE float written_or_master(T param, float master) {
  return float_of(is_written(param, master) ? bits_of(to_float(param)) : bits_of(master));
}

// An integer that grows with |value| and is kInfinityBits or more for infinity and NaN. The largest
// of a range costs two cheap operations per value and no branch.
constexpr int32_t kInfinityBits = 0x7F800000;

ZERO_EXT_EVERYWHERE int32_t magnitude_bits(float value) { return integer_of(value) & 0x7FFFFFFF; }

// Comparing as integers orders positive floats, and puts NaN last.
template <class T>
ZERO_EXT_EVERYWHERE T greatest(T a, T b) {
  return a > b ? a : b;
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

}  // namespace zero_ext::kernels
