// digest of bytes, as little-endian words w of 8 bytes, the last ones filled up with zeros:
//   lane[j] = j, and for each stripe s of 32 words:
//   lane[j] = mix(lane[j]) * M + w[32 s + j]       mix(x) = x ^ (x >> 29), M odd, modulo 2^64
//   result  = number of bytes, and for each j:  result = mix(result) * N + lane[j]    N odd
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/digest.cpp
//
// Every step is a bijection of the lane, and of the word. So a change of a single word, and of a
// single bit with it, always changes the result; other changes are missed once in 2^64.
#include "kernels/digest.h"

#include <cstring>

#include "kernels/cpu/dispatch.h"

namespace zero_ext::kernels {
namespace {

constexpr int64_t kLanes = 32;  // enough multiplications under way for every instruction set
constexpr int64_t kStripeBytes = kLanes * 8;
constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15;
constexpr uint64_t kOfResult = 0xC2B2AE3D27D4EB4F;

ZERO_EXT_BODY uint64_t next(uint64_t lane, uint64_t word, uint64_t multiplier) {
  return (lane ^ (lane >> 29)) * multiplier + word;
}

struct Stripes {
  const unsigned char* data;
  uint64_t* lanes;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    uint64_t lane[kLanes];
    std::memcpy(lane, lanes, sizeof(lane));
    for (int64_t s = begin; s < end; ++s) {
      uint64_t words[kLanes];
      std::memcpy(words, data + s * kStripeBytes, sizeof(words));
      for (int64_t j = 0; j < kLanes; ++j) lane[j] = next(lane[j], words[j], kMultiplier);
    }
    std::memcpy(lanes, lane, sizeof(lane));
  }
};

}  // namespace

uint64_t digest(const void* data, int64_t bytes) {
  uint64_t lanes[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) lanes[j] = static_cast<uint64_t>(j);
  const int64_t stripes = bytes / kStripeBytes;
  const auto* from = static_cast<const unsigned char*>(data);
  const RangeBody range = compiled<Stripes>();
  Stripes whole{from, lanes};
  range(&whole, 0, stripes);
  if (const int64_t rest = bytes - stripes * kStripeBytes; rest > 0) {
    unsigned char last[kStripeBytes] = {};
    std::memcpy(last, from + stripes * kStripeBytes, static_cast<size_t>(rest));
    Stripes part{last, lanes};
    range(&part, 0, 1);
  }
  auto result = static_cast<uint64_t>(bytes);
  for (const uint64_t lane : lanes) result = next(result, lane, kOfResult);
  return result;
}

}  // namespace zero_ext::kernels
