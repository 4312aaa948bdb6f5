// The beginning of every message: where(rank, unit) says whose log a reader is looking at.
#pragma once

#include <cstdint>
#include <string>

namespace zero_ext {

inline std::string where(int64_t rank) { return "zero_ext [rank " + std::to_string(rank) + "]: "; }

inline std::string where(int64_t rank, const std::string& unit) {
  return "zero_ext [rank " + std::to_string(rank) + ", unit '" + unit + "']: ";
}

}  // namespace zero_ext
