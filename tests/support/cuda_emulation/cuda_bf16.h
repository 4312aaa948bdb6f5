// What csrc/kernels/cuda/*.cu use of CUDA's header of this name; see cuda_runtime.h beside this file.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

struct alignas(4) __nv_bfloat162 {
  uint16_t x, y;
};

// As the device's instruction: to nearest, ties to even, and 0x7FFF for every NaN.
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  const auto rounded = [](float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t nearest = (bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16;
    return static_cast<uint16_t>(std::isnan(value) ? 0x7FFFU : nearest);
  };
  return {rounded(a), rounded(b)};
}
